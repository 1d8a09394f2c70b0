// Is anything wrong: what a reader should look at, in one sentence each.

import { byId, element } from "../dom.js";
import { duration, percent } from "../format.js";

const SILENT_SECONDS = 60;
const SLOW_RATIO = 0.1;
const OFTEN = 0.7;

export function showWarnings({ job, trials }) {
  const found = [silence(job), slowRank(job), failures(trials)].filter((text) => text !== null);
  const words = found.join("\n");
  if (byId("warnings").dataset.shown === words) return;
  byId("warnings").dataset.shown = words;
  byId("warnings").replaceChildren(...found.map((text) => element("p", { class: "notice" }, text)));
}

function silence({ state, last_contact_at: last }) {
  const silent = (Date.now() - Date.parse(last)) / 1000;
  if (silent < SILENT_SECONDS || state === "finished" || state === "ended") return null;
  return `The job has not been heard of for ${duration(Math.floor(silent / 10) * 10)}, in the middle of its tuning.`;
}

function slowRank({ figures, world_size: size }) {
  const { rank_spread_ratio: spread, slowest_rank: rank, slowest_share: share } = figures;
  if (size < 2 || spread === null || rank === null || spread < SLOW_RATIO || share < OFTEN) return null;
  return `Rank ${rank} is slow: it computes ${percent(spread)} of a step longer than the median rank, ` +
    `and is the slowest in ${percent(share)} of the steps.`;
}

function failures(trials) {
  const failed = trials.filter(({ state }) => state === "failed");
  if (failed.length === 0) return null;
  const last = failed.at(-1);
  const many = failed.length === 1 ? "One trial failed" : `${failed.length} trials failed`;
  return `${many}; trial ${last.index}: ${last.failure ?? "no reason was given"}`;
}
