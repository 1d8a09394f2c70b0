// All trials, as numbers; and the lives of a training that was started again, and where the newest is.

import { byId, element, renew } from "../dom.js";
import { SortedTable } from "../table.js";
import { bytes, count, duration, grouped, hasSeconds, moment, seconds, secondsInterval, times } from "../words.js";

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

export function livesTable() {
  let here = null;
  const link = (life) =>
    life.job === here ? element("b", {}, String(life.number)) : element("a", { href: encodeURIComponent(life.job) }, String(life.number));
  const table = new SortedTable(byId("lives"), {
    caption: "Lives of this training",
    identity: (life) => life.job,
    parameter: "lives",
    sort: { key: "number", direction: "descending" },
    columns: [
      { key: "number", title: "Life", kind: "number", text: (life) => String(life.number), value: (life) => life.number, node: link },
      { key: "ranks", title: "Ranks", text: (life) => `${grouped(life.world_size)} on ${count(life.ranks_per_node.length, "node")}`, value: (life) => life.world_size },
      { key: "began", title: "Began", text: (life) => moment(life.created_at), value: (life) => Date.parse(life.created_at) },
      { key: "last", title: "Last contact", text: (life) => moment(life.last_contact_at), value: (life) => Date.parse(life.last_contact_at) },
      { key: "end", title: "End", text: (life) => life.end },
      { key: "trials", title: "Trials", kind: "number", text: (life) => grouped(life.trials_measured), value: (life) => life.trials_measured },
      { key: "speedup", title: "Speed-up", kind: "number", text: (life) => times(life.speedup), value: (life) => life.speedup },
      { key: "found", title: "Found", text: (life) => life.found },
    ],
  });
  return ({ job, lives }) => {
    here = job.id;
    byId("lives-panel").hidden = lives.length === 0;
    table.update(lives);
    const newest = lives.at(-1);
    const isOld = newest !== undefined && newest.job !== job.id;
    byId("newer-life").hidden = !isOld;
    if (!isOld) return;
    renew(byId("newer-life"), newest.job, () => [
      "This training was started again. ",
      element("a", { href: encodeURIComponent(newest.job) }, `Life ${newest.number}, the newest`),
    ]);
  };
}

const TWO_LINES = 120;

export function atLength(text) {
  if (text.length <= TWO_LINES && !text.includes("\n")) return element("span", {}, text);
  return element("details", { class: "at-length" }, element("summary", {}, element("span", {}, text)));
}
