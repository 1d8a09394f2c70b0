"""Bagua's methods of every module and of every tensor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn

from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua_compat.torch_api.tensor import BaguaTensor

Module = TypeVar("Module", bound=nn.Module)


class BaguaModule(nn.Module):
    """What :func:`install` gives every :class:`torch.nn.Module`.

    Attributes:
        bagua_ddp: what trains the module; there since :meth:`with_bagua`.
    """

    bagua_ddp: BaguaDistributedDataParallel
    _bagua_module_name: str

    def with_bagua(
        self: Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Any,
        process_group: Any = None,
        do_flatten: bool = True,
    ) -> Module:
        """Train the module on all ranks of the group, which must call this together.

        The ranks begin with the first rank's weights, buffers and optimizer states. The module is
        called and saved as before: the names in its ``state_dict`` stay. Under ``BAGUA_AUTOTUNE=1``
        its communication is tuned. Called again it goes on with another algorithm.

        Names in the module's ``_bagua_params_and_buffers_to_ignore`` are not communicated.

        Args:
            optimizers: of the module.
            algorithm: of :mod:`bagua_client.algorithms`, or written for Bagua.
            process_group: Bagua's or torch's; None: of all ranks.
            do_flatten: gradients are views into the buckets.

        Returns:
            The module itself.

        Raises:
            ValueError: the algorithm does not work for these ranks.
        """
        BaguaDistributedDataParallel(
            self, optimizers, algorithm, process_group, gradient_as_bucket_view=do_flatten
        )
        return self

    @property
    def bagua_module_name(self) -> str:
        """The name that tells this module from others. Unless it was set, a copy has another."""
        own: str | None = vars(self).get("_bagua_module_name")
        return own or f"{type(self).__name__}_{_number_of(self)}"

    @bagua_module_name.setter
    def bagua_module_name(self, name: str) -> None:
        self._bagua_module_name = name

    # None before with_bagua, and no AttributeError: torch.compile reads every name in ``dir``.

    @property
    def bagua_algorithm(self) -> Any:
        """The algorithm's instance for this module; None before :meth:`with_bagua`."""
        return _of(self, "bagua_algorithm")

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer] | None:
        """The optimizers that were given; None before :meth:`with_bagua`."""
        found: list[torch.optim.Optimizer] | None = _of(self, "bagua_optimizers")
        return found

    @property
    def bagua_buckets(self) -> list[BaguaBucket] | None:
        """The buckets, as they are cut now; None before :meth:`with_bagua`."""
        found: list[BaguaBucket] | None = _of(self, "bagua_buckets")
        return found


_next_numbers = count()
_numbers: dict[int, int] = {}
"""Numbers by a module's id, as long as it lives. The id comes again, maybe while the buckets of the
module that had it are still there.
"""


def _number_of(module: nn.Module) -> int:
    if id(module) not in _numbers:
        _numbers[id(module)] = next(_next_numbers)
        weakref.finalize(module, _numbers.pop, id(module)).atexit = False
    return _numbers[id(module)]


def _of(module: nn.Module, name: str) -> Any:
    """Return an attribute of what trains the module, if anything does."""
    return getattr(vars(module).get("bagua_ddp"), name, None)


def install() -> None:
    """Add Bagua's methods to every module and tensor; a second call changes nothing."""
    for owner, extension in ((nn.Module, BaguaModule), (torch.Tensor, BaguaTensor)):
        for name, member in vars(extension).items():
            if "bagua" in name and name != "__module__":
                setattr(owner, name, member)
