"""The file that ``bagua-autotune export JOB --profile`` writes: a job as it was measured."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.profile import Seconds
from bagua_autotune.simulation.workload import Workload


class RecordError(Exception):
    """A file that cannot be used; the text says which and why."""


class Collective(BaseModel):
    """One flat reduction over all ranks while no other was under way."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    bytes: int = Field(ge=0, le=2**53)
    seconds: float = Field(gt=0, le=1e9)


class Record(BaseModel):
    """What a job computes and what its network did.

    Attributes:
        tensors: in gradient-ready order.
        forward_seconds: until the first gradient is ready.
        ready_seconds: of each tensor, since the first one, as if nothing were communicated.
        collectives: as measured; none if the job never ran flat on one channel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["bagua-autotune profile"] = "bagua-autotune profile"
    version: Literal[1] = 1
    job: str = Field(min_length=1, max_length=200)
    ranks_per_node: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(min_length=1)
    tensors: tuple[Tensor, ...] = Field(min_length=1, max_length=100_000)
    forward_seconds: Seconds
    ready_seconds: tuple[Seconds, ...]
    collectives: tuple[Collective, ...] = Field(default=(), max_length=1_000_000)

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


def load_record(path: Path) -> Record:
    """Read and check a file.

    Raises:
        RecordError: it cannot be read, or does not hold such a record.
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
