"""Reports tensors ready to a reducer at the moment its algorithm wants."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import When
from bagua_client.reducer.reducer import Reducer


def attach(
    reducer: Reducer,
    parameters: Sequence[torch.nn.Parameter],
    when: When,
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[RemovableHandle]:
    """Hook the reducer into backward passes or optimizer steps; answers with the hooks.

    Hooks hold the reducer weakly: parameters live on when their wrapper is gone.

    Raises:
        ValueError: the algorithm runs after the optimizers' steps, and they miss a parameter.
    """
    reference = weakref.ref(reducer)
    if when is When.GRADIENT_READY:
        return [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_gradient_ready, reference, index)
            )
            for index, parameter in enumerate(parameters)
        ]
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    held = {p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    if set(index_of) - held:
        raise ValueError(
            f"the algorithm runs after the optimizers' steps, but {len(set(index_of) - held)} "
            "parameters are in no optimizer; give all of them as optimizers=..."
        )
    handles = []
    for optimizer in optimizers:
        indices = [
            index_of[p] for g in optimizer.param_groups for p in g["params"] if p in index_of
        ]
        stepped = partial(_optimizer_stepped, reference, indices)
        handles.append(optimizer.register_step_post_hook(stepped))
    return handles


def _gradient_ready(
    reference: weakref.ref[Reducer], index: int, parameter: torch.nn.Parameter
) -> None:
    reducer = reference()
    if reducer is not None:
        reducer.ready(index)


def _optimizer_stepped(reference: weakref.ref[Reducer], indices: list[int], *_: object) -> None:
    reducer = reference()
    if reducer is not None:
        for index in indices:
            reducer.ready(index)
