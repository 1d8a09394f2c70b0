"""The first rank's optimizer state on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


class _Hole:
    """Stands in place of a tensor that travels by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device.type


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    own: Iterable[torch.Tensor] = (),
) -> None:
    """Give all ranks of ``group`` the state and the hyperparameters of its first rank. All of them
    must call it.

    Ranks may have made different numbers of steps: one that resumed from a checkpoint may be first.

    Args:
        device: that the group communicates from.
        own: parameters that are each rank's own, with their state.
    """
    source = dist.get_global_rank(group, 0)
    is_source = dist.get_rank(group) == 0
    state = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    message = [_hollow(state, tensors) if is_source else None]
    dist.broadcast_object_list(message, src=source, group=group, device=device)
    received: list[torch.Tensor] = []
    state = _filled(message[0], received, device)
    for tensor in tensors if is_source else received:
        travelling = tensor.detach().to(device).contiguous()
        dist.broadcast(travelling, src=source, group=group)
        if not is_source:
            tensor.copy_(travelling)
    if not is_source:
        kept = {each: optimizer.state[each] for each in own if each in optimizer.state}
        optimizer.load_state_dict(state)
        optimizer.state.update(kept)


def _hollow(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with holes for its tensors, which are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Hole(value)
    if isinstance(value, dict):
        return {key: _hollow(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_hollow(item, tensors) for item in value)
    return value


def _filled(value: Any, received: list[torch.Tensor], device: torch.device) -> Any:
    """The same with new tensors in the holes, which are appended to ``received``."""
    if isinstance(value, _Hole):
        on = device if value.device == device.type else torch.device("cpu")
        received.append(torch.empty(value.shape, dtype=value.dtype, device=on))
        return received[-1]
    if isinstance(value, dict):
        return {key: _filled(item, received, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, received, device) for item in value)
    return value
