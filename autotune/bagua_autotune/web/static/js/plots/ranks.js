// The ranks' step and computing times: who is slow, and what communication adds.

import { byId, setText } from "../dom.js";
import { SortedTable } from "../table.js";
import { grouped, percent, seconds } from "../words.js";
import { countAxis, valueAxis } from "./axes.js";
import { showLegend } from "./marks.js";
import { Plot } from "./plot.js";

const WIDEST_BAR_PX = 48;
const MANY = 100; // with gaps between them they would flicker

export function ranksPlot() {
  let shown = null;
  const rankAt = (place) => (shown.isSelection ? shown.ranks[place]?.rank ?? "" : grouped(place));
  const [apart, dense] = [0.7, 1].map((share) => uPlot.paths.bars({ size: [share, WIDEST_BAR_PX] }));
  const bars = (...series) => (shown.ranks.length > MANY ? dense : apart)(...series);
  const plot = new Plot(byId("ranks-plot"), (colours) => ({
    scales: {
      x: { time: false, range: (_u, low, high) => [low - 0.6, high + 0.6] },
      y: { range: (_u, _low, high) => [0, high * 1.08] },
    },
    axes: [{ ...countAxis(colours, "rank"), values: (_u, splits) => splits.map(rankAt) }, valueAxis(colours, () => true)],
    series: [
      {},
      { fill: colours.other, width: 0, paths: bars, points: { show: false } },
      { fill: colours.accent, width: 0, paths: bars, points: { show: false } },
    ],
  }));
  plot.readsColumns = true;
  const table = new SortedTable(byId("ranks-table"), {
    caption: "Step and computing time of each rank",
    identity: ({ rank }) => rank,
    parameter: "ranks",
    sort: { key: "rank", direction: "ascending" },
    columns: [
      { key: "rank", title: "Rank", kind: "number", text: ({ rank }) => String(rank), value: ({ rank }) => rank },
      { key: "seconds", title: "Step time", kind: "number", first: "descending", text: (rank) => seconds(rank.seconds), value: (rank) => rank.seconds },
      { key: "compute", title: "Computing", kind: "number", first: "descending", text: (rank) => seconds(rank.compute_seconds), value: (rank) => rank.compute_seconds },
    ],
  });
  return ({ job, ranks, steps, trials }) => {
    byId("ranks-panel").hidden = ranks.length === 0;
    if (ranks.length === 0) return;
    shown = inOrder(ranks, job.world_size);
    plot.show(
      [shown.places, shown.ranks.map((rank) => rank.seconds), shown.ranks.map((rank) => rank.compute_seconds)],
      shown.ranks.map((rank, index) => readable(rank, shown.places[index])),
      fact(shown.ranks, job.world_size),
    );
    const knowsComputing = ranks.some((rank) => rank.compute_seconds !== null);
    showLegend(byId("ranks-legend"), [
      ...(knowsComputing ? [{ label: "computing", shape: "bar", className: "of-best" }] : []),
      { label: knowsComputing ? "rest of the step: communication, waiting" : "step", shape: "bar", className: "of-other" },
    ]);
    setText(byId("ranks-note"), note(job, ranks, knowsComputing, under(job, steps, trials)));
    table.update(ranks);
  };
}

/** By rank; those chosen from many side by side, by what they compute: gaps would say nothing. */
function inOrder(ranks, size) {
  const isSelection = ranks.length < size;
  const computing = (rank) => rank.compute_seconds ?? rank.seconds;
  const ordered = [...ranks].sort((a, b) => (isSelection ? computing(a) - computing(b) : 0) || a.rank - b.rank);
  return { isSelection, ranks: ordered, places: ordered.map(({ rank }, index) => (isSelection ? index : rank)) };
}

function readable(rank, place) {
  const computing = rank.compute_seconds === null ? "" : `\ncomputing ${seconds(rank.compute_seconds)}`;
  return { x: place, y: rank.seconds, text: `rank ${rank.rank}: ${seconds(rank.seconds)}${computing}` };
}

function fact(ranks, size) {
  const slowest = ranks.reduce((a, b) => (b.seconds > a.seconds ? b : a));
  const which = ranks.length < size ? `${ranks.length} of ${size}` : ranks.length;
  return `Step times of ${which} ranks; the longest is rank ${slowest.rank}'s, ${seconds(slowest.seconds)}.`;
}

/** Of what they are: once the job is tuned of what was kept, before of the newest trial's steps. */
function under({ state, result }, { points }, trials) {
  const isTuned = result !== null && state !== "tuning" && state !== "confirming";
  const latest = points.at(-1)?.trial;
  const kept = isTuned ? JSON.stringify(result.configuration) : null;
  const trial = trials.findLast(({ index, configuration }) =>
    isTuned ? JSON.stringify(configuration) === kept : index === latest);
  return trial ? [`Medians of the latest steps at ${trial.words}.`] : [];
}

function note({ figures, world_size: size }, ranks, knowsComputing, parts) {
  if (ranks.length < size) parts.push(`The fastest and the slowest of ${size} ranks, ordered by computing time.`);
  if (figures.exposed_seconds !== null) {
    const step = figures.current_seconds;
    const share = step ? `, ${percent(figures.exposed_seconds / step)} of the step` : "";
    parts.push(`Communication that computing does not hide in these steps: ${seconds(figures.exposed_seconds)} each${share}.`);
  }
  if (figures.rank_spread_ratio !== null && figures.slowest_rank !== null) {
    parts.push(
      `The slowest rank computes ${percent(figures.rank_spread_ratio)} of a step longer than the median one; ` +
      `most often it is rank ${figures.slowest_rank} (${percent(figures.slowest_share)} of the steps).`,
    );
  }
  if (!knowsComputing) parts.push("This job's client does not report computing times.");
  return parts.join(" ");
}
