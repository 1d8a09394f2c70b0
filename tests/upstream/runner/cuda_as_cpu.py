"""CUDA devices read as the CPU, so that PyTorch's GPU tests run where there is no GPU.

What a test asks of ``cuda``, of ``cuda:1`` or of device number 1 happens on the CPU; streams and
events do nothing, as a CPU has one order of work. ``torch.cuda.is_available()`` stays False:
PyTorch's own code takes its CPU paths.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed.device_mesh as device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from tests.upstream.runner import sync_batch_norm

_CPU = torch.device("cpu")
_TAKES_DEVICE_FIRST = (torch.Tensor.to, torch._C._nn._parse_to)


@contextmanager
def cuda_as_cpu(
    wrapper: type[DistributedDataParallel], suite: ModuleType, devices: int = 8
) -> Iterator[None]:
    """CUDA reads as CPU inside.

    Args:
        wrapper: loses ``device_ids`` and ``output_device``, which PyTorch refuses for CPU modules.
        suite: the module of tests, whose imported names are replaced too.
        devices: how many there seem to be.
    """
    with ExitStack() as stack:
        for owner, name, stand_in in _stand_ins(suite, devices):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        without_devices = _without_devices(wrapper.__init__)
        stack.enter_context(mock.patch.object(wrapper, "__init__", without_devices))
        stack.enter_context(_DevicesReadAsCpu())
        yield


def _read(device: Any) -> Any:
    """``device`` if it is no CUDA device, else the CPU; integers are CUDA devices."""
    is_cuda = (
        (isinstance(device, int) and not isinstance(device, bool))
        or (isinstance(device, str) and device.startswith("cuda"))
        or (isinstance(device, torch.device) and device.type == "cuda")
    )
    return _CPU if is_cuda else device


class _DevicesReadAsCpu(TorchFunctionMode):
    """Sees every call of torch's functions, tensors' methods and ``torch.device``."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _read(kwargs["device"])
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.device and args:
            device = _read(args[0])
            return device if device is _CPU else torch.device(*args, **kwargs)
        if function in _TAKES_DEVICE_FIRST:
            args = tuple(_read(argument) for argument in args)
        return function(*args, **kwargs)


class _NoStream:
    """A stream or an event of a device whose work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _does_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait = record = synchronize = wait_event = wait_stream = record_event = _does_nothing


def _stand_ins(suite: ModuleType, devices: int) -> Iterator[tuple[object, str, object]]:
    yield torch.cuda, "device_count", lambda: devices
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "set_device", lambda device: None
    yield torch.cuda, "synchronize", lambda device=None: None
    yield torch.cuda, "Stream", _NoStream
    yield torch.cuda, "Event", _NoStream
    yield torch.cuda, "stream", lambda stream: stream
    yield torch.cuda, "current_stream", _NoStream
    yield torch.cuda, "_sleep", lambda cycles: None
    yield torch, "Stream", _NoStream
    yield torch, "Event", _NoStream
    yield torch.accelerator, "current_stream", _NoStream
    make_mesh = _mesh_of_cpus(device_mesh.init_device_mesh)
    yield device_mesh, "init_device_mesh", make_mesh
    imported = {
        "init_device_mesh": make_mesh,
        "autocast": functools.partial(torch.autocast, "cpu"),
        "GradScaler": functools.partial(torch.amp.GradScaler, "cpu"),
        "get_cycles_per_ms": lambda: 1,
    }
    for name in imported.keys() & vars(suite).keys():
        yield suite, name, imported[name]
    yield from sync_batch_norm.stand_ins()


def _mesh_of_cpus(make_mesh: Callable[..., Any]) -> Callable[..., Any]:
    def make_mesh_of_cpus(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make_mesh(_CPU.type, *args, **kwargs)

    return make_mesh_of_cpus


def _without_devices(initialize: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(DistributedDataParallel.__init__)  # Of any subclass too.

    @functools.wraps(initialize)
    def without_devices(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        for name in ("device_ids", "output_device"):
            given.arguments.pop(name, None)
        initialize(*given.args, **given.kwargs)

    return without_devices
