"""Bagua's methods of tensors: what user-written algorithms register and mark ready; and the backend
that then runs the operations of a module's buckets, in order, beside the training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bagua_client.communication.operations import Start
from bagua_client.communication.pipeline import Arrival, Pipeline, pipeline_for


class ReadyBucket(Protocol):
    """Tensors that are communicated together."""

    tensors: list[Any]

    def run(self) -> None:
        """Do the bucket's operations, one after the other."""


class Backend:
    """Starts a bucket when all its tensors are ready and the buckets before it have started.

    So all ranks run the operations of all buckets in one order, one after the other, whatever
    process groups they use. When the last bucket has started, the first one's turn comes again.
    """

    def __init__(self) -> None:
        self._buckets: Sequence[ReadyBucket] = ()
        self._known: set[int] = set()  # Ids of the buckets' tensors, which the buckets hold.
        self._ready: set[int] = set()
        self._next = 0
        self._arrivals: list[Arrival] = []
        self._pipeline: Pipeline | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether it has buckets."""
        return bool(self._buckets)

    def register_ordered_buckets(self, buckets: Sequence[ReadyBucket]) -> None:
        """Replace the buckets by these; what is under way ends first."""
        self.wait_pending_comm_ops()
        self._buckets = list(buckets)
        self._known = {id(tensor) for bucket in buckets for tensor in bucket.tensors}
        self._ready, self._next = set(), 0
        if self._pipeline is not None:
            self._pipeline.close()

    def mark_communication_ready(self, tensor: torch.Tensor) -> None:
        """``tensor`` of one of the buckets is ready.

        Raises:
            ValueError: it is in none of them.
        """
        if id(tensor) not in self._known:
            name = getattr(tensor, "bagua_tensor_name", "")
            raise ValueError(f"tensor {name!r} is ready, but it is in no bucket")
        self._ready.add(id(tensor))
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not self._ready.issuperset(map(id, bucket.tensors)):
                return
            self._start(bucket)
            self._next += 1
        self._ready, self._next = set(), 0

    def wait_pending_comm_ops(self) -> None:
        """Wait for all buckets that have started.

        Raises:
            RuntimeError: what went wrong in an operation.
        """
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.wait()

    def _start(self, bucket: ReadyBucket) -> None:
        flat = bucket.tensors[0].new_empty(0, requires_grad=False)
        if self._pipeline is None:
            self._pipeline = pipeline_for(flat.device)
            weakref.finalize(self, self._pipeline.close)
        # The first does nothing, so that the second runs beside the training thread.
        chain = Start(lambda _: None), Start(lambda _: bucket.run())
        self._arrivals.append(self._pipeline.start(flat, chain))


_backends: weakref.WeakValueDictionary[str, Backend] = weakref.WeakValueDictionary()


def backend_of(model_name: str) -> Backend:
    """The backend of the module with this name; it is there as long as somebody holds it."""
    return _backends.setdefault(model_name, Backend())


Getter = Callable[[Any], torch.Tensor]
Setter = Callable[[Any, torch.Tensor], None]


@dataclass(frozen=True)
class _Registration:
    """The registration of a tensor. A parameter that is pickled takes its attributes along, and a
    getter is often a lambda: a loaded tensor is not registered."""

    name: str
    module_name: str | None
    backend: Backend | None
    getter: Getter | None
    setter: Setter | None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class BaguaTensor(torch.Tensor):
    """What ``install`` gives every :class:`torch.Tensor`.

    A registered tensor stands for the one that is communicated: itself, or what a getter finds,
    such as its gradient. That one may be another in each step.
    """

    _bagua_registration: _Registration | None
    _bagua_keeps_gradient: bool

    def is_bagua_tensor(self) -> bool:
        """Whether it is registered."""
        return getattr(self, "_bagua_registration", None) is not None

    @property
    def bagua_tensor_name(self) -> str:
        """The name that it was registered by; this and the next two exist on registered tensors
        only."""
        return _registration(self).name

    @property
    def bagua_module_name(self) -> str | None:
        """The name of the model that it belongs to."""
        return _registration(self).module_name

    @property
    def bagua_backend(self) -> Backend | None:
        """The backend of that model."""
        return _registration(self).backend

    def ensure_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> BaguaTensor:
        """Register it, and answer with it.

        Args:
            name: None: none.
            module_name: of the model that it belongs to, which marking it ready needs.
            getter_closure: finds what is communicated; None: the tensor itself.
            setter_closure: puts another tensor in the place of that.

        Raises:
            ValueError: it is registered under another name; or there is a setter without a getter.
        """
        known = getattr(self, "bagua_tensor_name", None), getattr(self, "bagua_module_name", None)
        if name is not None and known[0] and known != (name, module_name):
            raise ValueError(
                f"the tensor is registered as {known[0]!r} of module {known[1]!r}, and cannot "
                f"become {name!r} of module {module_name!r}"
            )
        if setter_closure is not None and getter_closure is None:
            raise ValueError("a setter_closure needs a getter_closure")
        self._bagua_registration = _Registration(
            name or "",
            module_name,
            None if module_name is None else backend_of(module_name),
            getter_closure,
            setter_closure,
        )
        return self

    def to_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> BaguaTensor:
        """Register a new tensor with the same memory, and answer with that; the arguments are
        those of :meth:`ensure_bagua_tensor`."""
        alias: Any = self.view(self.shape)
        found: BaguaTensor = alias.ensure_bagua_tensor(
            name, module_name, getter_closure, setter_closure
        )
        return found

    def bagua_getter_closure(self) -> torch.Tensor:
        """Return what is communicated."""
        getter = _registration(self).getter
        return self if getter is None else getter(self)

    def bagua_setter_closure(self, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of what is communicated.

        Raises:
            ValueError: it was registered without a setter.
        """
        setter = _registration(self).setter
        if setter is None:
            raise ValueError(f"{self.bagua_tensor_name!r} was registered without a setter_closure")
        setter(self, tensor)

    def bagua_backend_tensor(self) -> torch.Tensor:
        """What is communicated, as the backend sees it: a tensor with the same memory."""
        return self.bagua_getter_closure()

    def bagua_ensure_grad(self) -> BaguaTensor:
        """Add a gradient of zeros if there is none, now and before each later pass that a
        user-written algorithm trains.

        Raises:
            TypeError: it is no parameter.
        """
        if self.grad is None:
            if not isinstance(self, torch.nn.Parameter):
                raise TypeError("only a torch.nn.Parameter can be given a gradient")
            self.grad = torch.zeros_like(self.data)
        self._bagua_keeps_gradient = True
        return self

    def bagua_mark_communication_ready(self) -> None:
        """Mark the tensor as ready for its bucket's communication: what the current stream has
        done is waited for.

        Raises:
            ValueError: it was registered without a module, or is in no bucket of it.
        """
        if self.bagua_backend is None:
            raise ValueError(f"{self.bagua_tensor_name!r} was registered without a module_name")
        self.bagua_backend.mark_communication_ready(self)

    bagua_mark_communication_ready_without_synchronization = bagua_mark_communication_ready

    def bagua_set_storage(self, storage: Any, storage_offset: int = 0) -> None:
        """Move what is communicated to ``storage`` (typed or untyped), from an offset in elements
        on. Its values become those found there."""
        effective = self.bagua_getter_closure()
        untyped = getattr(storage, "untyped", lambda: storage)()
        with torch.no_grad():
            moved = torch.empty(0, dtype=effective.dtype, device=effective.device)
            moved.set_(untyped, storage_offset, effective.shape)  # type: ignore[call-overload]
            if _registration(self).setter is None:
                effective.data = moved
            else:
                self.bagua_setter_closure(moved)


def keeps_gradient(tensor: Any) -> bool:
    """Whether its gradient was ensured."""
    return getattr(tensor, "_bagua_keeps_gradient", False)


def _registration(tensor: Any) -> _Registration:
    found: _Registration | None = getattr(tensor, "_bagua_registration", None)
    if found is None:
        raise AttributeError("the tensor is not registered: call ensure_bagua_tensor first")
    return found
