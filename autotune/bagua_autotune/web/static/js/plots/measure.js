// What the plots show upwards: seconds per step, or speed-ups where a job reports no times.

import { seconds, secondsInterval, times } from "../format.js";
import { hasSeconds } from "../state.js";

const STEP_TIME = {
  areSeconds: true,
  value: (trial) => trial.seconds,
  low: (trial) => trial.low,
  high: (trial) => trial.high,
  text: (trial) => {
    const interval = secondsInterval(trial.low, trial.high);
    return `${seconds(trial.seconds)}${interval ? ` (95 %: ${interval})` : ""}`;
  },
  better: Math.min,
};

const SPEEDUP = {
  areSeconds: false,
  value: (trial) => trial.speedup,
  low: () => null,
  high: () => null,
  text: (trial) => times(trial.speedup),
  better: Math.max,
};

export const measureOf = (job) => (hasSeconds(job) ? STEP_TIME : SPEEDUP);

/** Trials that are over: of the best one's round, which is not the latest if that was broken off. */
export function closed(overview) {
  const round = overview.trials.find((trial) => trial.is_best)?.round ?? overview.job.round;
  return overview.trials.filter(({ round: its, state }) => its === round && ["measured", "failed", "infeasible"].includes(state));
}

/** Those of them with a value. */
export function measured(overview) {
  const { value } = measureOf(overview.job);
  return closed(overview).filter((trial) => value(trial) !== null);
}
