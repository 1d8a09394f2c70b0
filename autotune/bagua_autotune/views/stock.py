"""What PyTorch alone can take over from a tuning, as Python to paste.

DistributedDataParallel cuts buckets by size and does nothing else that is tuned here. So this is
the fastest of the trials that did no more than that, with its own speed-up: the size of a
configuration that also reduces hierarchically, say, is not the best one without that. A model that
``fully_shard`` shards can take over more: all but channels, precision, merged units and copies in
nodes are methods of its own. DeepSpeed takes over all that is tuned of it, as lines of its file.
"""

from __future__ import annotations

from collections.abc import Mapping

from bagua_autotune.measuring.rounds import is_settled
from bagua_autotune.measuring.standing import best_configuration, bounds, fastest
from bagua_autotune.model.job import RUNS, Job
from bagua_autotune.model.knobs import ConfigurationField
from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.text import describe_speedup
from bagua_autotune.model.view import View
from bagua_autotune.views.reading import Reading
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import (
    BUCKET_KNOB,
    DEFERRED_KNOB,
    KEPT_OVER_KNOB,
    NODE_COPY_KNOB,
    PREFETCH_BYTES_KNOB,
    RECOMPUTED_KNOB,
    SHARDED_KNOBS,
)
from bagua_wire.words import describe_part

ZERO_LINES = {
    BUCKET_KNOB: "reduce_bucket_size",
    PREFETCH_BYTES_KNOB: "stage3_prefetch_bucket_size",
}
# Without arguments it begins with a small bucket; with ``bucket_cap_mb`` all are of one size.
DEFAULT_SIZES = {BUCKET_KNOB: 25 * 1024**2, "first_bucket_bytes": 1024**2}


LEAVE_AS_IT_IS = "leave your code as it is"


class StockSetting(View):
    """For torch alone the fastest setting that was measured, or else the default.

    ``recomputed``: how many blocks are recomputed, if that are others than by default; else null.
    ``speedup``, with its 95 % interval: over the default, of the result if this is what was kept,
    else of its trials in the search, which nothing confirmed; null of the default, where nothing
    else was clearly faster. ``missing``: what the best configuration does besides, in words.
    ``is_sharded``: of a model that ``fully_shard`` shards, and not of stock DDP. ``zero``: of an
    engine of DeepSpeed, what its file says under ``zero_optimization``; else null.
    """

    configuration: ConfigurationField
    speedup: float | None
    low: float | None
    high: float | None
    is_confirmed: bool
    missing: str
    is_sharded: bool = False
    zero: dict[str, int] | None = None
    recomputed: int | None = None


def has_stock_line(job: Job) -> bool:
    """Whether there is anything to paste: not of a search with whole runs, nor of a job that sends
    nothing and recomputes nothing."""
    return job.protocol not in RUNS and not {BUCKET_KNOB, RECOMPUTED_KNOB}.isdisjoint(job.space)


def without_us(setting: StockSetting) -> str:
    """What trains with the setting where nothing of ours is."""
    if setting.zero is not None:
        return "DeepSpeed alone"
    has_ddp = BUCKET_KNOB in setting.configuration and not setting.is_sharded
    return "stock DDP" if has_ddp else "torch alone"


def stock_setting(reading: Reading) -> StockSetting:
    """The setting of torch's own class, for the round that is shown."""
    job = reading.job
    best = best_configuration(reading.shown) or job.baseline
    is_sharded, is_zero = "sharding" in job.software, "engine" in job.software

    def lacks(tried: Configuration) -> str:
        if is_zero:
            return ""
        return _unsharded(tried, job.baseline) if is_sharded else _missing(tried)

    missing = lacks(best)
    faster: Interval | None = None
    chosen, is_confirmed = job.baseline, False
    if job.result and is_settled(job) and not missing:
        chosen, is_confirmed = best, True
        faster = Interval(job.result.speedup, job.result.low, job.result.high)
    else:
        found = fastest(reading.shown, lambda tried: not lacks(tried))
        if found and found[1].low > 1:
            chosen, faster = found
    if chosen == job.baseline:
        faster = None
    low, high = bounds(faster) if faster else (None, None)
    return StockSetting(
        configuration=chosen,
        speedup=faster.center if faster else None,
        low=low,
        high=high,
        is_confirmed=is_confirmed,
        missing=missing,
        is_sharded=is_sharded,
        zero=_zero_sizes(chosen, job) if is_zero else None,
        recomputed=_recomputed(chosen, job.baseline),
    )


