"""What an algorithm is: how the gradients of a bucket become the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation
from bagua_client.configuration import Configuration


class Algorithm:
    """One way of keeping the replicas together: the chain that each bucket of gradients travels.

    The smallest one, which averages gradients and halves them::

        @register("halved")
        class Halved(Algorithm):
            def scale(self, world_size):
                return 0.5 / world_size

            def operations(self, communicator, configuration, channel):
                return communicator.sum_operations(configuration, channel)
    """

    def scale(self, world_size: int) -> float:
        """What a bucket is multiplied by before it travels: the average's share."""
        return 1.0 / world_size

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        """The chain for a bucket on ``channel``, at least one operation.

        Asked for each bucket of each step, when it is full; buckets come in the same order on
        all ranks.
        """
        raise NotImplementedError


_algorithms: dict[str, Callable[[], Algorithm]] = {}


def register(name: str) -> Callable[[type[Algorithm]], type[Algorithm]]:
    """Make an algorithm known under ``name``.

    Raises:
        ValueError: the name is taken by another class.
    """

    def decorate(algorithm: type[Algorithm]) -> type[Algorithm]:
        if _algorithms.setdefault(name, algorithm) is not algorithm:
            raise ValueError(f"there is an algorithm named {name!r} already")
        return algorithm

    return decorate


def find(name: str) -> Algorithm:
    """A new instance of the algorithm registered under ``name``.

    Raises:
        ValueError: there is none.
    """
    try:
        return _algorithms[name]()
    except KeyError:
        known = ", ".join(sorted(_algorithms))
        raise ValueError(f"there is no algorithm named {name!r}; known are: {known}") from None
