// The first things to know: state, speed-up and how sure it is, what the search cost.

import { byId, element, setText } from "../dom.js";
import { bytes, count, duration, fixed, grouped, percent, seconds, times, timesInterval, timeUnit, UNKNOWN } from "../format.js";
import { badge, hasSeconds, isOfRuns, isOver, isSettled, stateWords } from "../state.js";

export function showHeadline({ job }) {
  document.title = `${job.name} · ${stateWords(job)} · Bagua Autotune`;
  setText(byId("name"), job.name);
  if (byId("badge").textContent !== stateWords(job)) byId("badge").replaceChildren(badge(job));
  setText(byId("headline"), job.headline);
  const figures = [speedup(job), stepTime(job), cost(job), payback(job), tried(job), memory(job)].filter(Boolean);
  const words = JSON.stringify(figures);
  if (byId("figures").dataset.shown === words) return;
  byId("figures").dataset.shown = words;
  byId("figures").replaceChildren(
    ...figures.map(({ name, value, note, isNoise }) =>
      element("div", {}, element("dt", {}, name), element("dd", { class: isNoise ? "value noise" : "value" }, value), element("dd", { class: "muted" }, note)),
    ),
  );
}

function speedup(job) {
  const { figures } = job;
  const interval = timesInterval(figures.speedup_low, figures.speedup_high);
  let note = "nothing to compare with the default yet";
  if (interval) note = isSettled(job) ? `${interval}, 95 % interval` : `${interval} so far, not confirmed`;
  else if (figures.speedup !== null) note = job.protocol === "v1" ? "no interval: the job reports speeds, not times" : "over the default";
  else if (figures.is_noise) note = "what seems faster is noise";
  else if (isOver(job)) note = "nothing was compared";
  if (figures.ceiling !== null) note += `; at most ${times(figures.ceiling)} is possible`;
  return { name: "Speed-up", value: times(figures.speedup), note, isNoise: figures.is_noise };
}

function stepTime(job) {
  const { figures, protocol } = job;
  if (protocol === "scores") return null;
  const { baseline_seconds: before, incumbent_seconds: best, current_seconds: now } = figures;
  if (protocol === "v1") {
    return { name: "Step time", value: UNKNOWN, note: "Bagua 0.9 workers report a speed, not seconds" };
  }
  if (before === null || best === null) {
    return { name: "Step time", value: seconds(now ?? before ?? best), note: "at the default" };
  }
  const running = now === null || seconds(now) === seconds(best) ? "" : `; now ${seconds(now)}`;
  if (before === best) {
    const note = isSettled(job) ? "of the default, which stays" : "of the default, the best so far";
    return { name: "Step time", value: seconds(best), note: note + running };
  }
  const { factor, unit } = timeUnit(Math.max(before, best));
  return { name: "Step time", value: `${fixed(before * factor)} → ${fixed(best * factor)} ${unit}`, note: `default → best${running}` };
}

// What a search costs is not known to three digits.
const roughly = (steps) => (steps < 9.95 ? steps.toFixed(1) : grouped(steps));

function cost(job) {
  const { cost_seconds: lost, cost_steps: steps } = job.figures;
  if (!hasSeconds(job)) return null;
  const name = isOver(job) ? "Cost of the search" : "Cost so far";
  if (steps === null) return { name, value: UNKNOWN, note: "known once the default is measured" };
  const note = isOfRuns(job) ? "in which nothing was trained" : "lost on slower configurations";
  return { name, value: `${roughly(steps)} steps`, note: `${duration(lost)} ${note}` };
}

function payback(job) {
  const { payback_steps: steps, incumbent_seconds: best } = job.figures;
  if (!hasSeconds(job)) return null;
  const name = isOver(job) ? "Paid back after" : "Would be paid back after";
  if (isOver(job) && !isSettled(job)) return { name, value: UNKNOWN, note: `the ${isOfRuns(job) ? "search" : "training"} ended before there was a result` };
  if (steps === null) return { name, value: UNKNOWN, note: isSettled(job) ? "the default was kept" : "nothing faster found yet" };
  return { name, value: count(steps, "step"), note: best === null ? "at the new speed" : `${duration(steps * best)} at the new speed` };
}

function tried(job) {
  const { search_steps: steps, search_seconds: spent } = job.figures;
  const note = steps && !isOfRuns(job) ? `${count(steps, "step")}, ${duration(spent)}` : duration(spent);
  return { name: "Tried", value: count(job.progress.trials_measured, "trial"), note };
}

function memory({ figures: { default_peak_bytes: before, peak_bytes: best, device_bytes: device } }) {
  if (device === null) return null;
  const areTwo = before !== null && best !== null && before !== best;
  const value = areTwo ? `${bytes(before)} → ${bytes(best)}` : bytes(best ?? before);
  const share = `${percent((best ?? before) / device)} of the ${bytes(device)} of the fullest rank`;
  return { name: "Memory", value, note: `${areTwo ? "default → best; " : ""}${share}` };
}
