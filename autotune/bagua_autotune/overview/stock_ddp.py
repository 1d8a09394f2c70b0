"""The result for PyTorch's own DistributedDataParallel, ready to paste."""

from __future__ import annotations

from collections.abc import Mapping

from bagua_autotune.model.knobs import BUCKET_KNOB, Value
from bagua_autotune.model.text import describe

DEFAULT_BYTES = 25 * 1024**2


def call(configuration: Mapping[str, Value]) -> str:
    """The call, without what stock DDP cannot do."""
    size = configuration.get(BUCKET_KNOB)
    # DDP counts in units of 2**20 bytes and takes fractions.
    megabytes = (size if isinstance(size, int) else DEFAULT_BYTES) / 1024**2
    return f"DistributedDataParallel(model, bucket_cap_mb={megabytes:.4g})"


def missing(configuration: Mapping[str, Value]) -> str:
    """What stock DDP cannot do, in words; empty if it can do all."""
    return describe({k: v for k, v in configuration.items() if k != BUCKET_KNOB and v != "off"})


def line(configuration: Mapping[str, Value]) -> str:
    """In one line; what is missing is a comment."""
    without = missing(configuration)
    return f"{call(configuration)}  # without: {without}" if without else call(configuration)


def snippet(configuration: Mapping[str, Value]) -> str:
    """Several lines of Python."""
    without = missing(configuration)
    comment = [f"# Stock DDP cannot do the rest: {without}."] if without else []
    lines = [
        "from torch.nn.parallel import DistributedDataParallel",
        "",
        *comment,
        f"model = {call(configuration)}",
    ]
    return "\n".join(lines)
