// Step time over steps: what the job went through, with the switches marked.

import { byId, setText } from "../dom.js";
import { count, grouped, seconds } from "../words.js";
import { countAxis, valueAxis, withoutStragglers } from "./axes.js";
import { drawMark, showLegend } from "./marks.js";
import { Plot } from "./plot.js";

const KINDS = [
  { kind: "default", label: "default", shape: "circle", className: "of-default" },
  { kind: "best", label: "best", shape: "circle", className: "of-best" },
  { kind: "other", label: "other trials", shape: "circle", className: "of-other" },
];
const LEVEL = { label: "trial's step time", shape: "line", className: "of-other" };
const SWITCH = { label: "switch", shape: "rule", className: "of-switch" };

const MARGIN = 0.02;

export function stepsPlot() {
  let shown = null;
  const plot = new Plot(byId("steps-plot"), (colours) => ({
    scales: { x: { time: false, range: around }, y: { range: () => shown.range } },
    axes: [countAxis(colours, "step"), valueAxis(colours, () => true)],
    series: [{}, { show: true, paths: () => null, points: { show: false } }],
    hooks: { drawClear: [(u) => drawSwitches(u, shown, colours)], draw: [(u) => drawSteps(u, shown, colours)] },
  }));
  return (overview) => {
    const { points, stride } = overview.steps;
    byId("steps-panel").hidden = points.length === 0;
    if (points.length === 0) return;
    shown = prepare(overview);
    plot.show([points.map(({ step }) => step), points.map((point) => point.seconds)], shown.readable, shown.label);
    showLegend(byId("steps-legend"), legend(shown));
    setText(byId("steps-note"), note(shown, stride));
  };
}

/** A little more than all steps, so that neither the first nor its switch lies on the axis. */
function around(_plot, low, high) {
  const margin = low === high ? 1 : (high - low) * MARGIN;
  return [low - margin, high + margin];
}

function prepare({ steps, switches, trials }) {
  const spans = new Map(); // trial -> its first and last step
  for (const { trial, step } of steps.points) spans.set(trial, [spans.get(trial)?.[0] ?? step, step]);
  const byIndex = new Map(trials.map((trial) => [trial.index, trial]));
  const best = trials.find((trial) => trial.is_best);
  const standard = trials[0];
  const kind = (index) => {
    const words = byIndex.get(index)?.words;
    if (words !== undefined && words === standard?.words) return "default";
    if (words !== undefined && words === best?.words) return "best";
    return "other";
  };
  const values = steps.points.map((point) => point.seconds);
  const range = withoutStragglers(values);
  const [first, last] = [steps.points[0], steps.points.at(-1)];
  return {
    range,
    kinds: steps.points.map(({ trial }) => kind(trial)),
    points: steps.points,
    switches,
    levels: trials.filter(({ index, seconds: level }) => spans.has(index) && level !== null)
      .map(({ index, seconds: level }) => ({ span: spans.get(index), level, kind: kind(index) })),
    beyond: values.filter((value) => value > range[1]).length,
    readable: steps.points.map((point) => ({
      x: point.step,
      y: point.seconds,
      text: `step ${grouped(point.step)}: ${seconds(point.seconds)}\ntrial ${point.trial}: ${byIndex.get(point.trial)?.words ?? ""}`,
    })),
    label:
      `Step time from step ${grouped(first.step)} to ${grouped(last.step)}: ` +
      `from ${seconds(first.seconds)} to ${seconds(last.seconds)}, with ${count(switches.length, "switch", "switches")}.`,
  };
}

function legend({ kinds, levels, switches }) {
  const present = KINDS.filter(({ kind }) => kinds.includes(kind));
  return [...present, ...(levels.length ? [LEVEL] : []), ...(switches.length ? [SWITCH] : [])];
}

function note({ beyond }, stride) {
  const parts = [];
  if (stride > 1) parts.push(`Each point is the median of ${grouped(stride)} steps.`);
  if (beyond) parts.push(`${beyond === 1 ? "A triangle marks one point" : `Triangles mark ${grouped(beyond)} points`} above the range of the plot.`);
  return parts.join(" ");
}

function drawSwitches(u, { switches }, colours) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = colours.line;
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  for (const { step } of switches) {
    const x = Math.round(u.valToPos(step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
}

function drawSteps(u, { points, kinds, range, levels }, colours) {
  const { ctx, bbox } = u;
  const radius = (points.length > 400 ? 1.6 : 2.2) * devicePixelRatio;
  ctx.save();
  // What matters is drawn last.
  for (const kind of ["other", "default", "best"]) {
    drawLevels(u, levels.filter((level) => level.kind === kind), colours[kind]);
    points.forEach((point, index) => {
      if (kinds[index] !== kind) return;
      const isBeyond = point.seconds > range[1];
      const x = u.valToPos(point.step, "x", true);
      const y = isBeyond ? bbox.top + 3 * radius : u.valToPos(point.seconds, "y", true);
      drawMark(ctx, isBeyond ? "triangle" : "circle", x, y, isBeyond ? 2 * radius : radius, { fill: colours[kind] });
    });
  }
  ctx.restore();
}

/** What each trial was measured at, over its steps. */
function drawLevels(u, levels, colour) {
  const { ctx } = u;
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.beginPath();
  for (const { span, level } of levels) {
    const y = u.valToPos(level, "y", true);
    ctx.moveTo(u.valToPos(span[0], "x", true), y);
    ctx.lineTo(u.valToPos(span[1], "x", true), y);
  }
  ctx.stroke();
}
