"""What a new job takes over from earlier ones: the best setting, or parts of the cost model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from bagua_autotune.costs import Costs, Kind
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.earlier.restart import fits, left_by
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import best_configuration
from bagua_autotune.model.job import Earlier, Inherited, Job, JobSpec, Trial
from bagua_autotune.model.reasons import (
    BEST_BEFORE,
    NOT_SHOWN,
    NOTHING_FASTER,
    REASON_CODES,
    TIME_WAS_UP,
    WINNER_CODE,
    did_lasting_harm,
)
from bagua_autotune.model.received import Memory
from bagua_autotune.store import Store

# The newest of a name and model; a life may be as short as a trial.
MOST_ALIKE = 20


def model_key(spec: JobSpec) -> str:
    """Return a key that is equal for jobs that train the same model: tensors and their order. Those
    of several teams have nothing in common.
    """
    return _key(spec, [[tensor.bytes, tensor.dtype, tensor.group] for tensor in spec.tensors])


def network_key(spec: JobSpec) -> str:
    """Return a key that is equal for jobs whose collectives cost the same: topology, hardware and
    software; and whose team is the same.
    """
    return _key(spec, [spec.ranks_per_node, sorted(spec.software.items())])


def inherit(spec: JobSpec, store: Store, knowledge: Knowledge) -> Inherited | None:
    """What is known of a job that is about to be registered; None if nothing is.

    The result of a job with the same fingerprint counts; ready times may come from any job of
    the same model, costs from any on the same network. The newest job of the same name, on the
    same ranks if there is one, may be this one before it was started again: see restart. One on
    other ranks leaves more, the more alike its ranks are. What the training says that it wants to
    begin with goes before all of that. One that begins afresh takes over nothing else.
    """
    if spec.fresh:
        return _begun_with(spec)
    own = model_key(spec) if spec.team else None  # a fingerprint is the same in all teams
    same = store.jobs.latest(fingerprint=spec.fingerprint, model_key=own, finished=True)
    alike = store.jobs.alike(spec.name, model_key(spec), MOST_ALIKE)
    previous = next((job for job in alike if job.fingerprint == spec.fingerprint), None)
    previous = previous or next(iter(alike), None)
    by_likeness = sorted(alike, key=lambda job: _unlikeness(job, spec))
    ready, timed = _ready_seconds(spec, store, knowledge, alike)
    costs, priced = _costs(spec, store, knowledge, by_likeness)
    configuration: dict[str, Any] | None = None
    gain: float | None = None
    earlier: Earlier | None = None
    refused: Memory | None = None
    sources = [timed, priced]
    if same and same.result and _is_telling(same) and fits(same.result.configuration, spec):
        configuration = dict(same.result.configuration)
        gain = math.log(max(same.result.speedup, 1.0))
        refused = _least_refused(store.trials.of(same.id))
        sources.insert(0, same)
    if previous:
        earlier = left_by(Round.of(previous, store.trials.of(previous.id)), spec)
        if gain is None:
            configuration, begun = _begins_with(by_likeness, spec, store)
            sources.insert(0, begun)
        elif earlier:
            # What was confirmed needs no trials of before, but what did harm is not tried again.
            harmful = tuple(filter(did_lasting_harm, earlier.trials))
            earlier = Earlier(trials=harmful, under_way=earlier.under_way)
        sources.insert(0 if earlier and previous.phase != "finished" else 4, previous)
    if (asked := _begun_with(spec)) is not None:
        configuration, gain = asked.configuration, asked.gain
        sources = []
    if configuration is None and ready is None and not costs and earlier is None:
        return None
    return Inherited(
        configuration=configuration,
        gain=gain,
        ready_seconds=ready,
        costs={kind.key: astuple(cost) for kind, cost in costs.items()},
        source=next((job.id for job in sources if job), ""),
        earlier=earlier,
        refused=refused,
    )


def _least_refused(trials: Sequence[Trial]) -> Memory | None:
    """Of what did not fit in memory what needs the least."""
    refused = (trial.memory for trial in trials if trial.state == "infeasible" and trial.memory)
    return min(refused, key=lambda memory: memory.peak_bytes, default=None)


def _begun_with(spec: JobSpec) -> Inherited | None:
    """Return what the training itself wants to begin with; None: nothing, or the default."""
    if spec.begin_with is None or spec.begin_with == spec.default_configuration:
        return None
    return Inherited(configuration=dict(spec.begin_with), gain=None, source="")


def _unlikeness(job: Job, spec: JobSpec) -> tuple[bool, bool, bool]:
    """Return a sort key: how much less than others a job says of one on these ranks."""
    are_both_across = (len(job.ranks_per_node) > 1) == (len(spec.ranks_per_node) > 1)
    is_same_size = job.ranks_per_node == spec.ranks_per_node
    return job.fingerprint != spec.fingerprint, not is_same_size, not are_both_across


def _ready_seconds(
    spec: JobSpec, store: Store, knowledge: Knowledge, alike: Sequence[Job]
) -> tuple[tuple[float, ...] | None, Job | None]:
    """When the model's gradients are ready, and the job that says so."""
    profiled = store.jobs.latest(model_key=model_key(spec), profiled=True)
    for job in [profiled, *alike] if profiled else alike:
        ready, _ = knowledge.learned(job)
        if ready is not None and len(ready) == len(spec.tensors):
            return tuple(ready), job
    return None, None


