"""A job in words: in one sentence, and why it runs what it runs."""

from __future__ import annotations

from collections.abc import Mapping

from bagua_autotune.measuring.rounds import Round, is_settled
from bagua_autotune.measuring.standing import best_trial, bounds, closest
from bagua_autotune.model.job import CUT_SHORT, RUNS, Job, Trial
from bagua_autotune.model.reasons import NOTHING_FASTER, REASON_CODES
from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.text import (
    clean,
    describe_count,
    describe_left,
    describe_seconds,
    describe_speedup,
)
from bagua_autotune.tuning.status import JobState, Progress
from bagua_autotune.views.reading import Reading
from bagua_autotune.views.speedup import Figures
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.words import describe

ENDED_EARLY = "The training ended before its tuning did"
LOST_EARLY = (
    "The training was lost before its tuning ended; its tuning continues when it comes back"
)


SEARCH_INTERRUPTED = "The search is interrupted; the same command goes on with it"


def make_headline(reading: Reading, state: JobState, figures: Figures) -> str:
    """Return the page's headline, such as ``Tuned: 1.56x (1.51 to 1.60) with bucket 1 MiB,
    hierarchical``.
    """
    job = reading.job
    result = job.result
    if result and is_settled(job):
        if result.kept == "winner":
            times = describe_speedup(result.speedup, result.low, result.high)
            outcome = f"{times}{_of_at_most(figures)} with {describe(result.configuration)}"
        else:
            outcome = ", ".join(["the default stays", *filter(None, [clean(result.reason)])])
        if job.phase == "finished":
            return f"Tuned: {outcome}"
        return f"{_end(job)}{outcome}"
    so_far = _so_far(job, state.progress, figures)
    if job.phase in CUT_SHORT:
        return ", ".join([_cut_short(job), *so_far])
    word = "Confirming" if job.phase == "confirming" else "Tuning"
    again = " again" if job.round else ""
    return f"{word}{again}: " + ", ".join([*(so_far or ["measuring the default"]), *_pace(state)])


def _cut_short(job: Job) -> str:
    if job.protocol in RUNS:
        return SEARCH_INTERRUPTED
    return LOST_EARLY if job.phase == "lost" else ENDED_EARLY


def _end(job: Job) -> str:
    """Return how the job ended, as the beginning of a sentence on the round before."""
    end = "was lost" if job.phase == "lost" else "ended"
    return f"The training {end} while it was being tuned again; before that: "


def _so_far(job: Job, progress: Progress, figures: Figures) -> list[str]:
    if figures.is_noise and figures.ceiling is not None:
        return [f"what seems faster so far is noise: at most {figures.ceiling:.2f}x is possible"]
    if figures.speedup is None:
        return []
    if progress.incumbent == job.baseline:
        return ["nothing faster than the default so far"]
    times = describe_speedup(figures.speedup, figures.speedup_low, figures.speedup_high)
    return [f"{times}{_of_at_most(figures)} so far, not confirmed"]


def _of_at_most(figures: Figures) -> str:
    return "" if figures.ceiling is None else f" of at most {figures.ceiling:.2f}x"


def _pace(state: JobState) -> list[str]:
    """``trial 7 of at most 60``, ``at most 80 s left``."""
    begun, most = state.phase_trials
    kind = "confirming trial" if state.state == "confirming" else "trial"
    pace = [f"{kind} {max(1, begun)} of at most {most}"]
    if state.progress.seconds_left is not None:
        pace.append(describe_left(state.progress.seconds_left))
    return pace


def explain(reading: Reading, figures: Figures, exposed_seconds: Mapping[int, float]) -> str:
    """Say what was compared, by how much it differs, and what communication is hidden.

    Args:
        exposed_seconds: communication that computing does not hide, per step, by trial index;
            of the best trial and of the default's, where it is known.
    """
    job = reading.job
    best = best_trial(reading.shown)
    if job.result and is_settled(job):
        again = _end(job) if job.phase in CUT_SHORT else ""
        sentences = [again + _result(reading, figures)]
    elif best is None:
        sentences = ["Nothing is measured yet: the default comes first."]
    else:
        sentences = [_fastest_so_far(reading, best, figures)]
    hidden = _hidden(reading, figures, best, exposed_seconds) if best else ""
    spent = _memory(figures)
    return " ".join(filter(None, [*sentences, spent, machine_change(reading), hidden]))


def _memory(figures: Figures) -> str:
    """What it takes of the fullest rank's memory, what that bought, and what is left."""
    default, own, device = figures.default_peak_bytes, figures.peak_bytes, figures.device_bytes
    if own is None or device is None:
        return ""
    said = f"It takes {describe_bytes(own)} of that rank's memory whose device is the fullest"
    before, after = figures.baseline_seconds, figures.incumbent_seconds
    if default is not None and own > default and before is not None and after is not None:
        saved = describe_seconds((before - after) / ((own - default) / 2**30))
        said += (
            f", {describe_bytes(own - default)} more than the default, which bought {saved} of a "
            "step for each GiB"
        )
    return f"{said}; {describe_bytes(device - own)} are free."


