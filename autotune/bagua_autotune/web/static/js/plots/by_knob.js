// Trials as points over one knob, which the reader chooses; over the bucket size with the model's
// curve and its band.

import { byId, choose, chosen, element, renew, setText } from "../dom.js";
import { knobName, percent } from "../words.js";
import { knobAxis, measured, measureOf, MEMORY, padded, triedKnobs, valueAxis } from "./axes.js";
import { drawMark, showLegend, wayOf, waysOf } from "./marks.js";
import { Plot } from "./plot.js";

const FIRST = "bucket_bytes";
const RECOMPUTED = "recomputed_blocks";
const BAND_ALPHA = 0.13;
// So far the curve may leave the range of what was measured.
const CURVE_ROOM = 0.35;

export function byKnobPlot() {
  let shown = null;
  let latest = null;
  const plot = new Plot(byId("knob-plot"), (colours) => ({
    scales: { x: { time: false, range: () => shown.span }, y: { range: () => shown.range } },
    axes: [shown.axis(colours), valueAxis(colours, () => shown.measure.areSeconds)],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: { draw: [(u) => draw(u, shown, colours)] },
  }));
  const show = (overview, { curves, expected_gain: gain }, totalBytes) => {
    latest = [overview, { curves, expected_gain: gain }, totalBytes];
    const knob = offer(triedKnobs(overview));
    const trials = knob ? measured(overview) : [];
    const axis = knobAxis(knob, overview.knobs[knob], trials, totalBytes);
    const placed = trials.filter((trial) => axis.place(trial) !== null);
    byId("knob-panel").hidden = trials.length === 0;
    if (placed.length === 0) return;
    if (shown?.key !== axis.key) plot.renew();
    shown = prepare(overview, placed, knob === FIRST ? curves : [], knob, axis);
    plot.show([shown.points.map(({ x }) => x), shown.points.map(({ y }) => y)], shown.points, shown.label);
    showLegend(byId("knob-legend"), legend(shown));
    setText(byId("knob-note"), [...notes(shown), ...expectation(overview.job, gain)].join(" "));
  };
  byId("knob").addEventListener("change", () => {
    choose("knob", byId("knob").value === usualOf(triedKnobs(latest[0])) ? "" : byId("knob").value);
    show(...latest);
  });
  return show;
}

/** Time over memory where blocks are recomputed: that is what there is to choose from. */
function usualOf(knobs) {
  if (knobs.includes(MEMORY) && knobs.includes(RECOMPUTED)) return MEMORY;
  return knobs.includes(FIRST) ? FIRST : knobs[0];
}

/** Offer these knobs; the one that is chosen. */
function offer(knobs) {
  const select = byId("knob");
  renew(select, knobs, () => knobs.map((knob) => element("option", { value: knob }, knobName(knob))));
  const knob = knobs.includes(chosen("knob")) ? chosen("knob") : usualOf(knobs);
  if (select.value !== knob) select.value = knob;
  return knob;
}

function prepare(overview, trials, curves, knob, { place, key, span, axis }) {
  const measure = measureOf(overview.job);
  const ways = waysOf([...trials.map(({ configuration }) => configuration), ...curves.map(({ values }) => values)]);
  const byName = new Map(ways.map((way) => [way.name, way]));
  const points = trials
    .map((trial) => ({
      trial,
      x: place(trial),
      y: measure.value(trial),
      low: measure.low(trial),
      high: measure.high(trial),
      way: byName.get(wayOf(trial.configuration)),
      isAverage: knob === FIRST && Boolean(trial.configuration.buckets?.length),
      text: `trial ${trial.index}: ${trial.words}\n${measure.text(trial)}`,
    }))
    .sort((a, b) => a.x - b.x || a.y - b.y);
  const lines = curves.filter(({ points: along }) => along.length > 1).map((curve) => ({
    way: byName.get(wayOf(curve.values)),
    points: curve.points.map((point) => ({ ...point, x: Math.log2(point.bucket_bytes) })),
  }));
  const best = overview.trials.find((trial) => trial.is_best);
  const sizes = [...points, ...lines.flatMap((line) => line.points)].map(({ x }) => x);
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
  const margin = Math.max(0.35, (most - least) * 0.04);
  return {
    key, axis, measure, points, lines, ways, best,
    span: span ?? [least - margin, most + margin],
    range: rangeOf(points, lines),
    label:
      `${trials.length} measured trials by ${knobName(knob)}.` +
      (best ? ` Best: trial ${best.index}, ${best.words}, ${measure.text(best)}.` : ""),
  };
}

