"""Samples that are slow to load or to prepare are loaded once, and kept for all processes.

Bagua's idea: the first epoch fills a store that the ranks and their workers share, the next read
from it. Beyond Bagua: stores without a server, in memory or on disk; a server that has a password
and ends with the job; a store that goes away costs time only; a version, so that what an older
program prepared is not served.

Samples are pickled, by ``serialize`` and ``deserialize`` of this module; as with Bagua, who puts
others in their place has samples kept in another way. Unpickling runs code that the pickle names,
so whoever can write to the store can run code in the training.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import torch
from torch.utils.data import Dataset

from bagua_training.data import log_store
from bagua_training.data.log_store import SharedFile
from bagua_training.data.store import BufferedStore, Store

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
"""Torch works without it."""
_NAMES = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64"
NUMBERS = frozenset(getattr(torch, name) for name in _NAMES.split())
"""Types that NumPy has, and that torch makes tensors of again."""


class _Pickler(pickle.Pickler):
    """Pickles tensors of the CPU as NumPy arrays.

    Torch pickles a tensor as a file of its own inside the pickle. For small tensors that takes
    longer than all else (docs/data.md has the times), and of a view it has the whole storage.
    """

    def reducer_override(self, obj: object) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        return torch.from_numpy, (obj.numpy(),)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether an array says all that there is to it."""
    return (
        HAS_NUMPY
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.dtype in NUMBERS
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )


