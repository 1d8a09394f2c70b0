// What plots show upwards (seconds per step, or speed-ups where a job reports no times), and along:
// units that suit the range, ticks at round numbers and never closer than can be read. The values of
// one knob: sizes lie on a logarithmic axis, other values side by side.

import { bytes, grouped, hasSeconds, knobName, knobValue, seconds, secondsInterval, short, times, timeUnit } from "../words.js";

const STEP_TIME = {
  areSeconds: true,
  value: (trial) => trial.seconds,
  low: (trial) => trial.low,
  high: (trial) => trial.high,
  text: (trial) => {
    const interval = secondsInterval(trial.low, trial.high);
    return `${seconds(trial.seconds)}${interval ? ` (95 %: ${interval})` : ""}`;
  },
  better: Math.min,
};

const SPEEDUP = {
  areSeconds: false,
  value: (trial) => trial.speedup,
  low: () => null,
  high: () => null,
  text: (trial) => times(trial.speedup),
  better: Math.max,
};

export const measureOf = (job) => (hasSeconds(job) ? STEP_TIME : SPEEDUP);

/** Trials that are over: of the best one's round, which is not the latest if that was broken off. */
export function closed(overview) {
  const round = overview.trials.find((trial) => trial.is_best)?.round ?? overview.job.round;
  return overview.trials.filter(({ round: its, state }) => its === round && ["measured", "failed", "infeasible"].includes(state));
}

/** Those of them with a value. */
export function measured(overview) {
  const { value } = measureOf(overview.job);
  return closed(overview).filter((trial) => value(trial) !== null);
}

const MARGIN = 0.08;

/** From the least to the greatest with a margin; never empty. */
export function padded(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const margin = (high - low || Math.abs(high) || 1) * MARGIN;
  return [low - margin, high + margin];
}

/**
 * As `padded`, but a few steps that took far longer do not press all others together: beyond the
 * top is what is above the 90th percentile by more than that is above the median.
 */
export function withoutStragglers(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  const top = at(0.9) + Math.max(at(0.9) - at(0.5), at(0.5) * 0.02);
  return padded(sorted.filter((value) => value <= top));
}

const LABEL_PX = 62;

/** Whole numbers. */
export function countAxis(colours, label) {
  return {
    ...look(colours),
    ...labelled(colours, label),
    space: LABEL_PX,
    incrs: [1, 2, 5].flatMap((digit) => Array.from({ length: 10 }, (_, n) => digit * 10 ** n)).sort((a, b) => a - b),
    values: (_plot, splits) => splits.map((value) => value.toLocaleString("en-US")),
  };
}

/** Sizes on a logarithmic scale; the plot's x are log2. `text` writes one. */
export function sizeAxis(colours, label, text) {
  return {
    ...look(colours),
    ...labelled(colours, label),
    splits: (plot, _axis, low, high) => {
      const most = Math.max(2, Math.floor(plot.width / LABEL_PX));
      const span = Math.floor(high) - Math.ceil(low) + 1;
      const every = [1, 2, 4, 5, 10].find((step) => span / step <= most) ?? 20;
      const first = Math.ceil(low / every) * every;
      return Array.from({ length: Math.floor((high - first) / every) + 1 }, (_, n) => first + n * every);
    },
    values: (_plot, splits) => splits.map((power) => text(2 ** power)),
  };
}

/** Named values side by side, each word on a line; the plot's x are their places in the list. */
export function choiceAxis(colours, label, names) {
  const lines = names.map((name) => name.split(" "));
  return {
    ...look(colours),
    ...labelled(colours, label),
    size: 14 + 14 * Math.max(...lines.map(({ length }) => length)),
    grid: { show: false },
    splits: () => names.map((_name, place) => place),
    values: () => lines.map((words) => words.join("\n")),
  };
}

