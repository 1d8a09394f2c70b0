"""The list of knobs: all that can be tuned, an entry each.

From an entry comes how a configuration is read, checked and told, what a tuning tries, and what
BAGUA_AUTOTUNE_KNOBS and BAGUA_AUTOTUNE_ALLOW may say. What carries the knob out reads its value in
the configuration. docs/extending.md adds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bagua_wire.configuration import Value
from bagua_wire.knob_kinds import Counts, Knob, Name, Number, OneOf, Size, SizeRange, knob

MIB = 1024 * 1024
DEFAULT_BUCKET_BYTES = 25 * MIB
BUCKET_SIZES = SizeRange(64 * 1024, 1024**3)
CHANNELS_VALUES = (1, 2, 4, 8, 16)
EDGE_BUCKET_BYTES = (0, MIB, 4 * MIB)
"""Sizes tried for the first and the last bucket; 0: no size of its own."""
BOTH = ("replicated", "sharded")
EVERY = (*BOTH, "zero")
SHARDED = ("sharded",)
ZERO = ("zero",)
ALL_BLOCKS = -1
"""All blocks that the training has recomputed are."""


@dataclass(frozen=True)
class Knobs:
    """A value for every knob.

    The first eight are those of a replicated model. A sharded one (``fully_shard``) has
    ``bucket_bytes``, ``hierarchical``, ``channels``, ``wire_precision`` and ``algorithm`` of them,
    and the others up to ``deferred_reduction``; a bucket is then a unit, or several that
    communicate as one. An engine of DeepSpeed (``zero``) has ``bucket_bytes`` and
    ``prefetch_bytes``.

    Attributes:
        bucket_bytes: a bucket is closed as soon as it holds at least this many bytes.
        hierarchical: ``off``: one flat all-reduce over all ranks. ``leaders``: reduce to one
            rank of each node, all-reduce between those, broadcast inside the node.
            ``shards``: reduce-scatter inside the node, all-reduce each shard across the
            nodes, all-gather inside the node (needs the same number of ranks on every node).
        channels: number of process groups that buckets use in turn. A bucket that is large enough
            is split into up to this many parts, which travel at once, each on its own group.
        first_bucket_bytes: the first bucket (of each dtype and device) is closed as soon as
            it holds this many bytes, if that is less than ``bucket_bytes``; 0: like the others.
        last_bucket_bytes: the last bucket holds the fewest tensors that amount to this many
            bytes, if that is less than ``bucket_bytes``; 0: it holds the tensors left over.
        buckets: the number of tensors of each bucket, in the order in which gradients become
            ready; the sizes in bytes above are then not used. Empty: buckets are cut by bytes.
        wire_precision: how gradients wider than 16 bits travel: ``as_is``, ``bf16``, ``fp16``.
        algorithm: the algorithm's name; it runs with its default arguments. Empty: the algorithm
            that the model was wrapped with.
        kept_units: how many units keep their gathered parameters from the forward pass until the
            backward pass, counted from the model's end, beside those that do so anyway.
        prefetch: how many units are gathered ahead; 0: as torch does it.
        scatter_group: ``own``: gradients are reduced on a process group of their own, so that they
            do not wait for parameters that are gathered; with several channels as ``shared``.
        scatter_buffers: how many units' gradients may be on their way at once.
        node_copy: ``on``: from the forward to the backward pass a unit's parameters stay spread
            over the ranks of each node, so that they are gathered again inside the node.
        kept_over_micro_batches: ``on``: what stays gathered from the forward pass until the
            backward pass stays so until the optimizer steps, over all micro-batches of a step.
        deferred_reduction: ``on``: gradients are reduced in the last micro-batch of a step only;
            ``copies``: they are summed up over the copies of the model in the last one only.
        prefetch_bytes: parameters are gathered ahead until they amount to this many bytes, each of
            their elements counted as one of a gradient.
        recomputed_blocks: how many of the blocks that the training has made recompute their
            activations in the backward pass do so, counted from the model's beginning; the others
            keep them. ALL_BLOCKS: all of them, however many there are.
    """

    bucket_bytes: int = knob(
        DEFAULT_BUCKET_BYTES,
        BUCKET_SIZES,
        "bucket {}",
        cuts=True,
        models=EVERY,
        title="bucket size",
    )
    hierarchical: str = knob(
        "off",
        OneOf(
            ("off", "leaders", "shards"),
            {"off": "flat", "leaders": "hierarchical", "shards": "hierarchical (sharded)"},
        ),
        "{}",
        models=BOTH,
        title="hierarchical reduce",
    )
    channels: int = knob(1, OneOf(CHANNELS_VALUES), "{} channels", models=BOTH)
    first_bucket_bytes: int = knob(
        0, Size(EDGE_BUCKET_BYTES), "first bucket {}", cuts=True, title="first bucket"
    )
    last_bucket_bytes: int = knob(
        0, Size(EDGE_BUCKET_BYTES), "last bucket {}", cuts=True, title="last bucket"
    )
    buckets: tuple[int, ...] = knob((), Counts(), "{}", cuts=True, title="explicit buckets")
    wire_precision: str = knob(
        "as_is",
        OneOf(("as_is", "bf16", "fp16"), aliases={"bfloat16": "bf16", "float16": "fp16"}),
        "{} on the wire",
        changes_numbers=True,
        models=BOTH,
    )
    algorithm: str = knob("", Name(), changes_numbers=True, models=BOTH)
    kept_units: int = knob(0, Number(), "{} units kept", models=SHARDED)
    prefetch: int = knob(0, OneOf((0, 1, 2, 3)), "prefetch {}", models=SHARDED)
    scatter_group: str = knob(
        "shared",
        OneOf(("shared", "own"), {"own": "gradients on a group of their own"}),
        "{}",
        models=SHARDED,
    )
    scatter_buffers: int = knob(1, OneOf((1, 2, 4)), "{} scatter buffers", models=SHARDED)
    node_copy: str = knob(
        "off", OneOf(("off", "on"), {"on": "a copy in each node"}), "{}", models=SHARDED
    )
    kept_over_micro_batches: str = knob(
        "off", OneOf(("off", "on"), {"on": "kept over micro-batches"}), "{}", models=SHARDED
    )
    deferred_reduction: str = knob(
        "off",
        OneOf(
            ("off", "copies", "on"),
            {"on": "reduced once in a step", "copies": "summed over copies once in a step"},
        ),
        "{}",
        models=SHARDED,
    )
    prefetch_bytes: int = knob(
        0, Size((0,)), "{} gathered ahead", models=ZERO, title="gathered ahead"
    )
    recomputed_blocks: int = knob(
        ALL_BLOCKS,
        Number({ALL_BLOCKS: "all"}),
        "{} blocks recomputed",
        computes=True,
        models=(*EVERY, "single"),
    )


KNOBS = {each.name: Knob(each.name, each.default, **each.metadata) for each in fields(Knobs)}
"""By name."""
ALLOWED_WORDS: dict[str, str] = {
    str(word): str(value)
    for each in KNOBS.values()
    if each.changes_numbers and isinstance(each.kind, OneOf)
    for word, value in [
        *each.kind.aliases.items(),
        *((value, value) for value in each.kind.tried if value != each.default),
    ]
}
ALLOWED_WORDS |= {
    name: name for name, each in KNOBS.items() if each.computes or name == "deferred_reduction"
}
"""Words that BAGUA_AUTOTUNE_ALLOW may list besides algorithms, and the values they allow. A knob's
own name allows what it changes in some trainings only."""

BUCKET_KNOB = "bucket_bytes"
WAYS_KNOB = "hierarchical"
CHANNELS_KNOB = "channels"
ALGORITHM_KNOB = "algorithm"
PRECISION_KNOB = "wire_precision"
USUAL_ALGORITHM = "gradient_allreduce"
PARTITION_KNOB = "buckets"
EDGE_KNOBS = ("first_bucket_bytes", "last_bucket_bytes")
SCATTER_GROUP_KNOB = "scatter_group"
NODE_COPY_KNOB = "node_copy"
KEPT_OVER_KNOB, DEFERRED_KNOB = "kept_over_micro_batches", "deferred_reduction"
SHARDED_KNOBS = tuple(name for name, knob in KNOBS.items() if knob.models == ("sharded",))
PREFETCH_BYTES_KNOB = "prefetch_bytes"
"""Of DeepSpeed's ZeRO, stage 3."""
RECOMPUTED_KNOB = "recomputed_blocks"
COUNT_KNOBS = ("kept_units", "prefetch", PREFETCH_BYTES_KNOB, RECOMPUTED_KNOB)
"""Knobs whose 0 is one of the counts; of other numbers 0 means that the knob is not used."""
LOSSLESS_KNOBS = tuple(name for name, knob in KNOBS.items() if not knob.changes_numbers)
"""Knobs that do not change what the model learns, beyond the rounding of sums in another order."""
MEMORY_KNOBS = {
    **dict.fromkeys((BUCKET_KNOB, CHANNELS_KNOB, "kept_units", "prefetch", "scatter_buffers"), 1),
    **{PREFETCH_BYTES_KNOB: 1, RECOMPUTED_KNOB: -1},
}
"""Knobs of which more takes more memory, or less (-1)."""


def domains(
    sizes: tuple[int, int] | None, few: Mapping[str, Sequence[Value]], has_explicit_buckets: bool
) -> dict[str, dict[str, Any]]:
    """The knobs that a job is registered with, by name, and what may be tried of each.

    Args:
        sizes: the smallest and the largest size of a bucket; None: the job has no buckets.
        few: of the knobs that have few values those that may be tried.
        has_explicit_buckets: whether an explicit list of buckets can be cut.
    """
    buckets = {} if sizes is None else dict(zip(("low", "high"), sizes, strict=True))
    return {
        **({"bucket_bytes": {"type": "log_integer", **buckets}} if buckets else {}),
        **{knob: {"type": "categorical", "values": values} for knob, values in few.items()},
        **({"buckets": {"type": "partition"}} if has_explicit_buckets else {}),
    }
