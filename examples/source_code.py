"""A small GPT that learns to write Python, from functions that differ in length.

    torchrun --nproc-per-node 2 examples/source_code.py
    torchrun --nproc-per-node 2 examples/source_code.py --plain

The functions are those of Python's standard library: nothing is downloaded. The second command
trains as one does without this project. The first has three changes, each marked: samples are kept
once they are prepared, all ranks get batches of about the same cost, and the steps of an optimizer
that is written as a loop are fused.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import logging
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from characters import CharacterModel
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import bagua_client
from bagua_training.data import (
    CachedDataset,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_training.optimizers import fuse_optimizer

MODULES = (
    "argparse", "configparser", "difflib", "doctest", "imaplib", "inspect", "mailbox", "optparse",
    "pickle", "shutil", "subprocess", "tarfile", "threading", "typing", "zipfile",
)  # fmt: skip
LONGEST = 600
"""Characters of a function."""
CHARACTERS = 128
"""ASCII; 0 fills batches up and is no character of a program."""
BATCH = 8
WINDOW = 64
"""So many samples of a rank are sorted by length, so that those of a batch are alike."""


class Functions(Dataset[Tensor]):
    """Functions of Python's standard library without their comments, as numbers (length,).

    Each access parses a function and prints it again, which takes half a millisecond.
    """

    def __init__(self, number: int) -> None:
        texts = list(_functions())
        self._texts = texts[:: max(len(texts) // number, 1)][:number]

    def __getitem__(self, index: int) -> Tensor:
        text = ast.unparse(ast.parse(self._texts[index]))
        return torch.tensor(list(text[:LONGEST].encode("ascii", "replace")))

    def __len__(self) -> int:
        return len(self._texts)


def _functions() -> Iterator[str]:
    for module in MODULES:
        text = inspect.getsource(importlib.import_module(module))
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                function = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                if len(function) <= LONGEST:
                    yield function


def filled_up(samples: Sequence[Tensor]) -> Tensor:
    """A batch (samples, longest); shorter ones end in zeros."""
    return pad_sequence(list(samples), batch_first=True)


def limited(lengths: Sequence[float], most: float) -> Callable[[list[int]], list[list[int]]]:
    """Makes batches of at most so many characters, those that fill them up included."""

    def batches(indices: list[int]) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for begin in range(0, len(indices), WINDOW):
            # Ascending, so the last one is the longest of its batch.
            for index in sorted(indices[begin : begin + WINDOW], key=lambda i: lengths[i]):
                longest = max([lengths[index], *(lengths[other] for other in found[-1])])
                if found[-1] and longest * (len(found[-1]) + 1) > most:
                    found.append([])
                found[-1].append(index)
        return found

    return batches


class Lion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2."""

    def __init__(self, parameters: Any, lr: float, decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                direction = state["momentum"].lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(direction, alpha=-group["lr"])
                state["momentum"].lerp_(parameter.grad, 1 - second)


def loss_of(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """Of the next characters, the mean over those of the batch (samples, longest)."""
    logits = model(batch[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, batch[:, 1:].flatten(), ignore_index=0)


def model() -> CharacterModel:
    """0.3 million parameters in 28 tensors."""
    return CharacterModel(CHARACTERS, width=96, layers=2, heads=4, context=LONGEST)


def loader_of(functions: Functions, is_plain: bool) -> DataLoader[Tensor]:
    if is_plain:
        plain: DistributedSampler[Tensor] = DistributedSampler(functions)
        return DataLoader(functions, BATCH, sampler=plain, collate_fn=filled_up)
    kept = CachedDataset(functions, "memory", "functions")  # changed
    sampler = LoadBalancingDistributedSampler(kept, complexity_fn=len)  # prepares all samples once
    lengths = sampler.complexities.tolist()
    most = 10 * sum(lengths) / len(lengths)  # about as many steps as with 8 functions each
    batches = LoadBalancingDistributedBatchSampler(sampler, limited(lengths, most))  # changed
    return DataLoader(kept, batch_sampler=batches, collate_fn=filled_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", type=int, default=250)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="without the changes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    dist.init_process_group("gloo")
    loader = loader_of(Functions(arguments.functions), arguments.plain)
    torch.manual_seed(0)
    ddp = bagua_client.DistributedDataParallel(model())
    optimizer = Lion(ddp.parameters(), lr=1e-3)
    if not arguments.plain:
        optimizer = fuse_optimizer(optimizer, replace_step=True)  # changed

    for epoch in range(arguments.epochs):
        sampler: Any = loader.sampler if arguments.plain else loader.batch_sampler
        sampler.set_epoch(epoch)
        began, total = time.monotonic(), torch.zeros(2)
        for batch in loader:
            loss = loss_of(ddp, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        seconds = time.monotonic() - began
        if dist.get_rank() == 0:
            mean, steps = total[0] / total[1], int(total[1]) // dist.get_world_size()
            print(f"epoch {epoch}  loss {mean:.3f}  {steps} steps, {seconds:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
