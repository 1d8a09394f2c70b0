// What people read: numbers (an unknown one is a dash); knobs and their values, in the service's words,
// which come with what it tells of a job; and where a job stands, as a dot and words. The words alone
// say it all.

import { secondsSince } from "./api.js";
import { element } from "./dom.js";

export const UNKNOWN = "–";

const TIME_UNITS = [
  { factor: 1, unit: "s" },
  { factor: 1e3, unit: "ms" },
  { factor: 1e6, unit: "µs" },
];
const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
const SIZE_UNITS = ["B", "KiB", "MiB", "GiB"];

const isKnown = (number) => number !== null && number !== undefined && Number.isFinite(number);

// Without a width nothing is known of the spread, such as of values that are alike when rounded.
const isWide = (low, high) => isKnown(low) && isKnown(high) && low < high;

/** Three significant digits, never an exponent. */
export function short(number) {
  const magnitude = Math.abs(number);
  if (magnitude >= 100 || number === 0) return grouped(Math.round(number));
  return Number(number.toPrecision(3)).toString();
}

/** Three significant digits with the zeros that tell them, for columns: 30.0, 1.20. */
export function fixed(number) {
  const magnitude = Math.abs(number);
  if (magnitude >= 99.95) return grouped(Math.round(number));
  return number.toFixed(magnitude >= 9.995 ? 1 : 2);
}

export function grouped(number) {
  return isKnown(number) ? Math.round(number).toLocaleString("en-US") : UNKNOWN;
}

/** The unit in which a time of this length reads best. */
export function timeUnit(seconds) {
  return TIME_UNITS.find(({ factor }) => Math.abs(seconds) * factor >= 0.9995) ?? TIME_UNITS[2];
}

/** A step's time: 307 ms, 1.34 s. */
export function seconds(value, unit = isKnown(value) ? timeUnit(value) : null) {
  if (value === 0) return "0 s";
  return isKnown(value) ? `${fixed(value * unit.factor)} ${unit.unit}` : UNKNOWN;
}

export function secondsInterval(low, high) {
  if (!isWide(low, high)) return "";
  const { factor, unit } = timeUnit(high);
  return `${fixed(low * factor)} to ${fixed(high * factor)} ${unit}`;
}

/** A while: 31 s, 2 min 10 s, 3 h 5 min. */
export function duration(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value < 0.95) return seconds(value);
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  const first = UNITS.findIndex(([, length]) => whole >= length);
  const [[unit, length], [lesser, shorter]] = UNITS.slice(first, first + 2);
  const rest = Math.floor((whole % length) / shorter);
  return `${Math.floor(whole / length)} ${unit}${rest ? ` ${rest} ${lesser}` : ""}`;
}

/** Of so many seconds: 5 min ago. */
export function ago(passed) {
  if (!isKnown(passed)) return UNKNOWN;
  if (passed < 1) return "now";
  const [unit, length] = UNITS.find(([, seconds]) => passed >= seconds);
  return `${Math.floor(passed / length)} ${unit} ago`;
}

/** 1.34x, of a speed-up, as the sentences of the service have it. */
export function times(value) {
  return isKnown(value) ? `${value.toFixed(2)}x` : UNKNOWN;
}

export function timesInterval(low, high) {
  return isWide(low, high) ? `${low.toFixed(2)} to ${high.toFixed(2)}` : "";
}

export function percent(ratio) {
  if (!isKnown(ratio)) return UNKNOWN;
  const value = ratio * 100;
  if (value > 0 && value < 0.05) return "less than 0.1 %";
  return `${Math.abs(value) < 9.95 ? Number(value.toFixed(1)) : Math.round(value)} %`;
}

/** 4 MiB, 90.5 KiB, 512 B. */
export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  let size = value;
  let index = 0;
  while (index < SIZE_UNITS.length - 1 && Math.round(size) >= 1024) {
    size /= 1024;
    index += 1;
  }
  return `${short(size)} ${SIZE_UNITS[index]}`;
}

export function count(number, one, many = `${one}s`) {
  return `${grouped(number)} ${number === 1 ? one : many}`;
}

/** A moment in the reader's own time zone. */
export function moment(date) {
  if (!date) return UNKNOWN;
  return new Date(date).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

let words = {};

/** Use these from now on: by knob its `name`, and the words of its `values`. */
export function learnWords(told) {
  words = told;
}

export const knobName = (knob) => words[knob]?.name ?? knob;

/** The values with words of their own, in the service's order. */
export const namedValues = (knob) => Object.keys(words[knob]?.values ?? {});

export function knobValue(knob, value) {
  if (Array.isArray(value)) return value.length ? count(value.length, "bucket") : "none";
  if (knob.endsWith("_bytes")) return value ? bytes(value) : "like the others";
  return words[knob]?.values[value] ?? String(value).replaceAll("_", " ");
}

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