def _recomputed(chosen: Configuration, baseline: Configuration) -> int | None:
    is_default = chosen.get(RECOMPUTED_KNOB) == baseline.get(RECOMPUTED_KNOB)
    return None if is_default else chosen.number(RECOMPUTED_KNOB)


def _zero_sizes(chosen: Configuration, job: Job) -> dict[str, int]:
    """The lines of DeepSpeed's file that differ from the job's own. It counts elements."""
    told = job.software.get("element_bytes", "")
    element_bytes = int(told) if told.isdecimal() else 0
    return {
        line: max(chosen.number(knob) // max(element_bytes, 1), int(knob == BUCKET_KNOB))
        for knob, line in ZERO_LINES.items()
        if knob in chosen and chosen[knob] != job.baseline[knob]
    }


def stock_ddp_line(setting: StockSetting) -> str:
    """One line of Python; a comment says how much faster it is, and what it lacks. Where nothing is
    faster, a sentence that says so."""
    remarks = "; ".join([*_remarks(setting), *_by_hand(setting)])
    if setting.speedup is None:
        return f"{LEAVE_AS_IT_IS}: {remarks}"
    calls = "; ".join(_calls(setting)).removeprefix("model = ")
    return f"{calls}  # {remarks}" if calls else f"# {remarks}"


def stock_ddp_snippet(setting: StockSetting) -> str:
    """Lines of Python for stock torch, ready to paste; see :func:`stock_ddp_line`."""
    remarks = [f"# {each[0].upper()}{each[1:]}." for each in _remarks(setting)]
    if setting.speedup is None:
        return "\n".join([f"# {LEAVE_AS_IT_IS[0].upper()}{LEAVE_AS_IT_IS[1:]}.", *remarks])
    remarks += [f"# {each[0].upper()}{each[1:]}." for each in _by_hand(setting)]
    imports = []
    if setting.is_sharded:
        imports = ["from torch.distributed.fsdp import FSDPModule", ""]
    elif without_us(setting) == "stock DDP":
        imports = ["from torch.nn.parallel import DistributedDataParallel", ""]
    return "\n".join([*imports, *remarks, *_calls(setting)])


def _calls(setting: StockSetting) -> list[str]:
    """The lines of Python."""
    if setting.zero is not None:
        return [_zero_line(setting.zero)] if setting.zero else []
    if setting.is_sharded:
        return _sharded_lines(setting)
    return [f"model = {_call(setting)}"] if BUCKET_KNOB in setting.configuration else []


def _by_hand(setting: StockSetting) -> list[str]:
    """How to recompute as many blocks: by what the training uses."""
    count = setting.recomputed
    if count is None:
        return []
    if count == 0:
        return [
            "have no block recomputed: with torch, leave checkpoint_wrapper out; with "
            'transformers, gradient_checkpointing=False; with torchtitan, mode = "none" under '
            "activation_checkpoint"
        ]
    return [
        f"have only the first {count} of the blocks recomputed",
        f"with torch, wrap only blocks[:{count}] in checkpoint_wrapper",
        "with transformers, call gradient_checkpointing_enable(), then set "
        f"gradient_checkpointing = False on layers[{count}:]",
        f"with torchtitan, have apply_ac wrap only the layers below {count}",
    ]


def _remarks(setting: StockSetting) -> list[str]:
    torchs = without_us(setting)
    if setting.speedup is None:
        what = f"nothing that {torchs} can do" if setting.missing else "nothing"
        gain = f"{what} is known to be clearly faster than the default"
    else:
        gain = f"{describe_speedup(setting.speedup, setting.low, setting.high)} over the default"
        gain += "" if setting.is_confirmed else ", by trials of the search, not confirmed"
    remarks = [gain]
    if setting.configuration.get(KEPT_OVER_KNOB) == "on":
        kept = setting.configuration.get("kept_units")
        units = f"(model, *units[-{kept}:])" if kept else "(model,)"
        remarks.append(
            "before each micro-batch: [unit.set_reshard_after_backward(is_last, recurse=False) for "
            f"unit in {units}]"
        )
    if setting.configuration.get(DEFERRED_KNOB, "off") != "off":
        whole = setting.configuration[DEFERRED_KNOB] == "on"
        call = "set_requires_gradient_sync" if whole else "set_requires_all_reduce"
        remarks.append(f"before each micro-batch: model.{call}(is_last)")
    if setting.missing:
        lacks = f"{torchs} cannot do the rest of the best configuration: {setting.missing}"
        remarks.append(lacks)
    return remarks


def _call(setting: StockSetting) -> str:
    """The call, without what stock DDP cannot do."""
    configuration = setting.configuration
    size = configuration.get(BUCKET_KNOB)
    if _has_default_sizes(configuration) or not isinstance(size, int):
        return "DistributedDataParallel(model)"
    # It counts in units of 2**20 bytes and takes fractions.
    return f"DistributedDataParallel(model, bucket_cap_mb={size / 1024**2:.4g})"


def _zero_line(sizes: Mapping[str, int]) -> str:
    """What changes the dictionary of DeepSpeed's file, before ``deepspeed.initialize``."""
    lines = ", ".join(f"{line}={size}" for line, size in sizes.items())
    return f'config["zero_optimization"].update({lines})'


def _sharded_lines(setting: StockSetting) -> list[str]:
    """The calls after ``fully_shard``, before the first forward pass (``torch.distributed.fsdp``,
    PyTorch 2.8; scatter groups and buffers 2.13)."""
    configuration = setting.configuration
    lines = ["units = [m for m in model.modules() if isinstance(m, FSDPModule)]"]
    if kept := configuration.get("kept_units"):
        call = "unit.set_reshard_after_forward(False, recurse=False)"
        lines.append(f"[{call} for unit in units[-{kept}:]]")
    if depth := configuration.get("prefetch"):
        ahead, behind = f"units[i + 1 : i + 1 + {depth}]", f"units[max(i - {depth}, 0) : i][::-1]"
        each = "for i, unit in enumerate(units)"
        lines.append(f"[unit.set_modules_to_forward_prefetch({ahead}) {each}]")
        lines.append(f"[unit.set_modules_to_backward_prefetch({behind}) {each}]")
    if configuration.get("scatter_group") == "own":
        lines.append("model.set_separate_reduce_scatter_group()")
    buffers = configuration.get("scatter_buffers", 1)
    if buffers != 1:
        lines.append(f"model.set_reduce_scatter_max_input_buffers({buffers})")
    return lines


def _unsharded(configuration: Mapping[str, Value], default: Mapping[str, Value]) -> str:
    """What no method of a sharded model does, in words; empty if there is one for all."""
    own = {*SHARDED_KNOBS, RECOMPUTED_KNOB} - {NODE_COPY_KNOB}
    own |= {*(k for k, value in configuration.items() if value == default.get(k))}
    return describe_part({knob: value for knob, value in configuration.items() if knob not in own})


def _missing(configuration: Mapping[str, Value]) -> str:
    """What stock DDP cannot do, in words; empty if it can do all."""
    sizes = DEFAULT_SIZES if _has_default_sizes(configuration) else (BUCKET_KNOB,)
    its_own = {*sizes, RECOMPUTED_KNOB}
    return describe_part(
        {k: v for k, v in configuration.items() if k not in its_own and v != "off"}
    )


def _has_default_sizes(configuration: Mapping[str, Value]) -> bool:
    return all(configuration.get(knob) == size for knob, size in DEFAULT_SIZES.items())
