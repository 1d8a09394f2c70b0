// What the job runs now, in which phase its tuning is, and how far.

import { byId, element, setText } from "../dom.js";
import { count, duration, grouped } from "../format.js";
import { isOfRuns, isOver, isSilent } from "../state.js";

export function showNow(overview) {
  const { job } = overview;
  const isRunning = job.ended_at === null && !isSilent(job);
  setText(byId("now-title"), isRunning ? "Runs now" : "Ran last");
  const { words, isDefault } = inForce(overview);
  if (byId("now-words").dataset.shown !== `${words} ${isDefault}`) {
    byId("now-words").dataset.shown = `${words} ${isDefault}`;
    byId("now-words").replaceChildren(`${words} `, isDefault ? element("span", { class: "tag" }, "default") : "");
  }
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
