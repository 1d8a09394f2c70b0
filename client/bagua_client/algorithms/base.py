"""What an algorithm is: what is communicated, and when. Algorithms are found by name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from bagua_client.buckets.bucket import Bucket
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation
from bagua_client.configuration import Configuration


class Communicates(enum.Enum):
    """What of a parameter travels."""

    GRADIENT = enum.auto()
    WEIGHT = enum.auto()


class When(enum.Enum):
    """When a parameter's tensor is ready to travel."""

    GRADIENT_READY = enum.auto()
    """In the backward pass; the result is in place when ``backward()`` returns."""
    OPTIMIZER_STEPPED = enum.auto()
    """After its optimizer's step; needs ``optimizers`` given to DistributedDataParallel."""


class Algorithm:
    """One way of keeping the replicas together.

    The smallest one, which averages weights after each step of the optimizer::

        @register("weight_average")
        class WeightAverage(Algorithm):
            communicates = Communicates.WEIGHT
            when = When.OPTIMIZER_STEPPED

            def operations(self, bucket, communicator, configuration):
                return communicator.sum_operations(configuration, bucket.channel)
    """

    communicates: Communicates = Communicates.GRADIENT
    when: When = When.GRADIENT_READY

    def scale(self, world_size: int) -> float:
        """What a tensor is multiplied by on its way into the bucket: the average's share."""
        return 1.0 / world_size

    def operations(
        self, bucket: Bucket, communicator: Communicator, configuration: Configuration
    ) -> Sequence[Operation]:
        """The chain for ``bucket``, at least one operation; it may keep state for the bucket.

        Called by all ranks together, after every re-cut.
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
