"""The configurations worth trying: a finite list, so that a search never leaves it.

Sizes closer than half-powers of two cannot be told apart on a live job, and sizes that cut the
tensors into the same buckets do not differ at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from bagua_autotune.costs import CostModel, Kind, Layouts
from bagua_autotune.costs.layouts import parts
from bagua_autotune.model.knobs import (
    MANY_TENSORS,
    Categorical,
    Domain,
    LogInteger,
    Space,
    algorithm_of,
    choices,
)
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import SMALLEST_STRIPE_BYTES, Tensor
from bagua_wire.knobs import (
    BUCKET_KNOB,
    CHANNELS_KNOB,
    EDGE_KNOBS,
    PARTITION_KNOB,
    SCATTER_GROUP_KNOB,
    WAYS_KNOB,
)

SMALLEST_STRIPED_BYTES = 2 * SMALLEST_STRIPE_BYTES
"""A unit of a sharded model that travels in several stripes has as much for each, as two ranks hold
parts of it at least."""


def travels_in_stripes(software: Mapping[str, str]) -> bool:
    """Whether each tensor of a job is a unit of a sharded model, which all channels carry together.

    Args:
        software: what the job was registered with.
    """
    return "sharding" in software


def enumerate_candidates(
    space: Space, baseline: Configuration, tensors: Sequence[Tensor], is_striped: bool = False
) -> tuple[Configuration, ...]:
    """All candidates that are cut by size, the default first.

    Of candidates with the same effect (the same buckets, no more channels than parts) only one is
    listed: the default, or the one with the smallest values.

    Args:
        is_striped: see :func:`travels_in_stripes`.
    """
    values_of = {
        knob: [baseline[knob]]
        if knob in EDGE_KNOBS and len(tensors) > MANY_TENSORS
        else _values(domain, baseline, knob)
        for knob, domain in space.items()
    }
    layouts = Layouts(tensors)
    found = {_effect(baseline, layouts, is_striped): baseline}
    for stays in choices(space, baseline):
        lists = [[stays[knob]] if knob in stays else values_of[knob] for knob in space]
        ways = algorithm_of(stays).ways
        for values in product(*lists):
            configuration = Configuration(dict(zip(space, values, strict=True)))
            if ways is None or configuration.get(WAYS_KNOB, ways[0]) in ways:
                found.setdefault(_effect(configuration, layouts, is_striped), configuration)
    return tuple(found.values())


def _effect(configuration: Configuration, layouts: Layouts, is_striped: bool) -> tuple[object, ...]:
    """Return what decides the step time; equal for configurations with the same effect."""
    cut = layouts.cut(configuration)
    channels = configuration.get(CHANNELS_KNOB, 1)
    if isinstance(channels, int):
        most = int(parts(cut.sizes_bytes, channels).sum())
        if is_striped:
            most = max(most, int(max(cut.sizes_bytes, default=0)) // SMALLEST_STRIPED_BYTES)
        channels = min(channels, most)
    has_several = isinstance(channels, int) and channels > 1
    # With several channels gradients have no group of their own.
    unused = (BUCKET_KNOB, CHANNELS_KNOB, *EDGE_KNOBS, *[SCATTER_GROUP_KNOB] * has_several)
    rest = [(knob, value) for knob, value in configuration.items() if knob not in unused]
    return (layouts.digest(configuration), channels, *rest)


def explicit_candidates(
    space: Space,
    baseline: Configuration,
    candidates: Sequence[Configuration],
    layouts: Layouts,
    model: CostModel,
) -> list[Configuration]:
    """The best explicit list of buckets for each way to reduce, by the cost model.

    With one channel and unchanged gradients, as the cost model assumes.  Its bucket size is that of
    its average bucket.  A list that equals a candidate's buckets is left out.
    """
    domain = space.get(BUCKET_KNOB)
    if not isinstance(domain, LogInteger):
        return []
    table = layouts.table(candidates)
    counted = table.is_bucket.sum(axis=1)
    total_bytes = sum(tensor.bytes for tensor in layouts.tensors)
    found = []
    for kind in model.costs:
        counts = model.best_partition(kind) if kind == Kind(kind.hierarchical) else None
        if counts is None:
            continue
        alike = table.last[counted == len(counts), : len(counts)]
        if len(alike) and (alike == np.cumsum(counts) - 1).all(axis=1).any():
            continue
        size = min(max(total_bytes // len(counts), domain.low), domain.high)
        values: dict[str, Value] = {**baseline, BUCKET_KNOB: size, PARTITION_KNOB: counts}
        values |= {knob: value for knob, value in kind._asdict().items() if knob in space}
        found.append(Configuration(values))
    return found


def _values(domain: Domain, baseline: Configuration, knob: str) -> Sequence[Value]:
    if isinstance(domain, LogInteger):
        return _half_powers(domain, baseline.number(knob))
    return domain.values if isinstance(domain, Categorical) else [baseline[knob]]


def _half_powers(domain: LogInteger, baseline: int) -> list[int]:
    """Return half-powers of two inside the domain, and the default's value, ascending."""
    first = math.ceil(2 * math.log2(domain.low) - 1e-9)
    last = math.floor(2 * math.log2(domain.high) + 1e-9)
    values = {_round(2 ** (half / 2)) for half in range(first, last + 1)}
    return sorted({value for value in values if domain.contains(value)} | {baseline})


def _round(size: float) -> int:
    """Round to whole KiB where that changes little: such sizes are easier to read."""
    return round(size / 1024) * 1024 if size >= 64 * 1024 else round(size)
