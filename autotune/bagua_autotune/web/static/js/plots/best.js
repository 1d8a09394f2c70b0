// Best so far after each measured trial, and the trials themselves.

import { byId, setText } from "../dom.js";
import { countAxis, measured, measureOf, padded, valueAxis, withoutStragglers } from "./axes.js";
import { drawMark, showLegend } from "./marks.js";
import { Plot } from "./plot.js";

const LEGEND = [
  { label: "best so far", shape: "line", className: "of-best" },
  { label: "trial", shape: "circle", className: "of-other" },
];
const CONFIRMING = { label: "confirming", shape: "diamond", className: "of-other" };

export function bestPlot() {
  let shown = null;
  const plot = new Plot(byId("best-plot"), (colours) => ({
    scales: { x: { time: false, range: (_u, low, high) => [low - 0.5, high + 0.5] }, y: { range: () => shown.range } },
    axes: [countAxis(colours, "trial"), valueAxis(colours, () => shown.measure.areSeconds)],
    series: [{}, { stroke: colours.accent, width: 2, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) }],
    hooks: { draw: [(u) => draw(u, shown, colours)] },
  }));
  return (overview) => {
    const trials = measured(overview);
    byId("best-panel").hidden = trials.length === 0;
    if (trials.length === 0) return;
    shown = prepare(overview, trials);
    plot.show([trials.map(({ index }) => index), shown.best], shown.points, shown.label);
    showLegend(byId("best-legend"), trials.some(({ purpose }) => purpose === "confirm") ? [...LEGEND, CONFIRMING] : LEGEND);
    setText(byId("best-note"), shown.beyond ? "Triangles mark trials above the range of the plot." : "");
  };
}

function prepare(overview, trials) {
  const measure = measureOf(overview.job);
  const values = trials.map(measure.value);
  const best = bestSoFar(overview, trials, measure);
  const range = measure.areSeconds ? withoutStragglers([...values, ...best.filter((v) => v !== null)]) : padded(values);
  const last = best.findLast((value) => value !== null);
  return {
    measure, best, range, trials, values,
    beyond: values.some((value) => value > range[1]),
    points: trials.map((trial, index) => ({
      x: trial.index, y: values[index], text: `trial ${trial.index}: ${trial.words}\n${measure.text(trial)}`,
    })),
    label: `Best so far over ${trials.length} measured trials: from ${measure.text({ seconds: best[0], speedup: best[0] })} to ${measure.text({ seconds: last, speedup: last })}.`,
  };
}

/** The service's own where it names seconds: it does not take the luckiest for the best. */
function bestSoFar(overview, trials, measure) {
  if (measure.areSeconds && overview.best.length) {
    const known = new Map(overview.best.map(({ trial, seconds }) => [trial, seconds]));
    return trials.map(({ index }) => known.get(index) ?? null);
  }
  let best = null;
  return trials.map((trial) => (best = best === null ? measure.value(trial) : measure.better(best, measure.value(trial))));
}

function draw(u, { trials, values, range }, colours) {
  const { ctx, bbox } = u;
  const radius = 3 * devicePixelRatio;
  trials.forEach((trial, index) => {
    const isBeyond = values[index] > range[1];
    const x = u.valToPos(trial.index, "x", true);
    const y = isBeyond ? bbox.top + 2 * radius : u.valToPos(values[index], "y", true);
    const shape = isBeyond ? "triangle" : trial.purpose === "confirm" ? "diamond" : "circle";
    drawMark(ctx, shape, x, y, radius, { fill: trial.is_best ? colours.accent : colours.other });
  });
}
