// The list of jobs.

import { getJson, secondsSince } from "./api.js";
import { byId, choose, chosen, element, setText } from "./dom.js";
import { keepLive } from "./live.js";
import { SortedTable } from "./table.js";
import { ago, badge, count, fixed, grouped, isSettled, isSilent, seconds, stateWords, times, timesInterval, timeUnit } from "./words.js";

const NEWEST_JOBS = 100;
const MOST_JOBS = 1000;
const TUNED_MS = 2000;
const QUIET_MS = 5000;
const MANY_MS = 10_000;
const HOW_TO_START = (service) =>
  `export BAGUA_AUTOTUNE=1\nexport BAGUA_AUTOTUNE_URL=${service}\ntorchrun --nproc_per_node=8 train.py`;

let jobs = [];
let limit = chosen("older") ? MOST_JOBS : NEWEST_JOBS;

const table = new SortedTable(byId("jobs"), {
  caption: "Jobs, each with its speed-up",
  identity: (job) => job.id,
  rowClass: (job) => (job.isSilent ? "silent" : ""),
  group: (job) => (job.isSilent ? 1 : 0),
  parameter: "sort",
  sort: { key: "contact", direction: "descending" },
  columns: [
    { key: "name", title: "Job", kind: "job", text: (job) => `${job.name}\n${job.life}\n${job.headline}`,
      value: (job) => job.name, node: nameCell },
    { key: "state", title: "State", kind: "state", text: (job) => stateWords(job, job.isSilent), node: (job) => badge(job, job.isSilent) },
    { key: "speedup", title: "Speed-up", kind: "number speedup", first: "descending",
      text: speedupText, value: (job) => job.figures.speedup, node: speedupCell,
      group: (job) => (job.isSilent ? 2 : isSettled(job) ? 0 : 1) },
    { key: "step", title: "Step time", kind: "number step", text: stepText,
      value: stepSeconds },
    { key: "trials", title: "Trials", kind: "number trials", first: "descending",
      text: (job) => grouped(job.progress.trials_measured), value: (job) => job.progress.trials_measured },
    { key: "contact", title: "Last contact", kind: "number contact", first: "descending",
      text: (job) => ago(secondsSince(job.last_contact_at)), value: (job) => Date.parse(job.last_contact_at) },
  ],
});

function nameCell(job) {
  const link = element("a", { href: `jobs/${encodeURIComponent(job.id)}` }, job.name);
  const lives = job.life > 1 ? element("small", { class: "muted" }, ` life ${grouped(job.life)}`) : null;
  return element("div", {}, link, lives, element("p", { class: "muted" }, job.headline));
}

function speedupNotes(job) {
  const { speedup, speedup_low: low, speedup_high: high, ceiling, is_noise: isNoise } = job.figures;
  const most = ceiling === null ? "" : `at most ${times(ceiling)}`;
  if (isNoise) return [`noise: ${most}`];
  return [timesInterval(low, high), most, speedup === null || isSettled(job) ? "" : "not confirmed"].filter(Boolean);
}

function speedupText(job) {
  return [times(job.figures.speedup), ...speedupNotes(job)].join(" ");
}

function speedupCell(job) {
  return element("div", {}, element(isSettled(job) ? "b" : "span", {}, times(job.figures.speedup)),
    ...speedupNotes(job).map((note) => element("small", { class: "muted" }, note)));
}

function stepSeconds({ figures: { current_seconds: now, incumbent_seconds: best } }) {
  return best ?? now;
}

function stepText(job) {
  const before = job.figures.baseline_seconds;
  const after = stepSeconds(job);
  if (before === null || after === null || before === after) return seconds(before ?? after);
  const { factor, unit } = timeUnit(Math.max(before, after));
  return `${fixed(before * factor)} → ${fixed(after * factor)} ${unit}`;
}

function show() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const state = byId("state").value;
  const isWanted = (job) => !state || (state === "silent" ? job.isSilent : job.state === state);
  // Decided once: while the rows are made, the minute may pass.
  const left = jobs
    .map((job) => ({ ...job, isSilent: isSilent(job) }))
    .filter((job) => isWanted(job) && job.name.toLowerCase().includes(wanted));
  table.update(left);
  byId("jobs").hidden = left.length === 0;
  byId("filters").hidden = jobs.length === 0;
  byId("empty").hidden = jobs.length !== 0;
  byId("none-left").hidden = jobs.length === 0 || left.length !== 0;
  const areAll = jobs.length < limit;
  byId("older").hidden = areAll || limit === MOST_JOBS;
  const all = areAll ? count(jobs.length, "job") : `the newest ${grouped(limit)} jobs`;
  setText(byId("count"), left.length === jobs.length ? all : `${grouped(left.length)} of ${all}`);
}

for (const [id, event] of [["filter", "input"], ["state", "change"]]) {
  byId(id).value = chosen(id);
  byId(id).addEventListener(event, () => {
    choose(id, byId(id).value);
    show();
  });
}
if (byId("state").selectedIndex < 0) byId("state").selectedIndex = 0; // the address named none of them
setText(byId("start"), HOW_TO_START(new URL("./", location.href).href.replace(/\/$/, "")));

const ask = keepLive(async () => {
  jobs = (await getJson(`jobs?limit=${limit}`)).jobs;
  show();
  if (jobs.length > NEWEST_JOBS) return MANY_MS;
  const isAwaited = jobs.length === 0 || jobs.some(({ state }) => state === "tuning" || state === "confirming");
  return isAwaited ? TUNED_MS : QUIET_MS;
});

byId("older").addEventListener("click", () => {
  limit = MOST_JOBS;
  choose("older", "shown");
  byId("older").hidden = true;
  ask();
});
