// The first things to know: state, speed-up and how sure it is, what the search cost; what runs now;
// and whether anything is wrong.

import { secondsSince } from "../api.js";
import { byId, element, renew, setText } from "../dom.js";
import { badge, bytes, count, duration, fixed, grouped, hasSeconds, isOfRuns, isOver, isSettled, isSilent, percent, seconds, stateWords, times, timesInterval, timeUnit, UNKNOWN } from "../words.js";
import { atLength } from "./tables.js";

export function showHeadline({ job }) {
  document.title = `${job.name} · ${stateWords(job)} · Bagua Autotune`;
  setText(byId("name"), job.name);
  if (byId("badge").textContent !== stateWords(job)) byId("badge").replaceChildren(badge(job));
  setText(byId("headline"), job.headline);
  const figures = [speedup(job), stepTime(job), cost(job), payback(job), tried(job), memory(job)].filter(Boolean);
  renew(byId("figures"), figures, () => figures.map(({ name, value, note, isNoise }) =>
    element("div", {}, element("dt", {}, name), element("dd", { class: isNoise ? "value noise" : "value" }, value), element("dd", { class: "muted" }, note)),
  ));
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

export function showNow(overview) {
  const { job } = overview;
  const isRunning = job.ended_at === null && !isSilent(job);
  setText(byId("now-title"), isRunning ? "Runs now" : "Ran last");
  const { words, isDefault } = inForce(overview);
  renew(byId("now-words"), [words, isDefault], () =>
    [`${words} `, isDefault ? element("span", { class: "tag" }, "default") : ""]);
  setText(byId("now-phase"), phase(job));
  showProgress(job);
}

/** The configuration that the ranks run, or ran until they were gone. */
function inForce({ job, trials, default_configuration: standard }) {
  const wanted = JSON.stringify(job.configuration);
  const wasCutShort = job.state === "ended" || job.state === "lost";
  const trial = trials.findLast(({ state, configuration }) =>
    wasCutShort ? state !== "proposed" : JSON.stringify(configuration) === wanted);
  const isDefault = JSON.stringify(trial?.configuration ?? job.configuration) === JSON.stringify(standard);
  return { words: trial?.words ?? (isDefault ? "the job's own configuration" : "the best of an earlier run"), isDefault };
}

function phase(job) {
  const { state, deciding, ended_at: ended, progress, result, round } = job;
  if (isOfRuns(job) && isOver(job)) return runsPhase(job);
  if (state === "finished") {
    const kept = result?.kept === "winner" ? "this configuration was faster than the default and is kept" : "the job keeps the default";
    return `Tuning is finished: ${kept}.${ended === null ? "" : " The training has ended."}`;
  }
  if (state === "ended") return "The training ended before its tuning was finished.";
  if (state === "lost") return "The training is lost. Its tuning continues when it comes back.";
  if (isSilent(job)) return `The training fell silent during ${state === "confirming" ? "the confirmation" : "the search"}.`;
  if (state === "confirming") return "Confirmation: the best configuration and the default are measured again.";
  if (progress.trials_measured === 0 && !round) return "First trial: the default is measured, to compare everything with it.";
  const again = round ? "The step time changed, so the job is tuned again. " : "";
  return again + (deciding ? "Search: the next configuration is being chosen." : "Search: this configuration is being measured.");
}

function runsPhase({ state, result }) {
  if (state !== "finished") return "The search is interrupted. The same command goes on with it.";
  const kept = result?.kept === "winner" ? "these settings were faster than your own" : "your own settings stay";
  return `The search is finished: ${kept}.`;
}

/** Of the phase that runs: the trials that confirm come on top of those of the search. */
function phaseTrials({ state, progress }) {
  return state === "confirming"
    ? { name: "Confirming trial", begun: progress.confirming_trials, most: progress.max_confirming_trials }
    : { name: "Trial", begun: progress.search_trials, most: progress.max_trials };
}

function showProgress(job) {
  const { trials_measured: measured, seconds_left: left } = job.progress;
  const isDone = job.state === "finished";
  const { name, begun, most } = phaseTrials(job);
  const bar = byId("progress");
  [bar.max, bar.value] = isDone ? [1, 1] : [Math.max(most, 1), begun - (job.trial ? 1 : 0)];
  const parts = isOver(job) ? [] : [`${name} ${grouped(Math.max(begun, 1))} of at most ${grouped(most)}`];
  parts.push(`${count(measured, "trial")} measured${isOver(job) ? "" : " in all"}`);
  if (!isOver(job) && !isSilent(job) && left !== null) parts.push(left < 1 ? "less than 1 s left" : `at most ${duration(left)} left`);
  setText(byId("progress-words"), parts.join(", "));
}

const KINDS = { silence, slowRank, failures };

const shown = new Map(); // kind -> its notice

export function showWarnings(overview) {
  const appeared = [];
  for (const [kind, find] of Object.entries(KINDS)) {
    const found = find(overview);
    const before = shown.get(kind);
    if (found === null) {
      before?.remove();
      shown.delete(kind);
    } else if (before?.dataset.said !== said(found)) {
      const notice = element("div", { class: "notice", "data-said": said(found) }, found.text, found.more ?? null);
      if (before) before.replaceWith(notice);
      else {
        byId("warnings").append(notice);
        appeared.push(found.text);
      }
      shown.set(kind, notice);
    }
  }
  // A screen reader is told of what is new, not of each change of a number.
  if (appeared.length || shown.size === 0) setText(byId("announced"), appeared.join(" "));
}

const said = ({ text, more }) => `${text}${more?.textContent ?? ""}`;

function silence({ job }) {
  if (!isSilent(job)) return null;
  if (job.state === "lost" && isOfRuns(job)) return null;
  if (job.state === "lost") return { text: "The service hears nothing from this training any more. Its trials are kept, and the tuning continues when the training comes back." };
  const tens = Math.floor(secondsSince(job.last_contact_at) / 10) * 10;
  return { text: `The service has heard nothing from this training for ${duration(tens)}, although its tuning is not finished.` };
}

function slowRank({ job: { figures } }) {
  const { slow_rank: rank, rank_spread_ratio: spread, slowest_share: share } = figures;
  if (rank === null) return null;
  return {
    text: `Rank ${rank} is slow: it computes ${percent(spread)} of a step longer than the median rank, ` +
      `and is the slowest in ${percent(share)} of the steps.`,
  };
}

function failures({ trials }) {
  const failed = trials.filter(({ state }) => state === "failed");
  if (failed.length === 0) return null;
  const last = failed.at(-1);
  const many = failed.length === 1 ? "One trial failed" : `${failed.length} trials failed`;
  return { text: `${many}; trial ${last.index}: `, more: atLength(last.failure ?? "no reason was given") };
}
