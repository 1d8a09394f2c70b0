"""The file that ``bagua-autotune export JOB --profile`` writes: a job as it was measured."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.profile import BucketTiming, Seconds
from bagua_autotune.simulation.simulator import CONTENTION, LAUNCH_SECONDS
from bagua_autotune.simulation.workload import Workload


class RecordError(Exception):
    """A file that cannot be used; the text says which and why."""


class Traffic(BaseModel):
    """The buckets of one profiled step, of gradients as they are.

    Attributes:
        hierarchical: how they were reduced.
        channels: process groups that they used in turn.
        buckets: in the order in which they started.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    hierarchical: Literal["off", "leaders", "shards"] = "off"
    channels: int = Field(default=1, ge=1, le=1024)
    buckets: tuple[BucketTiming, ...] = Field(min_length=1, max_length=100_000)


class Record(BaseModel):
    """What a job computes and what its network did.

    Version 1 had flat reductions on one channel only, each by itself, as ``collectives``; they are
    read as steps of one bucket.

    Attributes:
        tensors: in gradient-ready order.
        forward_seconds: until the first gradient is ready.
        ready_seconds: of each tensor, since the first one, as if nothing were communicated.
        contention, launch_seconds: what communicating costs computing; see
            :class:`~bagua_autotune.simulation.simulator.Simulator`.
        traffic: of profiled steps; none if the job ran at another precision only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["bagua-autotune profile"] = "bagua-autotune profile"
    version: Literal[2] = 2
    job: str = Field(min_length=1, max_length=200)
    ranks_per_node: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(min_length=1)
    tensors: tuple[Tensor, ...] = Field(min_length=1, max_length=100_000)
    forward_seconds: Seconds
    ready_seconds: tuple[Seconds, ...]
    contention: float = Field(default=CONTENTION, ge=0, le=1e3)
    launch_seconds: Seconds = LAUNCH_SECONDS
    traffic: tuple[Traffic, ...] = Field(default=(), max_length=100_000)

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
        return Record.model_validate_json(_upgraded(path.read_bytes()))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        what = f"{place}: {first['msg']}" if place else first["msg"]
        raise RecordError(
            f"{path} is not a file of 'bagua-autotune export JOB --profile': {what}"
        ) from error


def _upgraded(text: bytes) -> bytes:
    """A file of version 1 as one of today's; another as it is, whatever it is."""
    try:
        document = json.loads(text)
        if document["version"] != 1:
            return text
        collectives = document.pop("collectives", [])
        buckets = [
            {"bytes": each["bytes"], "started_seconds": 0.0, "ended_seconds": each["seconds"]}
            for each in collectives
        ]
    except (ValueError, TypeError, LookupError):
        return text
    traffic = [{"buckets": [bucket]} for bucket in buckets]
    return json.dumps({**document, "version": 2, "traffic": traffic}).encode()
