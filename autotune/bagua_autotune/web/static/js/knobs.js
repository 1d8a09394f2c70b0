// Knobs and their values in words; a knob that no words are known for has its own name.

import { bytes, count } from "./format.js";

const NAMES = {
  bucket_bytes: "bucket size",
  first_bucket_bytes: "first bucket",
  last_bucket_bytes: "last bucket",
  buckets: "custom split",
  hierarchical: "hierarchical reduce",
  channels: "channels",
  wire_precision: "wire precision",
  algorithm: "algorithm",
};

export const WAYS = { off: "flat", leaders: "hierarchical", shards: "hierarchical (sharded)" };

export const knobName = (knob) => NAMES[knob] ?? knob;

export function knobValue(knob, value) {
  if (Array.isArray(value)) return value.length ? count(value.length, "bucket") : "none";
  if (knob === "hierarchical") return WAYS[value] ?? String(value);
  if (knob.endsWith("_bytes")) return value ? bytes(value) : "like the others";
  return String(value).replaceAll("_", " ");
}