def _costs(
    spec: JobSpec, store: Store, knowledge: Knowledge, by_likeness: Sequence[Job]
) -> tuple[Costs, Job | None]:
    """What the network's collectives cost, and the job that says so."""
    profiled = store.jobs.latest(network_key=network_key(spec), profiled=True)
    model = knowledge.fit_whole(profiled) if profiled else None
    if model:
        return model.costs, profiled
    for job in by_likeness:
        costs = resized_costs(job, spec, knowledge)
        if costs:
            return costs, job
    return {}, None


def _begins_with(
    by_likeness: Sequence[Job], spec: JobSpec, store: Store
) -> tuple[dict[str, Any] | None, Job | None]:
    """The best of the same job before it was started again, and where that was found; not confirmed
    for these ranks."""
    for job in by_likeness:
        is_resized = job.ranks_per_node != spec.ranks_per_node
        if job.software != spec.software or (job.phase == "finished" and not is_resized):
            continue
        found = best_configuration(Round.shown(job, store.trials.of(job.id)))
        if found is not None and found != dict(spec.default_configuration) and fits(found, spec):
            return dict(found), job
    return None, None


def resized_costs(previous: Job, spec: JobSpec, knowledge: Knowledge) -> Costs:
    """What the collectives of the previous job would cost among other ranks; empty: nobody knows.

    Links stay as they are where there were several nodes and still are, or one and still one. An
    all-reduce among n ranks sends 2 (n - 1) / n times the bytes over each, in 2 (n - 1) messages
    one after the other (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
    of workstations", J. Parallel Distrib. Comput. 69, 2009). What else differs is for all of them
    alike, which the fit allows for (see costs.fitting).
    """
    before, now = previous.ranks_per_node, spec.ranks_per_node
    is_same_network = previous.software == spec.software and (len(before) > 1) == (len(now) > 1)
    costs = knowledge.learned(previous)[1] if is_same_network else {}
    found = {}
    for kind, cost in costs.items():
        old, new = _members(kind, before), _members(kind, now)
        if min(old, new) > 1:
            bytes_ratio = (new - 1) / new / ((old - 1) / old)
            found[kind] = replace(
                cost,
                latency_seconds=cost.latency_seconds * (new - 1) / (old - 1),
                seconds_per_byte=cost.seconds_per_byte * bytes_ratio,
            )
    return found


def _members(kind: Kind, ranks_per_node: Sequence[int]) -> int:
    """How many take part where the network decides: all ranks, or one of each node."""
    return sum(ranks_per_node) if kind.hierarchical == "off" else len(ranks_per_node)


def _is_telling(job: Job) -> bool:
    """Whether its result says what is fast: a default that was kept for want of trials, or because
    the ranks failed in the others, does not."""
    result = job.result
    if result is None:
        return False
    code = result.reason_code
    if code in (WINNER_CODE, REASON_CODES[BEST_BEFORE]):
        return True
    is_nothing_faster = code == REASON_CODES[NOTHING_FASTER]
    is_nothing_faster &= not any(cut in result.reason for cut in (TIME_WAS_UP, NOT_SHOWN))
    return is_nothing_faster and 1 < result.trials < job.limits.max_samples


def _key(spec: JobSpec, content: Sequence[Any]) -> str:
    content = [*content, spec.team] if spec.team else content
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
