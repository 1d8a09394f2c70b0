// Knobs and their values in words: the service's, which come with what it tells of a job.

import { bytes, count } from "./format.js";

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
