// Where the values of one knob lie: sizes on a logarithmic axis, other values side by side.

import { bytes, grouped } from "../format.js";
import { knobName, knobValue } from "../knobs.js";
import { choiceAxis, countAxis, sizeAxis } from "./axes.js";

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
