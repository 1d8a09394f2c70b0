"""The configurations worth trying: a finite list, so that a search never leaves it.

Sizes between two half-powers of two differ too little to be told apart on a live job, and
sizes that cut the tensors into the same buckets do not differ at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from bagua_autotune.costs import CostModel, Kind
from bagua_autotune.model.buckets import Tensor, cut
from bagua_autotune.model.knobs import (
    BUCKET_KNOB,
    Categorical,
    Configuration,
    Domain,
    LogInteger,
    Space,
    Value,
)

FIRST_KNOB = "first_bucket_bytes"
PARTITION_KNOB = "buckets"


def enumerate_candidates(
    space: Space, baseline: Configuration, tensors: Sequence[Tensor]
) -> tuple[Configuration, ...]:
    """All candidates that are cut by size, the baseline first; of equal layouts one stands for
    all."""
    choices: dict[str, Sequence[Value]] = {
        knob: _values(domain, baseline, knob) for knob, domain in space.items()
    }
    if BUCKET_KNOB in choices:
        sizes = [size for size in choices[BUCKET_KNOB] if isinstance(size, int)]
        choices[BUCKET_KNOB] = _distinct(sizes, baseline.number(BUCKET_KNOB), tensors)
    grid = [
        Configuration(dict(zip(choices, values, strict=True)))
        for values in product(*choices.values())
    ]
    distinct = dict.fromkeys(_without_idle_sizes(configuration) for configuration in grid)
    return (baseline, *(found for found in distinct if found != baseline))


def explicit_candidates(
    space: Space, baseline: Configuration, tensors: Sequence[Tensor], model: CostModel
) -> list[Configuration]:
    """The best explicit list of buckets for each way to reduce, by the cost model.

    Its bucket size is that of its average bucket: where it stands among the other candidates.
    """
    domain = space[BUCKET_KNOB]
    if not isinstance(domain, LogInteger):
        return []
    total_bytes = sum(tensor.bytes for tensor in tensors)
    found = []
    for kind in model.costs:
        # The list is best for one channel and the gradients as they are.
        counts = model.best_partition(kind) if kind == Kind(kind.hierarchical) else None
        if counts is not None:
            size = min(max(total_bytes // len(counts), domain.low), domain.high)
            changes: dict[str, Value] = {BUCKET_KNOB: size, PARTITION_KNOB: counts}
            if "hierarchical" in space:
                changes["hierarchical"] = kind.hierarchical
            found.append(Configuration({**baseline, **changes}))
    return found


def _without_idle_sizes(configuration: Configuration) -> Configuration:
    """A first bucket that is no smaller than the others is none of its own."""
    first = configuration.get(FIRST_KNOB, 0)
    if isinstance(first, int) and first > 0 and first >= configuration.number(BUCKET_KNOB):
        return Configuration({**configuration, FIRST_KNOB: 0})
    return configuration


def _values(domain: Domain, baseline: Configuration, knob: str) -> Sequence[Value]:
    if isinstance(domain, LogInteger):
        return _half_powers(domain, baseline.number(knob))
    return domain.values if isinstance(domain, Categorical) else [baseline[knob]]


def _half_powers(domain: LogInteger, baseline: int) -> list[int]:
    """Half-powers of two inside the domain, and the baseline's value, ascending."""
    first = math.ceil(2 * math.log2(domain.low) - 1e-9)
    last = math.floor(2 * math.log2(domain.high) + 1e-9)
    values = {_round(2 ** (half / 2)) for half in range(first, last + 1)}
    return sorted({value for value in values if domain.contains(value)} | {baseline})


def _round(size: float) -> int:
    """To whole KiB where that changes little: such sizes read better."""
    return round(size / 1024) * 1024 if size >= 64 * 1024 else round(size)


def _distinct(sizes: Sequence[int], baseline: int, tensors: Sequence[Tensor]) -> list[int]:
    """One size for each layout: the baseline where it makes that layout, else the smallest."""
    by_layout: dict[tuple[int, ...], int] = {}
    for size in _baseline_first(sizes, baseline):
        layout = tuple(len(bucket) for bucket in cut(tensors, size))
        by_layout.setdefault(layout, size)
    return sorted(by_layout.values())


def _baseline_first(sizes: Sequence[int], baseline: int) -> Iterator[int]:
    yield baseline
    yield from (size for size in sizes if size != baseline)