def machine_change(reading: Reading) -> str:
    """Return one sentence if the default's step time changed during the tuning beyond its noise;
    else empty.
    """
    change = reading.shown.defaults.change(reading.objective)
    if change is None:
        return ""
    before, after = (_seconds(reading, trial) for trial in (change.before, change.after))
    if before is None or after is None:
        return ""
    return (
        "The machine itself changed during the tuning: a step of the default took "
        f"{describe_seconds(before)} in trial {change.before.index} and "
        f"{describe_seconds(after)} in trial {change.after.index}."
    )


def _result(reading: Reading, figures: Figures) -> str:
    job = reading.job
    result = job.result
    assert result is not None  # it is settled
    tried = _configurations(reading)
    if result.kept == "baseline":
        reason = clean(result.reason) or NOTHING_FASTER
        return f"The default stays: {reason}; {tried} measured.{_closest(reading)}"
    words = describe(result.configuration)
    times = describe_speedup(result.speedup, result.low, result.high)
    visits = [t for t in reading.shown.trials if t.configuration == result.configuration]
    if sum(trial.estimate is not None for trial in visits) > 1:
        return (
            f"Of {tried}, {words} was the fastest; when it and the default were measured again, "
            f"it was {times} as fast{_step_times(figures)}."
        )
    return (
        "It was the best in an earlier run, and measured beside the default it is again the best, "
        f"{times} as fast{_step_times(figures)}."
    )


def _closest(reading: Reading) -> str:
    """Say what came closest to the default, where that was what decided."""
    job, shown = reading.job, reading.shown
    is_decided = job.result and job.result.reason_code == REASON_CODES[NOTHING_FASTER]
    found = closest(shown) if is_decided else None
    if found is None:
        return ""
    words, times = describe(found.configuration), _times(found.speedup)
    if found.was_confirmed:
        return (
            f" The best of the others, {words}, was {times} as fast as the default when both were "
            "measured again."
        )
    default = _name_default_trials(shown)
    doubt = ""
    if found.speedup.low > 1:
        doubt = "; the search took that for noise or for a change of the machine"
    return f" The best of the others, {words}, was {times} as fast as {default}{doubt}."


def _name_default_trials(round_: Round) -> str:
    """Name the trials of the default that a trial is compared with; a single one may be
    long ago.
    """
    baseline = round_.job.baseline
    own = [t.index for t in round_.trials if t.configuration == baseline and t.estimate]
    if len(own) > 1:
        return "the default beside it"
    return f"the default, which was measured in trial {own[0]} alone"


def _times(faster: Interval) -> str:
    return describe_speedup(faster.center, *bounds(faster))


def _seconds(reading: Reading, trial: Trial) -> float | None:
    return reading.objective.seconds(trial.estimate.center) if trial.estimate else None


def _step_times(figures: Figures) -> str:
    """``: 192 ms a step, the default 300 ms``; empty where they are not known."""
    own, default = figures.incumbent_seconds, figures.baseline_seconds
    if own is None or default is None:
        return ""
    return f": {describe_seconds(own)} a step, the default {describe_seconds(default)}"


def _fastest_so_far(reading: Reading, best: Trial, figures: Figures) -> str:
    if best.configuration == reading.job.baseline:
        return f"Of {_configurations(reading)}, the default is the fastest so far."
    words, times = describe(best.configuration), _step_times(figures)
    if reading.job.phase == "confirming":
        so_far = "seemed the fastest; it and the default are being measured again"
    else:
        so_far = "is the fastest so far, not confirmed yet"
    return f"Of {_configurations(reading)}, {words} {so_far}{times}."


def _configurations(reading: Reading) -> str:
    measured = {trial.configuration for trial in reading.shown.trials if trial.estimate}
    return describe_count(len(measured), "configuration")


def _hidden(
    reading: Reading, figures: Figures, best: Trial, exposed_seconds: Mapping[int, float]
) -> str:
    """Say how much of a step is spent waiting for communication, and what that leaves to
    be gained.
    """
    baseline = reading.shown.defaults.trial
    own = exposed_seconds.get(best.index)
    default = exposed_seconds.get(baseline.index) if baseline else None
    most = _most(reading, figures)
    what = "Communication that computing does not hide takes"
    if own is not None and default is not None and baseline and baseline.index != best.index:
        own_words, default_words = describe_seconds(own), describe_seconds(default)
        return f"{what} {own_words} of a step, and {default_words} of the default's{most}."
    if default is not None:
        return f"{what} {describe_seconds(default)} of the default's step{most}."
    return "" if own is None else f"{what} {describe_seconds(own)} of a step."


def _most(reading: Reading, figures: Figures) -> str:
    """Say what the default's communication leaves to be gained at most."""
    ceiling = reading.shown.ceiling
    if ceiling is None:
        return ""
    if reading.shown.most_speedup is None:
        return ": more was gained than that, so computing itself takes less time, too"
    noise = ", and what seems faster is noise" if figures.is_noise else ""
    return (
        f", which took {describe_seconds(ceiling.seconds)}: without it a step would be at "
        f"most {ceiling.speedup:.2f}x as fast{noise}"
    )
