"""What is known of settings that decide how programs communicate: presets of some programs, and the
variables that are searched where none is named.

Names, values and what belongs together come from the programs' own documents and sources, as of
August 2026; each entry says which. Values are listed from the one that takes the least memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bagua_runs.places import EnvironmentVariable
from bagua_runs.space import CHANNELS, SOCKETS, SWITCH_VALUES, THREADS, Condition, Setting
from bagua_wire.words import NOT_SET

ZERO_DOCS = "https://www.deepspeed.ai/docs/config-json/"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero"
ZERO_FIELDS = f"{DEEPSPEED}/config.py"
ZERO_BUFFERS = f"{DEEPSPEED}/stage_1_and_2.py"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron"
MEGATRON_ARGUMENTS = f"{MEGATRON}/training/arguments.py"
MEGATRON_DDP = f"{MEGATRON}/core/distributed/distributed_data_parallel.py"
MEGATRON_FIELDS = f"{MEGATRON}/core/distributed/distributed_data_parallel_config.py"
ACCELERATE = "https://huggingface.co/docs/accelerate"
ACCELERATE_FSDP = f"{ACCELERATE}/usage_guides/fsdp"
FSDP_VERSIONS = f"{ACCELERATE}/concept_guides/fsdp1_vs_fsdp2"
NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
CUDA_DOCS = (
    "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html"
)

Kind = Literal["variable", "argument", "switch", "JSON", "YAML"]


@dataclass(frozen=True)
class Entry:
    """A setting of a preset.

    Attributes:
        name: of the variable or argument, or the keys in the file, with dots.
        values: to try.
        source: the document that says what it does.
        kind: of its place.
        assumed: the value in force where it is not set; None: that depends.
        takes_memory: the later a value, the more memory it may take.
        changes_numbers: what the model learns may depend on it, beyond the order of sums.
        only_with: it has an effect only where another entry has one of these values.
    """

    name: str
    values: tuple[str, ...]
    source: str
    kind: Kind
    assumed: str | None = None
    takes_memory: bool = False
    changes_numbers: bool = False
    only_with: Condition | None = None


@dataclass(frozen=True)
class Need:
    """The user has to have one of these values (``not set``: it may be missing)."""

    kind: Kind
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Preset:
    """The settings of a program.

    Attributes:
        needs: else the preset is none for this job.
        file_options: the option of the command that names the program's file.
    """

    entries: tuple[Entry, ...]
    needs: tuple[Need, ...] = ()
    file_options: tuple[str, ...] = ()


def _values(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _zero(
    key: str, values: str, assumed: str, source: str, takes_memory: bool = False,
    only_with: Condition | None = None,
) -> Entry:  # fmt: skip
    name = f"zero_optimization.{key}"
    return Entry(
        name, _values(values), source, "JSON", assumed, takes_memory, only_with=only_with
    )  # fmt: skip


def _variable(
    name: str, values: str, assumed: str | None = None, only_with: Condition | None = None,
    takes_memory: bool = False,
) -> Entry:  # fmt: skip
    return Entry(name, _values(values), NCCL_DOCS, "variable", assumed, takes_memory,
                 only_with=only_with)  # fmt: skip


def _deepspeed(stage: str, *entries: Entry) -> Preset:
    return Preset(
        entries,
        (Need("JSON", "zero_optimization.stage", (stage,)),),
        ("--deepspeed_config", "--deepspeed", "--ds-config"),
    )


# A user reports that what is learned depends on it, which the documents do not say:
# https://github.com/deepspeedai/DeepSpeed/issues/6351
REDUCE_ELEMENTS = _zero(
    "reduce_bucket_size", "5000000 20000000 50000000 100000000 200000000 500000000 1000000000",
    "500000000", ZERO_DOCS, takes_memory=True,
)  # fmt: skip
WIRE_PRECISION = Entry(
    "communication_data_type", ("fp16", "bf16", "fp32"), ZERO_DOCS, "JSON", changes_numbers=True
)
STAGES_1_AND_2 = (
    REDUCE_ELEMENTS,
    _zero("allgather_bucket_size", "50000000 100000000 200000000 500000000 1000000000 2000000000",
          "500000000", ZERO_DOCS, takes_memory=True),
    # With true there are two buffers of reduce_bucket_size.
    _zero("overlap_comm", "false true", "false", ZERO_BUFFERS, takes_memory=True),
    _zero("reduce_scatter", "true false", "true", ZERO_DOCS),
    _zero("use_multi_rank_bucket_allreduce", "true false", "true", ZERO_BUFFERS,
          only_with=Condition("zero_optimization.reduce_scatter", ("true",))),
    WIRE_PRECISION,
)  # fmt: skip
STAGE_3 = (
    REDUCE_ELEMENTS,
    _zero("stage3_prefetch_bucket_size", "5000000 20000000 50000000 100000000 200000000 500000000",
          "50000000", ZERO_FIELDS, takes_memory=True),
    _zero("stage3_param_persistence_threshold", "10000 100000 1000000 10000000",
          "100000", ZERO_DOCS, takes_memory=True),
    _zero("stage3_max_live_parameters", "100000000 300000000 1000000000 3000000000",
          "1000000000", ZERO_DOCS, takes_memory=True),
    _zero("stage3_max_reuse_distance", "100000000 300000000 1000000000 3000000000",
          "1000000000", ZERO_DOCS, takes_memory=True),
    _zero("overlap_comm", "false true", "true", ZERO_FIELDS, takes_memory=True),
    WIRE_PRECISION,
    *(Entry(f"zero_optimization.zero_quantized_{what}", ("true", "false"), ZERO_DOCS, "JSON",
            "false", changes_numbers=True) for what in ("weights", "gradients")),
)  # fmt: skip

OVERLAPPED = Condition("--overlap-grad-reduce", ("on",))
MEGATRON_ENTRIES = (
    Entry("--overlap-grad-reduce", SWITCH_VALUES, MEGATRON_ARGUMENTS, "switch"),
    # Parameters in a bucket; without the overlap all are in one.
    Entry("--ddp-bucket-size",
          _values("5000000 10000000 20000000 40000000 80000000 160000000 320000000"),
          MEGATRON_DDP, "argument", only_with=OVERLAPPED),
    Entry("--overlap-param-gather", SWITCH_VALUES, MEGATRON_ARGUMENTS, "switch",
          only_with=OVERLAPPED),
    Entry("--ddp-pad-buckets-for-high-nccl-busbw", SWITCH_VALUES, MEGATRON_FIELDS, "switch",
          only_with=OVERLAPPED),
    *(Entry(name, SWITCH_VALUES, MEGATRON_ARGUMENTS, "switch", changes_numbers=True)
      for name in ("--ddp-average-in-collective", "--grad-reduce-in-bf16")),
)  # fmt: skip

BUFFERS = _variable("NCCL_BUFFSIZE", "1048576 2097152 4194304 8388608 16777216", "4194304",
                    takes_memory=True)  # fmt: skip

FSDP_ENTRIES = (
    Entry("fsdp_config.fsdp_sharding_strategy", ("FULL_SHARD", "SHARD_GRAD_OP"),
          ACCELERATE_FSDP, "YAML", "FULL_SHARD", takes_memory=True),
    # The key that `accelerate config` writes.
    Entry("fsdp_config.fsdp_backward_prefetch", ("NO_PREFETCH", "BACKWARD_POST", "BACKWARD_PRE"),
          f"{ACCELERATE}/concept_guides/fsdp_and_deepspeed", "YAML", takes_memory=True),
    # Only for models that run their modules in the same order in every step.
    Entry("fsdp_config.fsdp_forward_prefetch", ("false", "true"),
          ACCELERATE_FSDP, "YAML", "false", takes_memory=True),
)  # fmt: skip

PRESETS = {
    "deepspeed-zero1": _deepspeed("1", *STAGES_1_AND_2),
    "deepspeed-zero2": _deepspeed("2", *STAGES_1_AND_2),
    "deepspeed-zero3": _deepspeed("3", *STAGE_3),
    "megatron": Preset(
        MEGATRON_ENTRIES,
        (
            Need("switch", "--use-distributed-optimizer", ("on",)),
            # One of it and the size of buckets only (MEGATRON_FIELDS).
            Need("argument", "--ddp-num-buckets", (NOT_SET,)),
        ),
    ),
    # FSDP2 has none of these (FSDP_VERSIONS); this project tunes it while the job runs.
    "fsdp": Preset(
        FSDP_ENTRIES,
        (Need("YAML", "fsdp_config.fsdp_version", ("1", NOT_SET)),),
        ("--config_file",),
    ),
    "nccl-ib": Preset(
        (
            _variable("NCCL_IB_QPS_PER_CONNECTION", "1 2 4 8", "1"),
            _variable("NCCL_IB_SPLIT_DATA_ON_QPS", "0 1", "0",
                      Condition("NCCL_IB_QPS_PER_CONNECTION", ("2", "4", "8"))),
            _variable("NCCL_MIN_CTAS", "2 4 8 16 32"),
            _variable("NCCL_MAX_CTAS", "4 8 16 32"),
            _variable("NCCL_CROSS_NIC", "0 1 2", "2"),
            BUFFERS,
            Entry("CUDA_DEVICE_MAX_CONNECTIONS", _values("1 8 32"), CUDA_DOCS, "variable"),
        )
    ),
}  # fmt: skip


# The environment variables that are searched where no preset is named.

INTERFACES = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
BACKENDS = tuple(INTERFACES)
SEARCHED = {
    entry.name: entry
    for entry in (
        _variable(THREADS, "1 2 4 8", "1"),
        _variable(SOCKETS, "1 2 4 8", "1"),
        _variable("NCCL_MIN_NCHANNELS", "2 4 8 16", "1", takes_memory=True),
        BUFFERS,
        Entry(CHANNELS, _values("1 2 4 8 16"), "docs/settings.md", "variable", "1"),
    )
}
"""The last is our client's, all others are NCCL's."""


def find_variables(
    backend: str,
    has_channels: bool,
    environment: Mapping[str, str],
    interfaces: Sequence[str] = (),
    only: Sequence[str] = (),
) -> list[Setting]:
    """The variables that are searched for a job.

    Args:
        backend: of its gradients: one of ``BACKENDS``.
        has_channels: whether our client sends its buckets.
        environment: the user's.
        interfaces: network interfaces that the user named.
        only: names that the user named; our client's channels may be one, whatever the job uses.
    """
    has_channels = has_channels or CHANNELS in only
    found = [
        Setting(
            EnvironmentVariable(entry.name),
            entry.values,
            environment.get(entry.name) or None,
            entry.assumed,
            entry.takes_memory,
        )
        for entry in SEARCHED.values()
        if (has_channels if entry.name == CHANNELS else backend == "nccl")
    ]
    if len(interfaces) > 1:
        name, values = INTERFACES[backend], dict.fromkeys([*interfaces, ",".join(interfaces)])
        found.append(Setting(EnvironmentVariable(name), (*values,), environment.get(name) or None))
    return found
