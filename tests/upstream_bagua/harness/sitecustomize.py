"""First on PYTHONPATH of Bagua's own tests: lets them run on Python and PyTorch of today, and calls
the CPU a GPU if BAGUA_UPSTREAM_DEVICES says how many there are, or the only GPU that many with
BAGUA_UPSTREAM_SHARED_GPU. Python imports it at the start of every process, also of those that a
test spawns. Nothing of Bagua's interface is made here.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _bring_back_what_is_gone() -> None:
    """Of Python 3.10 and of PyTorch 1.12; the tests import it."""
    six: Any = types.ModuleType("torch._six")
    six.string_classes = (str, bytes)
    six.inf = float("inf")
    sys.modules["torch._six"] = six
    if not hasattr(inspect, "getargspec"):
        inspect.getargspec = inspect.getfullargspec  # type: ignore[attr-defined]


def _let_torchvision_load() -> None:
    """PyPI's build of it needs PyTorch's for CUDA; beside one for the CPU it cannot be imported,
    as two of its operators are missing. Bagua's examples use none.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    import torch

    if (
        torch.version.cuda is None
        and "+cu" in Path(found.origin).with_name("version.py").read_text()
    ):
        global _operators
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _NoStream:
    """A stream or an event of a device whose work is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _does_nothing(self, *args: Any, **kwargs: Any) -> Any:
        return self

    wait = record = synchronize = wait_event = wait_stream = record_event = _does_nothing
    query = _does_nothing


def _is_gpu(device: Any) -> bool:
    """Whether it names a GPU: a number, ``cuda`` or ``cuda:1``."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return is_number or str(device).startswith("cuda")


def _call_the_cpu_a_gpu(devices: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: devices
    cuda.current_device = lambda: int(os.environ.get("LOCAL_RANK", 0))
    # Each a function of its own: torch._dynamo refuses one that has two names.
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = _NoStream
    cuda.Event = type("Event", (_NoStream,), {})
    cuda.stream = lambda stream: stream
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.default_stream = lambda device=None: _NoStream()

    for kind in (torch.Tensor, torch.nn.Module):
        moved: Any = kind
        moved.cuda = lambda self, *args, **kwargs: self
    _read_devices(lambda device: "cpu" if _is_gpu(device) else device)
    made: Any = DistributedDataParallel
    made.__init__ = _without_devices(made.__init__)
    given: Any = dist
    given.init_process_group = given.distributed_c10d.init_process_group = _over_gloo(
        dist.init_process_group
    )
    given.reduce = given.distributed_c10d.reduce = _as_nccl_reduces(dist.reduce)


def _call_one_gpu_several(devices: int) -> None:
    """NCCL refuses two ranks on one GPU, but not where each calls itself a host of its own."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ["NCCL_HOSTID"] = str(os.getpid())
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    cuda: Any = torch.cuda
    cuda.init()  # It looks at each GPU that it counts.
    cuda.device_count = lambda: devices
    cuda.set_device = lambda *_, **__: None
    for kind in (torch.Tensor, torch.nn.Module):
        moved: Any = kind
        moved.cuda = _on_the_only_gpu(moved.cuda)
    _read_devices(lambda device: "cuda:0" if _is_gpu(device) else device)
    made: Any = DistributedDataParallel
    made.__init__ = _without_devices(made.__init__)
    given: Any = dist
    given.barrier = _without_devices(dist.barrier)


def _on_the_only_gpu(move: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(move)(lambda self, *args, **kwargs: move(self))


def _read_devices(read: Callable[[Any], Any]) -> None:
    """Whatever a test says where a tensor is to be goes through ``read``."""
    import torch

    for kind in (torch.Tensor, torch.nn.Module):
        moved: Any = kind
        moved.to = _with_device_read(moved.to, read)
    for name in ("tensor", "zeros", "ones", "rand", "randn", "empty", "full", "arange"):
        setattr(torch, name, _with_device_read(getattr(torch, name), read))


def _with_device_read(
    function: Callable[..., Any], read: Callable[[Any], Any]
) -> Callable[..., Any]:
    takes_device_first = function.__name__ == "to"

    @functools.wraps(function)
    def with_device_read(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = read(kwargs["device"])
        if takes_device_first and len(args) > 1:
            args = (args[0], read(args[1]), *args[2:])
        return function(*args, **kwargs)

    return with_device_read


def _without_devices(function: Callable[..., None]) -> Callable[..., None]:
    """PyTorch refuses device_ids that are not there, and any for modules of the CPU."""

    @functools.wraps(function)
    def without_devices(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        function(*args, **kwargs)

    return without_devices


def _over_gloo(initialize: Callable[..., None]) -> Callable[..., None]:
    """It also gives gloo's threads time to end, as ``init_process_group`` of compat does: else they
    may abort a process that has not left its groups.
    """

    @functools.wraps(initialize)
    def over_gloo(*args: Any, **kwargs: Any) -> None:
        if args:
            args = ("gloo", *args[1:])
        else:
            kwargs["backend"] = "gloo"
        initialize(*args, **kwargs)
        atexit.register(time.sleep, 0.2)

    return over_gloo


def _as_nccl_reduces(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """gloo leaves parts of sums in the tensors of the ranks that do not get the result."""

    @functools.wraps(reduce)
    def as_nccl_reduces(tensor: Any, dst: int, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        is_elsewhere = dist.get_rank() != dst
        return reduce(tensor.clone() if is_elsewhere else tensor, dst, *args, **kwargs)

    return as_nccl_reduces


_operators: Any = None  # They are there as long as this is.
_bring_back_what_is_gone()
_let_torchvision_load()
_devices = int(os.environ.get("BAGUA_UPSTREAM_DEVICES", "0"))
if _devices and "BAGUA_UPSTREAM_SHARED_GPU" in os.environ:
    _call_one_gpu_several(_devices)
elif _devices:
    _call_the_cpu_a_gpu(_devices)
