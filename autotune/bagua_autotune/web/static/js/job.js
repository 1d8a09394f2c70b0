// One job's page: fetches, and hands each part what it shows.

import { download, getJson } from "./api.js";
import { byId, setText } from "./dom.js";
import { showDetails, showEvents, showStockDdp } from "./job/details.js";
import { showHeadline, showNow, showWarnings } from "./job/headline.js";
import { Part, showBuckets, showImportance } from "./job/parts.js";
import { livesTable, trialsTable } from "./job/tables.js";
import { keepLive } from "./live.js";
import { closed } from "./plots/axes.js";
import { bestPlot } from "./plots/best.js";
import { byKnobPlot } from "./plots/by_knob.js";
import { ranksPlot } from "./plots/ranks.js";
import { stepsPlot } from "./plots/steps.js";
import { learnWords } from "./words.js";

const WAIT_MS = { tuning: 1000, confirming: 1000, finished: 5000, ended: 30_000 };

const id = location.pathname.split("/").pop(); // as it stands in the address, encoded
const path = (what) => `jobs/${id}/${what}`;

const showSteps = stepsPlot();
const showByKnob = byKnobPlot();
const showBest = bestPlot();
const showRanks = ranksPlot();
const showTrials = trialsTable();
const showLives = livesTable();

const bestOf = ({ trials }) => trials.find((trial) => trial.is_best);

let shown = null;
// What takes long to work out comes when it comes, and until then what was there stays.
const curve = new Part(path("curve"), { curves: [], expected_gain: null, importance: { shares: [], unknown: "" } }, "knob-trouble", showCurve);
const buckets = new Part(path("buckets"), null, "buckets-trouble", showLayout);

keepLive(async () => {
  const overview = await getJson(path("overview"));
  learnWords(overview.knob_words);
  byId("content").hidden = false; // plots need to know their size
  showHeadline(overview);
  showNow(overview);
  showWarnings(overview);
  const isFirst = shown === null;
  if (overview !== shown) show(overview);
  if (isFirst && location.hash) byId(location.hash.slice(1))?.scrollIntoView();
  // While the service works out another one it tells what it has, which rests on fewer trials.
  const isNewest = ({ trials }) => trials >= closed(overview).length;
  curve.follow(`${overview.job.round} ${closed(overview).length} ${bestOf(overview)?.index}`, isNewest);
  buckets.follow(JSON.stringify(bestOf(overview)?.configuration ?? null));
  return WAIT_MS[overview.job.state];
});

function show(overview) {
  shown = overview;
  setText(byId("why"), overview.why);
  showSteps(overview);
  showCurve();
  showBest(overview);
  showRanks(overview);
  showTrials(overview);
  showLives(overview);
  showStockDdp(overview);
  showDetails(overview, buckets.data);
  showEvents(overview.events);
}

function showCurve() {
  showByKnob(shown, curve.data, buckets.data?.bytes ?? null);
  showImportance(shown, curve.data.importance);
}

function showLayout() {
  showBuckets(buckets.data);
  showCurve();
  showDetails(shown, buckets.data);
}

for (const [button, file] of [["download-csv", "trials.csv"], ["download-json", "export.json"]]) {
  byId(button).addEventListener("click", async () => {
    try {
      await download(path(file));
    } catch (error) {
      byId("trouble").textContent = `The download failed: ${error.message}`;
      byId("trouble").hidden = false;
    }
  });
}
