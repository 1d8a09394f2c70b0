// One job's page: fetches, and hands each part what it shows.

import { download, getJson } from "./api.js";
import { byId } from "./dom.js";
import { showBuckets } from "./job/buckets.js";
import { showDetails } from "./job/details.js";
import { showEvents } from "./job/events.js";
import { showHeadline } from "./job/headline.js";
import { showStockDdp } from "./job/stock_ddp.js";
import { trialsTable } from "./job/trials.js";
import { showWarnings } from "./job/warnings.js";
import { keepLive } from "./live.js";
import { bestPlot } from "./plots/best.js";
import { ranksPlot } from "./plots/ranks.js";
import { sizesPlot } from "./plots/sizes.js";
import { stepsPlot } from "./plots/steps.js";

const WAIT_MS = { tuning: 1000, confirming: 1000, finished: 5000, ended: 30_000 };

const id = location.pathname.split("/").pop(); // as it stands in the address, encoded
const path = (what) => `jobs/${id}/${what}`;

const showSteps = stepsPlot();
const showSizes = sizesPlot();
const showBest = bestPlot();
const showRanks = ranksPlot();
const showTrials = trialsTable();

let shown = null;
const onChange = { curve: null, buckets: null };

keepLive(async () => {
  const overview = await getJson(path("overview"));
  byId("content").hidden = false; // plots need to know their size
  showHeadline(overview);
  showWarnings(overview);
  if (overview !== shown) {
    const [{ curves }, buckets] = await Promise.all([
      changed("curve", `${overview.job.round} ${overview.best.length} ${bestOf(overview)?.index}`),
      changed("buckets", JSON.stringify(bestOf(overview)?.configuration ?? null)),
    ]);
    show(overview, curves, buckets);
    shown = overview;
  }
  return WAIT_MS[overview.job.state];
});

const bestOf = ({ trials }) => trials.find((trial) => trial.is_best);

/** The curve and the buckets follow from these; without a change they are not asked for again. */
async function changed(what, reason) {
  const before = onChange[what];
  if (before?.reason === reason) return before.data;
  const data = await getJson(path(what));
  onChange[what] = { reason, data };
  return data;
}

function show(overview, curves, buckets) {
  byId("why").textContent = overview.why;
  showSteps(overview);
  showSizes(overview, curves, buckets.bytes);
  showBest(overview);
  showBuckets(buckets);
  showRanks(overview);
  showTrials(overview);
  showStockDdp(overview.stock_ddp);
  showDetails(overview, buckets);
  showEvents(overview.events);
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
