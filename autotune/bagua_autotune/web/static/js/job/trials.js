// All trials, as numbers.

import { byId, element } from "../dom.js";
import { bytes, duration, grouped, seconds, secondsInterval, times } from "../format.js";
import { hasSeconds } from "../state.js";
import { SortedTable } from "../table.js";
import { atLength } from "./at_length.js";

const COLUMNS = [
  { key: "index", title: "Trial", kind: "index", text: ({ index }) => String(index), value: ({ index }) => index },
  { key: "words", title: "Configuration", kind: "words", text: wordsText, value: bySize, node: wordsCell },
  { key: "seconds", title: "Step time", more: ", 95 % interval", kind: "number step", text: secondsText, value: (trial) => trial.seconds, node: secondsCell },
  { key: "speedup", title: "Speed-up", kind: "number speedup", first: "descending", text: ({ speedup }) => times(speedup), value: ({ speedup }) => speedup },
  { key: "steps", title: "Steps", kind: "number spare", first: "descending", text: ({ steps }) => grouped(steps), value: ({ steps }) => steps },
  { key: "outliers", title: "Outliers", kind: "number spare", first: "descending", text: ({ outliers }) => grouped(outliers), value: ({ outliers }) => outliers },
  { key: "memory", title: "Memory", kind: "number spare", first: "descending", text: ({ peak_bytes: peak }) => bytes(peak), value: ({ peak_bytes: peak }) => peak },
  { key: "took", title: "Took", kind: "number spare", first: "descending", text: (trial) => duration(tookSeconds(trial)), value: tookSeconds },
  { key: "state", title: "State", kind: "spare", text: ({ state }) => state },
];

// By size, whatever the unit that it is written in, then by the words.
function bySize({ configuration, words }) {
  return `${configuration.buckets?.length ? 0 : configuration.bucket_bytes ?? 0} ${words}`;
}

export function trialsTable() {
  const round = { key: "round", title: "Round", kind: "number spare", text: (trial) => String(trial.round + 1), value: (trial) => trial.round };
  let table = null;
  let hasRounds = null;
  let hasMemory = null;
  return ({ job, trials }) => {
    const isTold = trials.some(({ peak_bytes: peak }) => peak !== null);
    if (table === null || hasRounds !== job.round > 0 || hasMemory !== isTold) {
      hasRounds = job.round > 0;
      hasMemory = isTold;
      table = new SortedTable(byId("trials"), {
        caption: "Trials of this job",
        identity: ({ index }) => index,
        rowClass: (trial) => (trial.is_best ? "best" : ""),
        parameter: "trials",
        sort: { key: "index", direction: "ascending" },
        columns: [COLUMNS[0], ...(hasRounds ? [round] : []), ...COLUMNS.slice(1).filter(({ key }) => (key !== "seconds" || hasSeconds(job)) && (key !== "memory" || hasMemory))],
      });
    }
    table.update(trials.map((trial) => ({ ...trial, isDefault: trial.words === trials[0].words })));
  };
}

function tags({ is_best: isBest, is_noise: isNoise, isDefault, purpose }) {
  return [
    isBest ? "best" : null,
    isNoise ? "noise" : null,
    isDefault ? "default" : null,
    purpose === "confirm" ? "confirming" : null,
  ].filter(Boolean);
}

function wordsText(trial) {
  return [trial.words, ...tags(trial), trial.state, trial.failure ?? ""].join("\n");
}

function wordsCell(trial) {
  return element(
    "div", {},
    element("span", { class: "configuration" }, trial.words),
    ...tags(trial).map((tag) => element("span", { class: `tag ${tag}` }, tag)),
    trial.state === "measured" ? null : element("span", { class: `tag state ${trial.state}` }, trial.state),
    trial.failure ? element("div", { class: trial.state === "infeasible" ? "muted" : "bad-text" }, atLength(trial.failure)) : null,
  );
}

function secondsText(trial) {
  return `${seconds(trial.seconds)} ${secondsInterval(trial.low, trial.high)}`.trim();
}

function secondsCell(trial) {
  const interval = secondsInterval(trial.low, trial.high);
  return element("div", {}, seconds(trial.seconds), interval ? element("small", { class: "muted" }, interval) : null);
}

function tookSeconds({ started_at: start, ended_at: end }) {
  return start && end ? (Date.parse(end) - Date.parse(start)) / 1000 : null;
}
