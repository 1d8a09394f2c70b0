// Axes: units that suit the range, ticks at round numbers and never closer than can be read.

import { short, timeUnit } from "../format.js";

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