def serialize(input: object) -> bytes:
    """Return the bytes that are kept of a value; Bagua's name and argument, and a user may put
    another in its place. Tensors that shared memory have each their own afterwards.

    Raises:
        Exception: it cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(input)
    return buffer.getvalue()


def deserialize(input: bytes) -> Any:
    """The value of what :func:`serialize` gave."""
    return pickle.loads(input)


class CachedDataset(Dataset[Sample]):
    """A dataset whose samples are loaded once.

    All ranks must make it, with the same arguments, after ``init_process_group``. What is random in
    ``dataset[index]`` is decided once, too: augment what comes out of this, not what goes in.

    Args:
        dataset: with a length and ``dataset[index]``; its samples can be pickled.
        backend, dataset_name, writer_buffer_size, version, kwargs: of :class:`CacheLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        version: str | int = "",
        **kwargs: Any,
    ) -> None:
        self.dataset = dataset
        self.cache_loader = CacheLoader(
            backend, dataset_name, writer_buffer_size, version, **kwargs
        )
        elsewhere = kwargs.get("folder") or kwargs.get("hosts")
        _warn_of_another(self, (backend, str(elsewhere), dataset_name, str(version)))

    def __getitem__(self, item: int) -> Sample:
        return self.cache_loader.get(item, self.dataset.__getitem__)

    def __getitems__(self, items: Sequence[int]) -> list[Sample]:
        """A batch at once, which DataLoader asks for: one way to a server and back."""
        return self.cache_loader.get_many(items, self.dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class CacheLoader:
    """Keeps what is loaded by a key.

    Args:
        backend: ``"memory"`` of each node, ``"disk"`` of each node, or ``"redis"``.
        dataset_name: different for all that is kept in the same place.
        writer_buffer_size: so many values are written at once, or earlier as many as take
            64 MiB. Until then, but for a second at most while this process reads, other processes
            do not find them.
        version: of what makes the values: change it when that changes, and nothing old is found.
        kwargs: of the backend. ``memory``: ``capacity_per_node`` in bytes. ``disk``: ``folder``,
            ``capacity_per_node``. ``redis``: those of ``RedisStore``.

    Raises:
        ValueError: there is no such backend, or ``writer_buffer_size`` is below 1.
        ImportError, RuntimeError, OSError: the backend cannot be set up, which the text explains.
    """

    def __init__(
        self,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        version: str | int = "",
        **kwargs: Any,
    ) -> None:
        self._buffered = BufferedStore(
            _store(backend, dataset_name, str(version), kwargs), writer_buffer_size
        )
        self._prefix = f"{quote(dataset_name, safe='')}/{quote(str(version), safe='')}/"
        self._counters = _Counters()

    @property
    def store(self) -> Store:
        """The store that holds the values."""
        return self._buffered.store

    @property
    def statistics(self) -> CacheStatistics:
        """The statistics of this process and its workers, also of those that have ended."""
        return self._counters.statistics()

    def get(self, key: object, load_fn: Callable[[Any], Sample]) -> Sample:
        """The value of ``key``: what was kept, else ``load_fn(key)``.

        Raises:
            TypeError: it cannot be pickled.
            Exception: whatever ``load_fn`` raises.
        """
        return self.get_many([key], load_fn)[0]

    def get_many(self, keys: Sequence[Any], load_fn: Callable[[Any], Sample]) -> list[Sample]:
        """The values of several keys, looked for at once.

        Raises:
            TypeError: one of them cannot be pickled.
            Exception: whatever ``load_fn`` raises.
        """
        names = [f"{self._prefix}{key}" for key in keys]
        kept = self._buffered.mget(names)
        return [
            self._unpickled_or_loaded(name, found, key, load_fn)
            for name, found, key in zip(names, kept, keys, strict=True)
        ]

    def _unpickled_or_loaded(
        self, name: str, kept: bytes | None, key: Any, load_fn: Callable[[Any], Sample]
    ) -> Sample:
        if kept is not None:
            try:
                value: Sample = deserialize(kept)
            except Exception as error:  # Of a class that is gone, for example; loaded anew.
                logger.debug("cache: %s cannot be unpickled: %s", name, error)
            else:
                self._counters.count(hit=True)
                return value
        self._counters.count(hit=False)
        value = load_fn(key)
        try:
            pickled = serialize(value)
        except Exception as error:
            raise TypeError(
                f"the cache cannot keep what was loaded for {key!r}, a {type(value).__name__}, "
                f"because it cannot be pickled: {error}"
            ) from error
        self._buffered.put(name, pickled)
        return value

    def num_keys(self) -> int:
        """Return the number of all keys in the store."""
        self.flush()
        return self.store.num_keys()

    def flush(self) -> None:
        """Write what this process holds back, so that all processes find it."""
        self._buffered.flush()


def _store(backend: str, name: str, version: str, options: dict[str, Any]) -> Store:
    if backend == "memory":
        return log_store.memory_of_node(**options)
    if backend == "disk":
        return log_store.disk(name=name, version=version, **options)
    if backend == "redis":
        from bagua_training.data.redis_store import RedisStore  # redis-py is an extra

        return RedisStore(**options)
    raise ValueError(f"backend must be memory, disk or redis, not {backend!r}")


_living: weakref.WeakValueDictionary[tuple[str, ...], CachedDataset[Any]] = (
    weakref.WeakValueDictionary()
)


def _warn_of_another(cached: CachedDataset[Any], place: tuple[str, ...]) -> None:
    """Two datasets of one name in the same place would be given each other's samples."""
    other = _living.setdefault(place, cached)
    if other.dataset is not cached.dataset:
        logger.warning(
            "cache: two datasets have the dataset_name %r and will be given each other's samples; "
            "give each its own",
            place[2],
        )


SLOT = struct.Struct("<QQ")  # hits, misses


class CacheStatistics(NamedTuple):
    """How often a cache was asked, and how often it had the value.

    Attributes:
        hits: values that it had.
        misses: values that were loaded.
    """

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """The share of hits in all that was asked for; 0 if nothing was."""
        return self.hits / max(self.hits + self.misses, 1)


class _Counters:
    """Counters of hits and misses, with a slot for each process, so that none waits for another."""

    def __init__(self) -> None:
        self._file = SharedFile()
        self._process = 0

    def count(self, hit: bool) -> None:
        if self._process != os.getpid():
            self._begin()
        if hit:
            self._hits += 1
        else:
            self._misses += 1
        self._file.write(SLOT.pack(self._hits, self._misses), self._offset)

    def statistics(self) -> CacheStatistics:
        slots = SLOT.iter_unpack(self._file.read(self._file.size_bytes, 0))
        return CacheStatistics(*(sum(each) for each in zip((0, 0), *slots, strict=True)))

    def _begin(self) -> None:
        self._process, self._hits, self._misses = os.getpid(), 0, 0
        with self._file.locked():
            self._offset = self._file.size_bytes
            self._file.resize(self._offset + SLOT.size)
