"""The file that ``bagua-autotune export JOB --profile`` writes: a measured job, summed up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from bagua_simulator.cluster import Cluster
from bagua_simulator.measured.computing import ProfiledStep, fit_computing
from bagua_simulator.measured.traffic import (
    MeasuredStep,
    StepTimes,
    Traffic,
    checked,
    step_times_of,
    traffic_of,
    way_and_channels,
)
from bagua_simulator.simulator import CONTENTION, DEFAULT, LAUNCH_SECONDS, Simulator
from bagua_simulator.workload import Workload
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Tensor
from bagua_wire.knobs import BUCKET_KNOB, LOSSLESS_KNOBS

Seconds = Annotated[float, Field(ge=0, le=1e9)]


class RecordError(Exception):
    """A file that cannot be used; the text says which and why."""


class Record(BaseModel):
    """A job's computing times and its network traffic.

    Attributes:
        tensors: in gradient-ready order.
        forward_seconds: until the first gradient is ready.
        ready_seconds: of each tensor, since the first one, without communication.
        contention, launch_seconds: the effect of communication on computing; see
            :class:`~bagua_simulator.simulator.Simulator`.
        traffic: of profiled steps, grouped by configuration; empty if the job always sent
            another precision.
        step_times: of all measured steps, by configuration.
        default: the job's own default configuration; None: it is not known, or not simulated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["bagua-autotune profile"] = "bagua-autotune profile"
    job: str = Field(min_length=1, max_length=200)
    ranks_per_node: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(min_length=1)
    tensors: tuple[Annotated[Tensor, AfterValidator(checked)], ...] = Field(
        min_length=1, max_length=100_000
    )
    forward_seconds: Seconds
    ready_seconds: tuple[Seconds, ...]
    version: Literal[3] = 3
    contention: float = Field(default=CONTENTION, ge=0, le=1e3)
    launch_seconds: Seconds = LAUNCH_SECONDS
    traffic: tuple[Traffic, ...] = Field(default=(), max_length=1_000_000)
    step_times: tuple[StepTimes, ...] = Field(default=(), max_length=100_000)
    default: dict[str, Value] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        if len(self.ready_seconds) != len(self.tensors):
            raise ValueError(
                f"ready_seconds has {len(self.ready_seconds)} entries for "
                f"{len(self.tensors)} tensors"
            )
        if any(later < earlier for earlier, later in pairwise(self.ready_seconds)):
            raise ValueError("ready_seconds must ascend")
        return self

    @property
    def workload(self) -> Workload:
        return Workload(self.job, self.tensors, self.forward_seconds, self.ready_seconds)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of nodes, and of ranks on the largest of them."""
        return len(self.ranks_per_node), max(self.ranks_per_node)

    @property
    def is_nccl(self) -> bool:
        """Whether NCCL summed up the gradients: they were on GPUs."""
        return any("/cuda" in tensor.group for tensor in self.tensors)

    def simulator(self, cluster: Cluster) -> Simulator:
        """The job on a cluster."""
        baseline = Configuration(DEFAULT, **self.default) if self.default else DEFAULT
        return Simulator(self.workload, cluster, self.contention, self.launch_seconds, baseline)


def load_record(path: Path) -> Record:
    """Read and check a file.

    Raises:
        RecordError: it cannot be read, or is not such a record.
    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        what = f"{place}: {first['msg']}" if place else first["msg"]
        raise RecordError(
            f"{path} is not a file of 'bagua-autotune export JOB --profile': {what}"
        ) from error


def summarise(
    job: str,
    ranks_per_node: Sequence[int],
    tensors: Sequence[Tensor],
    steps: Sequence[ProfiledStep],
    measured: Iterable[MeasuredStep] = (),
    default: Mapping[str, Value] | None = None,
) -> Record:
    """The record of a job.

    Args:
        steps: each with its configuration.
        measured: steps that trials were judged by.
        default: the job's default configuration.

    Raises:
        ValueError: there is no step, or one does not fit the tensors.
    """
    if not steps:
        raise ValueError("no step of this job has been profiled")
    for _, profile in steps:
        if len(profile.ready_seconds) != len(tensors):
            raise ValueError(
                f"step {profile.step} was profiled with {len(profile.ready_seconds)} tensors; "
                f"the job has {len(tensors)}"
            )
    computing = fit_computing(steps)
    return Record(
        job=job,
        ranks_per_node=tuple(ranks_per_node),
        tensors=tuple(tensors),
        forward_seconds=computing.forward_seconds,
        ready_seconds=tuple(computing.ready_seconds.tolist()),
        contention=computing.contention,
        launch_seconds=computing.launch_seconds,
        traffic=traffic_of(steps),
        step_times=step_times_of(measured),
        default=_simulated(default or {}),
    )


def _simulated(configuration: Mapping[str, Value]) -> dict[str, Value] | None:
    """The knobs of it that are simulated; None if it does something else than they say, as that of
    a sharded model does."""
    is_sharded = any(knob in configuration for knob in LOSSLESS_KNOBS if knob not in DEFAULT)
    if is_sharded or BUCKET_KNOB not in configuration or not way_and_channels(configuration):
        return None
    return {knob: v for knob, v in configuration.items() if knob in DEFAULT}
