"""What a rank of Bagua does with Bagua's service, around this project's wrapper.

Bagua's worker itself (``BaguaDistributedDataParallel`` in its release 0.9.2) needs CUDA and a
compiled core. This one makes the same requests at the same places of a step, through Bagua's own
client and with Bagua's own measure of speed:

- it registers its tensors and asks for hyperparameters before training;
- before every forward pass it records the speed of the step before, gradients' GiB by the
  seconds from the beginning of the forward to the end of the backward pass;
- before every ``report_every``-th (Bagua: 100th) it reports the speed averaged since the last
  report, asks anew and cuts the buckets as it is told. Requests are synchronous: training waits
  for them, and so for the service's optimiser, as it does in Bagua;
- in the background it reports in which order gradients became ready.

Three differences favour Bagua. The time of the requests is no part of the step's that it
measures: with 100 steps between two reports it hardly matters, with 10 it would. Tensors are
registered in the order in which gradients become ready, where Bagua's is the reverse order of
the parameters until that report is there. And ``is_hierarchical_reduce`` is carried out, by
Bagua's scheme (a reduction to one rank of each node, an all-reduce between these, a broadcast),
where its 0.9.2 tunes it but leaves each job at what its script says.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.measuring.clock import Clock

GIB = 1024**3
STATUS_OK = 200
MODEL_NAME = "model"
DTYPES = {"torch.float32": "f32", "torch.float16": "f16"}


def load(release: Path) -> SimpleNamespace:
    """The parts of Bagua that a rank uses, from a folder with the package ``bagua``.

    To be called where a script of Bagua's imports it, at its beginning: the first speed counts
    as that of all the time since then, and less than a second is mistaken for a negative time.
    """
    # Bagua was written for pydantic 1.
    warnings.filterwarnings("ignore", module="pydantic")
    # Its package needs CUDA; this file of it does not.
    utils = runpy.run_path(str(release / "bagua" / "torch_api" / "utils.py"))
    sys.path.insert(0, str(release))
    from bagua.bagua_define import BaguaHyperparameter  # type: ignore[import-not-found]
    from bagua.service.autotune_service import AutotuneClient  # type: ignore[import-not-found]

    return SimpleNamespace(
        AutotuneClient=AutotuneClient,
        BaguaHyperparameter=BaguaHyperparameter,
        StatisticalAverage=utils["StatisticalAverage"],
    )


@dataclass(frozen=True)
class Report:
    """What a rank reported.

    Attributes:
        step: number of training steps, from 1, since the tensors were registered.
        bucket_bytes, hierarchical: what was in force.
        speed: GiB of gradients per second of a step, as Bagua scores it.
    """

    step: int
    bucket_bytes: int
    hierarchical: bool
    speed: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class BaguaWorker:
    """Attaches itself to ``model``; all ranks must make one together.

    Args:
        model: its gradients' order is known: two steps were trained by our hook.
        address: ``address:port`` of Bagua's service.
        bagua: what ``load`` gave.
        clock: of the model's device.
        report_every: steps between two reports.

    Attributes:
        is_completed: whether the service says that tuning has ended; on all ranks in one step.
        reports: what was reported until then.

    Raises:
        RuntimeError: the service refuses a request, a dtype is not one of Bagua's, or a bucket
            is told that cannot be carried out.
        requests.ConnectionError: the service does not answer.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        address: str,
        bagua: SimpleNamespace,
        clock: Clock,
        report_every: int,
    ) -> None:
        self._model = model
        self._report_every = report_every
        tunable = model._tunable  # nothing public tells the order of the gradients
        assert tunable is not None
        self._tensors = [tunable.tensors[index] for index in tunable.order]
        self._gibibytes = sum(tensor.bytes for tensor in self._tensors) / GIB
        self._make_client = partial(bagua.AutotuneClient, *address.rsplit(":", 1))
        self._client = self._make_client()
        self._speeds = bagua.StatisticalAverage()
        self._hyperparameters = bagua.BaguaHyperparameter()
        self._step = 0
        self._clock = clock
        self._began: Any = None
        self._ended: Any = None
        self._spans: list[dict[str, Any]] = []
        self._span_hooks: list[Any] = []
        self.is_completed = False
        self.reports: list[Report] = []
        self._register()
        self._reset_buckets()
        self._last_report = time.time()
        self._watch_first_step()
        model.register_forward_pre_hook(lambda *_: self._before_forward())

    def after_backward(self) -> None:
        """The end of a step as Bagua times it."""
        self._ended = self._clock.mark()
        if self._span_hooks:
            self._report_order()

    def _before_forward(self) -> None:
        self._step += 1
        # Like Bagua's, passes over a step that a GPU has not ended yet.
        if self._ended is not None and self._clock.is_known(self._ended):
            seconds = self._clock.seconds(self._began, self._ended)
            self._speeds.record(self._gibibytes / seconds)
        if not self.is_completed and self._step % self._report_every == 0:
            self._report()
            self._reset_buckets()
            self._last_report = time.time()
        self._began = self._clock.mark()

    def _register(self) -> None:
        unknown = sorted({tensor.dtype for tensor in self._tensors} - set(DTYPES))
        if unknown:
            raise RuntimeError(f"Bagua knows no tensors of {', '.join(unknown)}")
        declarations = [
            {"name": tensor.name, "num_elements": tensor.elements, "dtype": DTYPES[tensor.dtype]}
            for tensor in self._tensors
        ]
        _checked(self._client.register_tensors(MODEL_NAME, declarations))

    def _report(self) -> None:
        speed = self._speeds.get(time.time() - self._last_report)
        told = self._hyperparameters
        rank = dist.get_rank()
        values = told.model_dump(warnings=False)
        _checked(self._client.report_metrics(MODEL_NAME, rank, self._step, values, speed))
        self.reports.append(
            Report(self._step, told.bucket_size, told.is_hierarchical_reduce, speed)
        )

    def _reset_buckets(self) -> None:
        """Bagua's worker makes its buckets anew each time; a cut that is in force stays here."""
        rank = dist.get_rank()
        answer = _checked(self._client.ask_hyperparameters(MODEL_NAME, rank, self._step))
        self._hyperparameters.update(answer["recommended_hyperparameters"])
        self.is_completed = answer["is_autotune_completed"]
        buckets = [[tensor["name"] for tensor in b] for b in self._hyperparameters.buckets]
        configuration = Configuration(
            buckets=tensor_counts(buckets, [tensor.name for tensor in self._tensors]),
            hierarchical="leaders" if self._hyperparameters.is_hierarchical_reduce else "off",
        )
        if not self._model.reconfigure(configuration):
            raise RuntimeError(f"rank {rank} was told {configuration}, another rank was not")

    def _watch_first_step(self) -> None:
        """The service takes each tensor's place from its first span; later ones tell nothing."""

        def ready(name: str, _: torch.Tensor) -> None:
            now = time.time_ns() // 1_000_000
            span = {"trace_id": len(self._spans), "action": "tensor_ready", "tensor_name": name}
            self._spans.append({**span, "start_time": now, "end_time": now})

        parameters = dict(self._model.module.named_parameters())
        for tensor in self._tensors:
            hook = partial(ready, tensor.name)
            parameter: Any = parameters[tensor.name]
            handle = parameter.register_post_accumulate_grad_hook(hook)
            self._span_hooks.append(handle)

    def _report_order(self) -> None:
        """In the background, as Bagua's core does, which exports its spans by itself."""
        for handle in self._span_hooks:
            handle.remove()
        self._span_hooks = []
        report = self._make_client().report_tensor_execution_order
        threading.Thread(target=report, args=(self._spans,), daemon=True).start()


def tensor_counts(buckets: Sequence[Sequence[str]], order: Sequence[str]) -> tuple[int, ...]:
    """Buckets of tensor names as counts of tensors in the order in which gradients get ready.

    Raises:
        RuntimeError: they are not cut from that order.
    """
    start = 0
    for number, bucket in enumerate(buckets):
        expected = order[start : start + len(bucket)]
        if sorted(bucket) != sorted(expected):
            name = next(iter(set(bucket) - set(expected)), bucket[-1])
            raise RuntimeError(
                f"Bagua's bucket {number} holds {name}, which does not become ready there: it is "
                "not cut from the order in which gradients become ready, and cannot be carried out"
            )
        start += len(bucket)
    if start != len(order):
        raise RuntimeError(f"Bagua's buckets hold {start} tensors of {len(order)}")
    return tuple(len(bucket) for bucket in buckets)


def _checked(response: requests.Response) -> Any:
    """As Bagua's worker does, which ends the job then."""
    if response.status_code != STATUS_OK:
        raise RuntimeError(f"Bagua's service answered {response.status_code}: {response.text}")
    return response.json()
