// The ways to reduce, in a fixed order, so that each keeps its colour and shape.

import { knobValue, namedValues } from "../knobs.js";
import { SHAPES } from "./marks.js";

const KNOB = "hierarchical";

export function wayOf(configuration) {
  return String(configuration[KNOB] ?? "off");
}

/** The ways among these configurations: { name, label, shape, index }. */
export function waysOf(configurations) {
  const order = namedValues(KNOB);
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const names = [...new Set(configurations.map(wayOf))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  return names.map((name) => {
    const index = Math.min(rank(name), SHAPES.length - 1);
    // Settings of a command have nothing to do with ways to reduce.
    const label = configurations.some((each) => KNOB in each) ? knobValue(KNOB, name) : "runs";
    return { name, label, shape: SHAPES[index], index };
  });
}
