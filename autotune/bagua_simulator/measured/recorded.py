"""The file that ``bagua-autotune export JOB --profile`` writes: a measured job."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.layout import Tensor
from bagua_autotune.model.profile import BucketTiming, Seconds
from bagua_simulator.cluster import Cluster
from bagua_simulator.measured.step_times import StepTimes
from bagua_simulator.measured.traffic import Traffic, summed_up
from bagua_simulator.simulator import CONTENTION, DEFAULT, LAUNCH_SECONDS, Simulator
from bagua_simulator.workload import Workload


class RecordError(Exception):
    """A file that cannot be used; the text says which and why."""


class _Computed(BaseModel):
    """The part that all versions have.

    Attributes:
        tensors: in gradient-ready order.
        forward_seconds: until the first gradient is ready.
        ready_seconds: of each tensor, since the first one, without communication.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["bagua-autotune profile"] = "bagua-autotune profile"
    job: str = Field(min_length=1, max_length=200)
    ranks_per_node: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(min_length=1)
    tensors: tuple[Tensor, ...] = Field(min_length=1, max_length=100_000)
    forward_seconds: Seconds
    ready_seconds: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _consistent(self) -> _Computed:
        if len(self.ready_seconds) != len(self.tensors):
            raise ValueError(
                f"ready_seconds has {len(self.ready_seconds)} entries for "
                f"{len(self.tensors)} tensors"
            )
        if any(later < earlier for earlier, later in pairwise(self.ready_seconds)):
            raise ValueError("ready_seconds must ascend")
        return self


class Record(_Computed):
    """A job's computing times and its network traffic.

    Attributes:
        contention, launch_seconds: the effect of communication on computing; see
            :class:`~bagua_simulator.simulator.Simulator`.
        traffic: of profiled steps, grouped by configuration; empty if the job always sent
            another precision.
        step_times: of all measured steps, by configuration. Files of version 2 have none.
        default: the job's own default configuration; None: it is not known, or not simulated.
    """

    version: Literal[2, 3] = 3
    contention: float = Field(default=CONTENTION, ge=0, le=1e3)
    launch_seconds: Seconds = LAUNCH_SECONDS
    traffic: tuple[Traffic, ...] = Field(default=(), max_length=1_000_000)
    step_times: tuple[StepTimes, ...] = Field(default=(), max_length=100_000)
    default: Configuration | None = None

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


class _Collective(BaseModel):
    """One flat reduction over all ranks while no other was under way."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    bytes: int = Field(ge=0, le=2**53)
    seconds: float = Field(gt=0, le=1e9)


class _Version1(_Computed):
    """A file of an older release: flat reductions on one channel, each by itself."""

    version: Literal[1]
    collectives: tuple[_Collective, ...] = Field(default=(), max_length=1_000_000)

    def upgraded(self) -> Record:
        """The same as a current record, with the reductions of one size as steps of one bucket."""
        alike: dict[int, list[tuple[BucketTiming]]] = {}
        for each in self.collectives:
            bucket = BucketTiming(bytes=each.bytes, started_seconds=0.0, ended_seconds=each.seconds)
            alike.setdefault(each.bytes, []).append((bucket,))
        return Record(
            job=self.job,
            ranks_per_node=self.ranks_per_node,
            tensors=self.tensors,
            forward_seconds=self.forward_seconds,
            ready_seconds=self.ready_seconds,
            traffic=tuple(summed_up(steps) for steps in alike.values()),
        )


def _version(document: Any) -> str:
    """The model that checks a document: the current one unless it names an older version."""
    return "old" if isinstance(document, dict) and document.get("version") == 1 else "today's"


_FILES: TypeAdapter[Record | _Version1] = TypeAdapter(
    Annotated[
        Annotated[Record, Tag("today's")] | Annotated[_Version1, Tag("old")],
        Discriminator(_version),
    ]
)


def load_record(path: Path) -> Record:
    """Read and check a file.

    Raises:
        RecordError: it cannot be read, or is not such a record.
    """
    try:
        found = _FILES.validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # Behind the version that it was checked as.
        place = ".".join(str(part) for part in first["loc"][1:])
        what = f"{place}: {first['msg']}" if place else first["msg"]
        raise RecordError(
            f"{path} is not a file of 'bagua-autotune export JOB --profile': {what}"
        ) from error
    return found.upgraded() if isinstance(found, _Version1) else found
