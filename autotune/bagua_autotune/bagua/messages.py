"""What Bagua 0.9 workers send to ``/api/v1``: field names and types of the release 0.9.2.

Sources: ``bagua/service/autotune_service.py`` (``AutotuneClient``), ``bagua/bagua_define.py``
and ``rust/bagua-core/bagua-opentelemetry`` (spans).  Fields not named here are ignored, as
Bagua's own service ignores them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bagua_autotune.model.job import MOST_RANKS, MOST_TENSORS, ShortText
from bagua_autotune.model.layout import Label

# An observation has a place for every rank up to the highest.
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Iteration = Annotated[int, Field(ge=0, lt=2**62)]
# Bagua's Rust exporter sends u128.
Unsigned128 = Annotated[int, Field(ge=0, lt=2**128)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class TensorDeclaration(_Message):
    """One tensor; the worker's ``to_bagua_datatype`` knows these four types."""

    name: Label
    num_elements: int = Field(ge=0, le=2**50)
    dtype: Literal["f16", "f32", "i64", "u8"]


class RegisterTensors(_Message):
    model_name: ShortText
    tensor_list: list[TensorDeclaration] = Field(
        min_length=1, max_length=MOST_TENSORS, fail_fast=True
    )
    whether_to_bucket: bool = True

    @model_validator(mode="after")
    def _names_differ(self) -> RegisterTensors:
        if len({tensor.name for tensor in self.tensor_list}) != len(self.tensor_list):
            raise ValueError("tensor_list: a name occurs twice")
        return self


class Hyperparameters(_Message):
    """The part of a worker's ``BaguaHyperparameter`` that names the configuration it ran."""

    bucket_size: int = Field(default=0, ge=0, le=2**53)
    is_hierarchical_reduce: bool = False


class ReportMetrics(_Message):
    """``speed``: any finite number, higher is better."""

    model_name: ShortText
    rank: Rank
    train_iter: Iteration
    hyperparameters: Hyperparameters
    speed: float


class AskHyperparameters(_Message):
    model_name: ShortText
    rank: Rank
    train_iter: Iteration


class Span(_Message):
    """``start_time`` and ``end_time`` in milliseconds since the epoch."""

    trace_id: Unsigned128
    action: Annotated[str, Field(max_length=512)]
    tensor_name: Label
    start_time: Unsigned128
    end_time: Unsigned128


class ReportTensorExecutionOrder(_Message):
    spans: list[Span] = Field(max_length=MOST_TENSORS, fail_fast=True)
