"""A tuning that was cut short and begins anew with the same job: what of it is carried over.

A training that is started again, with as many ranks or others, is a new process group and a new job
in the store: nothing that an old process may still say is mixed with what the new one measures. It
measures its own default first. If that takes as long as it did, trials of before count as if they
were its own, and what was under way is tried next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from bagua_autotune.measuring.rounds import Round, measured_in
from bagua_autotune.model.job import Earlier, EarlierTrial, Inherited, JobSpec, Trial, TrialState
from bagua_autotune.model.reasons import did_lasting_harm
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.model.text import describe_count
from bagua_wire.configuration import Configuration, Value
from bagua_wire.words import describe

# Of the default's step times before and after the restart; the same setting differs by as much from
# one time to another. Costs are kept relative to it.
SAME_SPEED = 0.1
# A configuration under which the training was cut short so often may be what ends it.
MOST_DEATHS = 2
LIVES_REMEMBERED = 10
DEADLY = f"the training was killed {MOST_DEATHS} times while it ran this"


def left_by(previous: Round, spec: JobSpec) -> Earlier | None:
    """What the newest job of the same name and model leaves to one that is registered now; None if
    its tuning was done, and nothing that it kept did harm.

    Args:
        previous: its latest round.
    """
    job = previous.job
    harmful = [
        _relative(trial, 0.0)
        for trial in {t.configuration: t for t in harmful_before(previous)}.values()
        if fits(trial.configuration, spec)
    ]
    if job.phase == "finished":
        return Earlier(trials=tuple(harmful)) if harmful else None
    before = job.inherited.earlier if job.inherited else None
    deaths = list(before.under_way) if before else []
    deaths += [dict(trial.configuration) for trial in previous.trials if trial.is_open]
    fitting = tuple(config for config in deaths if fits(config, spec))[-LIVES_REMEMBERED:]
    if job.fingerprint != spec.fingerprint:
        known = fitting or harmful
        return Earlier(trials=tuple(harmful), under_way=fitting) if known else None
    baseline = previous.defaults.first
    if baseline is None:
        return before.model_copy(update={"under_way": fitting}) if before else None
    closed = [*carried_over(previous), *previous.searched]
    kept = {
        trial.configuration: _relative(trial, baseline.center)
        for trial in closed
        if not trial.is_open and trial.configuration != job.baseline
    }
    found = tuple(trial for trial in kept.values() if fits(trial.configuration, spec))
    return Earlier(baseline=baseline.center, trials=found, under_way=fitting)


def describe_inherited(inherited: Inherited) -> list[str]:
    """What a job goes on from, and what it leaves out; nothing if it is not one that ran before."""
    return list(filter(None, (_describe_source(inherited), _describe_harm(inherited))))


def _describe_source(inherited: Inherited) -> str:
    earlier, source = inherited.earlier, inherited.source
    if earlier and earlier.baseline is not None:
        trials = describe_count(len(earlier.trials), "trial")
        return (
            f"continues job {source}, which was interrupted, and uses its {trials} if the default "
            "still takes as long as it did there"
        )
    if inherited.gain is None and inherited.configuration is not None:
        what = describe(inherited.configuration)
        if not source:
            return f"tries {what} first after the default, as the training asked"
        return f"continues job {source}: what was best there, {what}, is tried after the default"
    return ""


def _describe_harm(inherited: Inherited) -> str:
    harmful = harmful_of(inherited)
    if not harmful:
        return ""
    named = "; ".join(describe(trial.configuration) for trial in harmful)
    return (
        "the numbers are not changed again in the way under which the training suffered in the "
        f"long run ({named}); BAGUA_AUTOTUNE_FRESH=1 forgets that"
    )


def fits(configuration: Mapping[str, Value], spec: JobSpec) -> bool:
    """Whether the job can run it."""
    try:
        spec.check(Configuration(configuration))
    except ValueError:
        return False
    return True


def harmful_before(round_: Round) -> list[Trial]:
    """Return what did harm in the long run: in earlier jobs, in rounds before, and in this one."""
    inherited = round_.job.inherited
    earlier = harmful_of(inherited) if inherited else []
    return [*earlier, *round_.harmful, *filter(did_lasting_harm, round_.trials)]


def harmful_of(inherited: Inherited) -> list[Trial]:
    """Return what did harm in the long run in earlier jobs."""
    told = inherited.earlier.trials if inherited.earlier else ()
    earlier = (_absolute(place, trial, 0.0) for place, trial in enumerate(told))
    return list(filter(did_lasting_harm, earlier))


def carried_over(round_: Round) -> list[Trial]:
    """Return trials of earlier lives that count as if the round had made them first; and, in every
    round, what did harm in the long run."""
    earlier = _earlier(round_)
    baseline = round_.defaults.first
    if earlier is None or baseline is None:
        return harmful_before(round_)
    found = [trial for trial in earlier.trials if trial.failure is not None]
    if _holds(round_, baseline, earlier):
        found = list(earlier.trials)
    carried = [_absolute(place, trial, baseline.center) for place, trial in enumerate(found)]
    carried += filter(did_lasting_harm, round_.trials)
    times = Counter(map(Configuration, earlier.under_way))
    # What was measured since did not end it.
    known = {trial.configuration for trial in (*carried, *round_.trials) if trial.estimate}
    deadly = [c for c, deaths in times.items() if deaths >= MOST_DEATHS and c not in known]
    return carried + [Trial(-1, "search", c, "failed", failure=DEADLY) for c in deadly]


def offered_again(
    round_: Round, known: Sequence[Trial], banned: Collection[Configuration]
) -> Configuration | None:
    """What was under way when the training was cut short, unless it is measured by now.

    Args:
        known: trials of this round, and those that are carried over.
    """
    earlier = _earlier(round_)
    if earlier is None or earlier.baseline is None or not earlier.under_way:
        return None
    last = Configuration(earlier.under_way[-1])
    is_open = last not in banned and measured_in(known, last) is None
    return last if is_open else None


def told_before(round_: Round) -> list[Configuration]:
    """Return the configurations that earlier lives tried."""
    earlier = _earlier(round_)
    if earlier is None:
        return []
    configurations = [trial.configuration for trial in earlier.trials]
    return list(map(Configuration, [*configurations, *earlier.under_way[-1:]]))


def _earlier(round_: Round) -> Earlier | None:
    """What a tuning that was cut short left; only a first round uses it, and only if it may try
    something.
    """
    job = round_.job
    if job.inherited is None or round_.number > 0 or job.limits.max_samples == 1:
        return None
    return job.inherited.earlier


def _holds(round_: Round, baseline: Estimate, earlier: Earlier) -> bool:
    if earlier.baseline is None:
        return False
    scale = round_.objective.scale(baseline.center)
    return abs(baseline.center - earlier.baseline) <= SAME_SPEED * scale


def _relative(trial: Trial, baseline: float) -> EarlierTrial:
    found = trial.estimate
    if found is None:
        memory = trial.memory if trial.state == "infeasible" else None
        return EarlierTrial(
            configuration=dict(trial.configuration), failure=trial.failure or "", memory=memory
        )
    return EarlierTrial(
        configuration=dict(trial.configuration),
        cost=found.center - baseline,
        standard_error=found.standard_error if math.isfinite(found.standard_error) else None,
        count=found.count,
        outliers=found.outliers,
    )


def _absolute(place: int, told: EarlierTrial, baseline: float) -> Trial:
    configuration = Configuration(told.configuration)
    if told.failure is not None:
        state: TrialState = "infeasible" if told.memory else "failed"
        return Trial(
            -1 - place, "search", configuration, state, failure=told.failure, memory=told.memory
        )
    error = math.inf if told.standard_error is None else told.standard_error
    found = Estimate(baseline + told.cost, error, told.count, told.outliers)
    return Trial(-1 - place, "search", configuration, "measured", found)
