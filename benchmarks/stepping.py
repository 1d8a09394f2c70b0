"""Steps of gradient lists and of real models, and what rounds of them share."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from models import GPT2Small, ResNet50, bert_base_shapes, resnet50_shapes
from torch import nn

LISTS = {"resnet50": resnet50_shapes, "bert": bert_base_shapes}
# Batches that fill the GPU's time, with room in 40 GiB.
REAL = {"resnet50": (ResNet50, 256), "gpt2": (GPT2Small, 16)}
# Torch cuts its buckets anew after the first step.
WARM_UP_STEPS = 5
Times = tuple[list[float], list[float]]
"""Of two that are compared, in seconds, in pairs."""
Step = Callable[[nn.Module], float]
"""Makes a forward and a backward pass; answers with its seconds."""


def list_step(device: torch.device) -> Step:
    """Of a list of gradients."""
    value = torch.zeros(1, requires_grad=True, device=device)

    def step(wrapped: nn.Module) -> float:
        wrapped.zero_grad(set_to_none=True)
        dist.barrier()
        began = time.perf_counter()
        wrapped(value).backward()
        return time.perf_counter() - began

    return step


def real_step(inputs: tuple[torch.Tensor, ...]) -> Step:
    """Of a real model on the GPU, in bfloat16."""

    def step(wrapped: nn.Module) -> float:
        wrapped.zero_grad(set_to_none=True)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = wrapped(*inputs)
        loss.backward()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    return step


def slowest(*times: list[float]) -> Times:
    """The largest over all ranks, of each."""
    device = "cpu" if dist.get_backend() == dist.Backend.GLOO else "cuda"
    every = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    first, second = every.tolist()
    return first, second


def let_go() -> None:
    """Of the memory of wrappers that are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def deviation(values: list[float]) -> float:
    """The median absolute deviation from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)
