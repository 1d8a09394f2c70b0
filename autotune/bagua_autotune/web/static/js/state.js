// Where a job stands: as a dot and words, and what that means for its figures. The words alone say
// it all.

import { secondsSince } from "./api.js";
import { element } from "./dom.js";

const WORDS = { tuning: "Tuning", confirming: "Confirming", finished: "Finished", ended: "Ended", lost: "Lost" };
const SILENT_SECONDS = 60;

/** Whether it is a search with whole runs of a command, not a training that is tuned while it runs. */
export const isOfRuns = ({ protocol }) => ["runs", "scores"].includes(protocol);

/** Whether it is known how many seconds a step takes. */
export const hasSeconds = ({ protocol }) => !["v1", "scores"].includes(protocol);

export const isOver = ({ state }) => ["finished", "ended", "lost"].includes(state);

/** Whether its speed-up is that of a result, and no longer of the best trial so far. */
export const isSettled = (job) => isOver(job) && job.result !== null;

/** Whether ranks that should report do not; nothing is expected of a job that is done. */
export function isSilent(job) {
  if (job.state === "lost") return true;
  return !isOver(job) && secondsSince(job.last_contact_at) >= SILENT_SECONDS;
}

export function stateWords(job, silent = isSilent(job)) {
  const isCutShort = ["ended", "lost"].includes(job.state);
  const word = isOfRuns(job) && isCutShort ? "Interrupted" : WORDS[job.state] ?? job.state;
  const parts = [word, job.round ? `round ${job.round + 1}` : "", silent && job.state !== "lost" ? "silent" : ""];
  return parts.filter(Boolean).join(", ");
}

export function badge(job, silent = isSilent(job)) {
  const state = WORDS[job.state] ? job.state : "";
  return element("span", { class: `badge ${silent ? "silent" : state}` }, stateWords(job, silent));
}
