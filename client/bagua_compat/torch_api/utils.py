"""Bagua's helpers: tensors joined into one, and an average over the last seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from bagua_training.optimizers import contiguity

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int64: "i64"}


def to_bagua_datatype(datatype: torch.dtype) -> str:
    """The name of the dtype in Bagua's protocol.

    Raises:
        ValueError: it has none.
    """
    if datatype not in _NAMES:
        raise ValueError(
            f"Bagua has no name for {datatype}; it knows {', '.join(map(str, _NAMES))}"
        )
    return _NAMES[datatype]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor of one dimension with all elements, in the order of ``tensors``."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Parts of ``flat``, which share its memory, with the shapes of ``tensors``."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return tuple(part.view(like.shape) for part, like in zip(parts, tensors, strict=True))


def apply_flattened_call(
    bucket: Sequence[torch.Tensor],
    call: Callable[..., object],
    extra_args: Sequence[object] | None = None,
) -> None:
    """Let ``call(flat, *extra_args)`` change all tensors of ``bucket`` as one. After
    ``dist.all_reduce`` they are divided by the number of ranks, as in Bagua."""
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, part in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.detach().copy_(part)


def apply_flattened_call_all(tensors: Sequence[torch.Tensor], call: Callable[..., object]) -> None:
    """:func:`apply_flattened_call` of those of each dtype and device."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        apply_flattened_call(alike, call)


def check_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each begins in memory where the one before it ends."""
    groups = contiguity.calculate_mutual_groups([list(tensors)])
    return len(tensors) < 2 or groups == [list(range(len(tensors)))]


def get_flattened_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """:func:`flatten`; None of no tensors."""
    return flatten(tensors) if tensors else None


class StatisticalAverage:
    """The mean of a value that is recorded now and then, over the last seconds, in little memory.

    Kept are the means over the last 1, 2, 4, 8, ... seconds, and over all time. Between two of
    these the mean is interpolated.

    Attributes:
        last_update_time: when a value was recorded last, in seconds since the epoch.
        records: the means over the last 1, 2, 4, ... seconds before that.
        record_tail: seconds beyond the longest of these, and the mean over all time.
    """

    def __init__(
        self,
        last_update_time: float | None = None,
        records: Iterable[float] = (),
        record_tail: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.last_update_time = time.time() if last_update_time is None else last_update_time
        self.records = list(records)
        self.record_tail = record_tail

    def total_recording_time(self) -> float:
        """Seconds that the records and the tail reach back."""
        return self.record_seconds() + self.record_tail[0]

    def get_records_mean(self, last_n_seconds: float) -> float:
        """The mean over that many seconds before the last record; 0 over none."""
        if last_n_seconds <= 0:
            return 0.0
        known = self._known()
        before_seconds, before = known[0]
        for seconds, mean in known:
            if seconds >= last_n_seconds:
                if seconds == before_seconds:
                    return mean
                share = (last_n_seconds - before_seconds) / (seconds - before_seconds)
                return before + (mean - before) * share
            before_seconds, before = seconds, mean
        return before

    def record(self, val: float) -> None:
        """The value was ``val`` since the last record."""
        now = time.time()
        new_seconds = now - self.last_update_time
        whole_seconds = new_seconds + self.total_recording_time()

        def mean_over(seconds: float) -> float:
            if seconds <= new_seconds:
                return val
            older = self.get_records_mean(seconds - new_seconds)
            return older + (val - older) * new_seconds / seconds

        records: list[float] = []
        while (seconds := 2.0 ** len(records)) <= whole_seconds:
            records.append(mean_over(seconds))
        tail = mean_over(whole_seconds) if whole_seconds > 0 else val
        self.records = records
        self.record_tail = (whole_seconds - self.record_seconds(), tail)
        self.last_update_time = now

    def get(self, last_n_seconds: float) -> float:
        """The mean over that many seconds before now. Since the last record the value counts as it
        was then."""
        since = time.time() - self.last_update_time
        if last_n_seconds <= since:
            return self._known()[0][1]
        return self.get_records_mean(last_n_seconds - since)

    def record_seconds(self) -> float:
        """Seconds that ``records`` reach back."""
        return 2.0 ** (len(self.records) - 1) if self.records else 0.0

    def _known(self) -> list[tuple[float, float]]:
        """Seconds and the mean over them, ascending."""
        known = [(2.0**power, mean) for power, mean in enumerate(self.records)]
        if not known or self.record_tail[0] > 0:
            known.append((self.total_recording_time(), self.record_tail[1]))
        return known