function rangeOf(points, lines) {
  const values = points.flatMap(({ y, low, high }) => [y, low ?? y, high ?? y]);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = (most - least || most) * CURVE_ROOM;
  const curve = lines.flatMap((line) => line.points.flatMap(({ low, high }) => [low, high]));
  const near = curve.filter((value) => value > least - room && value < most + room);
  return padded([...values, ...near]);
}

function legend({ ways, lines }) {
  const entries = ways.map(({ label, shape, index }) => ({ label, shape, className: `way-${index}` }));
  if (lines.length) entries.push({ label: "expected, 95 %", shape: "band", className: "of-band" });
  return entries;
}

function notes({ points, measure, lines }) {
  const parts = [];
  if (measure.areSeconds && points.some(({ low }) => low !== null)) parts.push("Lines through points: 95 % interval of the step time.");
  if (points.some(({ isAverage }) => isAverage)) parts.push("Hollow points: explicit buckets, at their average size.");
  if (lines.length) parts.push("Curves: what the search expects of each size, with the best trial's other settings.");
  return parts;
}

/** What is left to gain; once tuned it is what made the search stop, or nearly. */
function expectation({ state }, gain) {
  if (gain === null) return [];
  if (state === "tuning") return [`The search expects its next trial to gain ${percent(gain)} of the step time.`];
  return [`One more trial was expected to gain ${percent(gain)} of the step time.`];
}

function draw(u, { points, lines, best }, colours) {
  const { ctx, bbox } = u;
  const at = ({ x }, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const { way, points: along } of lines) drawCurve(ctx, at, along, colours.ways[way.index]);
  const isBest = ({ trial }) => trial.index === best?.index;
  for (const point of points) if (!isBest(point)) drawTrial(ctx, at, point, colours);
  const chosen = points.find(isBest);
  if (chosen) {
    drawTrial(ctx, at, chosen, colours);
    drawMark(ctx, "circle", ...at(chosen, chosen.y), 8 * devicePixelRatio, {
      stroke: colours.ways[chosen.way.index], width: 1.5 * devicePixelRatio,
    });
  }
  ctx.restore();
}

function drawCurve(ctx, at, along, colour) {
  ctx.beginPath();
  along.forEach((point) => ctx.lineTo(...at(point, point.high)));
  [...along].reverse().forEach((point) => ctx.lineTo(...at(point, point.low)));
  ctx.closePath();
  ctx.globalAlpha = BAND_ALPHA;
  ctx.fillStyle = colour;
  ctx.fill();
  ctx.globalAlpha = 1;
  ctx.beginPath();
  along.forEach((point) => ctx.lineTo(...at(point, point.seconds)));
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.stroke();
}

function drawTrial(ctx, at, point, colours) {
  const colour = colours.ways[point.way.index];
  const [x, y] = at(point, point.y);
  if (point.low !== null && point.high !== null) {
    ctx.beginPath();
    ctx.moveTo(...at(point, point.low));
    ctx.lineTo(...at(point, point.high));
    ctx.strokeStyle = colour;
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.stroke();
  }
  drawMark(ctx, point.way.shape, x, y, 4 * devicePixelRatio, point.isAverage
    ? { fill: colours.surface, stroke: colour, width: 1.5 * devicePixelRatio }
    : { fill: colour, stroke: colours.surface, width: devicePixelRatio });
}
