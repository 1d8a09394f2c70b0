"""What a new job takes over from earlier ones: the best setting, or parts of the cost model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from bagua_autotune.model.job import Inherited, Job, JobSpec, Result
from bagua_autotune.store import Store
from bagua_autotune.tuning.decision import BEST_BEFORE, NOTHING_FASTER
from bagua_autotune.tuning.knowledge import Knowledge


def model_key(spec: JobSpec) -> str:
    """Equal for jobs that train the same model: tensors and their order."""
    return _key([[tensor.bytes, tensor.dtype, tensor.group] for tensor in spec.tensors])


def network_key(spec: JobSpec) -> str:
    """Equal for jobs whose collectives cost the same: topology, hardware and software."""
    return _key([spec.ranks_per_node, sorted(spec.software.items())])


def inherit(spec: JobSpec, store: Store, knowledge: Knowledge) -> Inherited | None:
    """What is known of a job that is about to be registered; None if nothing is.

    The result of a job with the same fingerprint counts; ready times may come from any job of
    the same model, costs from any on the same network.
    """
    same = store.latest_job(fingerprint=spec.fingerprint, finished=True)
    same_model = store.latest_job(model_key=model_key(spec), profiled=True)
    same_network = store.latest_job(network_key=network_key(spec), profiled=True)
    ready = knowledge.fit_whole(same_model) if same_model else None
    costs = knowledge.fit_whole(same_network) if same_network else None
    configuration: dict[str, Any] | None = None
    gain = 0.0
    if same and same.result and _is_telling(same) and _fits(same.result, spec):
        configuration = dict(same.result.configuration)
        gain = math.log(max(same.result.speedup, 1.0))
    sources = [job for job in (same if configuration else None, same_model, same_network) if job]
    if configuration is None and ready is None and costs is None:
        return None
    return Inherited(
        configuration=configuration,
        gain=gain,
        ready_seconds=tuple(ready.ready_seconds.tolist()) if ready else None,
        costs={kind.key: astuple(cost) for kind, cost in (costs.costs if costs else {}).items()},
        source=sources[0].id,
    )


def _is_telling(job: Job) -> bool:
    """Whether its result says what is fast: a default that was kept for want of trials, or because
    the ranks failed in the others, does not."""
    result = job.result
    if result is None or result.kept == "winner" or result.reason == BEST_BEFORE:
        return result is not None
    return result.reason == NOTHING_FASTER and 1 < result.trials < job.limits.max_samples


def _fits(result: Result, spec: JobSpec) -> bool:
    try:
        spec.check(result.configuration)
    except ValueError:
        return False
    return True


def _key(content: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
