// A job's state as a dot and a word; the word alone says it all.

import { element } from "./dom.js";

const WORDS = { tuning: "Tuning", confirming: "Confirming", finished: "Finished", ended: "Ended", lost: "Lost" };

export function stateWords(job) {
  const word = WORDS[job.state] ?? job.state;
  return job.round ? `${word}, round ${job.round + 1}` : word;
}

export function badge(job) {
  return element("span", { class: `badge ${WORDS[job.state] ? job.state : ""}` }, stateWords(job));
}