/** Seconds or speed-ups: one unit for all ticks, of the largest. */
export function valueAxis(colours, areSeconds, label) {
  return {
    ...look(colours),
    size: (_plot, values) => 16 + 6.5 * Math.max(3, ...(values ?? []).map((text) => text.length)),
    space: 36,
    values: (_plot, splits) => {
      if (!areSeconds()) return splits.map((value) => `${tick(value, splits)}x`);
      const { factor, unit } = timeUnit(Math.max(...splits.map(Math.abs)));
      return splits.map((value) => (value === 0 ? "0" : `${tick(value * factor, splits.map((v) => v * factor))} ${unit}`));
    },
    ...label,
  };
}

// As many decimals as the distance of the ticks needs, alike for all.
function tick(value, splits) {
  if (splits.length < 2) return short(value);
  const distance = Math.abs(splits[1] - splits[0]);
  const enough = [0, 1, 2, 3].find((digits) => Math.abs(distance - Number(distance.toFixed(digits))) < 1e-3 * distance);
  return value.toFixed(enough ?? 4);
}

function look(colours) {
  return {
    stroke: colours.text,
    font: colours.font,
    grid: { stroke: colours.grid, width: 1 },
    ticks: { show: false },
    gap: 6,
  };
}

function labelled(colours, label) {
  return { label, labelSize: 18, labelFont: colours.font, labelGap: 0, size: 28 };
}

// What trials took of it is no knob, but what knobs spend.
export const MEMORY = "memory";

// How far the trials of one value may spread, of the distance to the next value.
const SPREAD = 0.5;

/**
 * `place(trial)` gives its x, or null where it has none; `axis(colours)` is uPlot's; `span` the
 * least and the greatest x, where they do not follow from the trials; `key` tells axes apart.
 */
export function knobAxis(knob, domain, trials, totalBytes) {
  if (knob === MEMORY) return memory();
  return domain?.type === "log_integer" ? sizes(knob, trials, totalBytes) : choices(knob, domain, trials);
}

/** GiB at the peak of the fullest rank. */
function memory() {
  const place = ({ peak_bytes: peak }) => (peak === null ? null : peak / 2 ** 30);
  return { place, key: MEMORY, span: null, axis: (colours) => countAxis(colours, "GiB at the peak") };
}

/** log2 of the size; of explicit buckets that of the average one. */
function sizes(knob, trials, totalBytes) {
  const place = ({ configuration }) => {
    const split = knob === "bucket_bytes" ? configuration.buckets?.length : 0;
    if (split) return totalBytes ? Math.log2(totalBytes / split) : null;
    return configuration[knob] > 0 ? Math.log2(configuration[knob]) : null;
  };
  const text = knob.endsWith("_bytes") ? bytes : grouped;
  return { place, key: knob, span: null, axis: (colours) => sizeAxis(colours, knobName(knob), text) };
}

/** In the order of the knob's domain, as far as they were tried; the trials of each in their order. */
function choices(knob, domain, trials) {
  const words = (value) => knobValue(knob, value);
  const tried = new Map(); // words -> its trials
  for (const value of domain?.values ?? []) tried.set(words(value), []);
  for (const { index, configuration } of trials) {
    const word = words(configuration[knob]);
    tried.set(word, [...(tried.get(word) ?? []), index]);
  }
  const names = [...tried].filter(([, members]) => members.length > 0).map(([name]) => name);
  const place = ({ index, configuration }) => {
    const members = tried.get(words(configuration[knob]));
    return names.indexOf(words(configuration[knob])) + SPREAD * ((members.indexOf(index) + 0.5) / members.length - 0.5);
  };
  return { place, key: [knob, ...names].join(), span: [-0.5, names.length - 0.5], axis: (colours) => choiceAxis(colours, knobName(knob), names) };
}

/** The knobs to choose from: of the others all trials have one value. And the memory, if that differs. */
export function triedKnobs({ knobs, trials }) {
  const values = (knob) => new Set(trials.map(({ configuration }) => JSON.stringify(configuration[knob])));
  const tried = Object.keys(knobs).filter((knob) => knob === "bucket_bytes" || values(knob).size > 1);
  const peaks = new Set(trials.map(({ peak_bytes: peak }) => peak).filter((peak) => peak !== null));
  return peaks.size > 1 ? [...tried, MEMORY] : tried;
}
