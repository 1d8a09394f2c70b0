"""A rank of a training whose blocks are recomputed: tuned from its first step, then beside the same
settings swept by hand, one after the other, and again; or tuned again and again with other limits.

    [torchrun --nproc-per-node 2] python benchmarks/support/jobs/recompute.py SPEC OUT

SPEC is a JSON file, see ``benchmarks/recomputation.py``. Rank 0 writes OUT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import bagua_client
from bagua_client.tunable import tunable
from bagua_client.tunable.memory import CudaMemory, DeviceMemory
from benchmarks.support.jobs.paper_memory import PaperMemory
from benchmarks.support.jobs.rank import write

WARMUP_STEPS = 2
PAPER_BYTES, PAPER_SCALE = 2**40, 1024
"""A model of a hidden size of 64 stands for one of 2,048."""
OVER_MICRO_BATCHES: dict[str, dict[str, Any]] = {
    "kept over micro-batches": {"kept_over_micro_batches": "on"},
    "reduced once": {"deferred_reduction": "on"},
    "both": {"kept_over_micro_batches": "on", "deferred_reduction": "on"},
}
"""All with as many units kept as there are blocks."""


def transformer(spec: Mapping[str, Any]) -> tuple[nn.Module, nn.ModuleList]:
    """The model, and its blocks."""
    import transformers

    layers, hidden, tokens = spec["layers"], spec["hidden"], spec["tokens"]
    common = {"use_cache": False, "attn_implementation": "sdpa"}
    if spec["model"] == "gpt2":
        config = transformers.GPT2Config(
            n_embd=hidden,
            n_layer=layers,
            n_head=hidden // 64,
            n_positions=tokens,
            vocab_size=spec["vocabulary"],
            **common,
        )
        gpt2 = transformers.GPT2LMHeadModel(config)
        return gpt2, gpt2.transformer.h
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(hidden * 2.75),
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=spec["vocabulary"],
        max_position_embeddings=tokens,
        **common,
    )
    llama = transformers.LlamaForCausalLM(config)
    return llama, llama.model.layers


class Training:
    """A model that is trained in one of the ways that SPEC names.

    Args:
        is_ours: else it is trained as torch alone does it.
    """

    def __init__(self, spec: Mapping[str, Any], device: torch.device, is_ours: bool = True) -> None:
        self.spec, self._device, self._is_ours = spec, device, is_ours
        torch.manual_seed(0)
        with device:
            model, blocks = transformer(spec)
        self.model: Any = self._wrapped(model, blocks)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator(device=device).manual_seed(rank)
        shape = (spec["sequences"], spec["tokens"])
        words = model.config.vocab_size
        self._tokens = torch.randint(0, words, shape, device=device, generator=generator)

    def _wrapped(self, model: nn.Module, blocks: nn.ModuleList) -> Any:
        spec, ranks = self.spec, self.spec["ranks"]
        if spec["way"] == "transformers":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for place, block in enumerate(blocks):
            if spec["compiled"] == "inside":
                block.compile()
            if spec["way"] == "wrapper":
                blocks[place] = block = checkpoint_wrapper(block)
            if spec["compiled"] == "around":
                block.compile()
        if ranks == "replicated":
            kind = bagua_client if self._is_ours else nn.parallel
            return kind.DistributedDataParallel(model)
        if ranks == "sharded":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for block in blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        return bagua_client.tune(model) if self._is_ours else model

    def step(self, length: int | None = None) -> None:
        """One step of the training, of which nothing waits for the GPU.

        Args:
            length: so many tokens of each sequence; None: all.
        """
        tokens = self._tokens[:, :length]
        self._optimizer.zero_grad()
        is_sharded, micro_batches = self.spec["ranks"] == "sharded", self.spec["micro_batches"]
        for number in range(micro_batches):
            if is_sharded and micro_batches > 1:
                self.model.set_is_last_backward(number == micro_batches - 1)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=not is_sharded):
                loss = self.model(input_ids=tokens, labels=tokens).loss
            (loss / micro_batches).backward()
        self._optimizer.step()


def timed(training: Training, device: torch.device, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and the peak of the memory in GiB."""
    for _ in range(WARMUP_STEPS):
        training.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        training.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return seconds, peak / 2**30


def tuned(training: Training, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Train until the tuning has ended."""
    began, steps = time.perf_counter(), 0
    while steps == 0 or (training.model.is_tuning and steps < spec["most_steps"]):
        training.step()
        steps += 1
    seconds = time.perf_counter() - began
    return {**training.model.tuning.to_json(), "made_steps": steps, "made_seconds": seconds}


def swept(training: Training, spec: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Each number of blocks in turns, and what was found; what does not fit is left out."""
    found = training.model.configuration
    default = training.model.tuning.default
    total = default.recomputed_blocks
    is_one = spec["micro_batches"] == 1
    shares = (1.0, 0.75, 0.5, 0.25, 0.0) if is_one else (1.0, 0.0)
    numbers = [round(total * share) for share in shares]
    settings = {f"{n} of {total}": replace(default, recomputed_blocks=n) for n in numbers}
    if not is_one:
        settings |= {
            f"{n} of {total}, {name}": replace(
                default, recomputed_blocks=n, kept_units=total, **changes
            )
            for n, (name, changes) in product(numbers, OVER_MICRO_BATCHES.items())
        }
    settings |= {"found": found}
    stock = Training(spec, device, is_ours=False) if spec["beside_stock"] else None
    names = [*settings, *(["stock"] if stock is not None else [])]
    rows: dict[str, dict[str, Any]] = {name: {"seconds": [], "gib": 0.0} for name in names}

    def measure(name: str, model: Training) -> None:
        seconds, gib = timed(model, device, spec["measured_steps"])
        rows[name]["seconds"] += seconds
        rows[name]["gib"] = max(rows[name]["gib"], gib)

    for _ in range(spec["rounds"]):
        if stock is not None:
            measure("stock", stock)
        for name, configuration in settings.items():
            if rows[name].get("misfit") or not training.model.reconfigure(configuration):
                rows[name]["misfit"] = True
                training.step()
                continue
            measure(name, training)
    return rows


def limited(spec: Mapping[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Tune again and again, each time with another limit of the memory, every other time with
    sequences of random lengths; what each has taken. On a CPU its memory is on paper."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory

        def limit_to(size_bytes: float) -> None:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(size_bytes / total, device)

        yield from _limited(spec, device, CudaMemory(device), limit_to)
        return
    paper = PaperMemory(PAPER_BYTES, PAPER_SCALE)
    with paper, mock.patch.object(tunable, "memory_of", return_value=paper):
        yield from _limited(spec, device, paper, paper.limit_to)


def _limited(
    spec: Mapping[str, Any],
    device: torch.device,
    memory: DeviceMemory,
    limit_to: Callable[[float], None],
) -> Iterator[dict[str, Any]]:
    draw = random.Random(spec["seed"])
    training: Training | None = Training(spec, device)
    assert training is not None
    tuned(training, spec)
    default, peaks = training.model.tuning.default, []
    for count in (default.recomputed_blocks, 0):
        training.model.reconfigure(replace(default, recomputed_blocks=count))
        timed(training, device, 1)
        memory.reset()
        timed(training, device, 1)
        peaks.append(memory.taken().peak_bytes)
    training = None
    for number in range(spec["limits"]):
        # Another model, so that nothing is known of it from the tunings before.
        another = {**spec, "vocabulary": spec["vocabulary"] + number}
        limit = draw.uniform(1.1 * peaks[0], 1.2 * peaks[1])
        gc.collect()
        limit_to(limit)
        found = _tuned_within(limit, Training(another, device), _lengths(spec, number), memory)
        gc.collect()
        limit_to(limit)
        same = islice(_lengths(spec, number), found["steps"] + 1)
        ran_out = bool(found["out_of_memory"])
        found["stock_ran_out"] = ran_out and stock_runs_out(another, device, same)
        yield {**found, "varies": _is_varied(number)}


def _is_varied(number: int) -> bool:
    """Whether the sequences of a tuning are of random lengths."""
    return number % 2 == 1


def _lengths(spec: Mapping[str, Any], number: int) -> Iterator[int | None]:
    """Of the sequences in each step of a tuning, in tokens; None: all."""
    draw, tokens = random.Random(f"{spec['seed']}/{number}"), spec["tokens"]
    while True:
        yield draw.randint(tokens // 4, tokens) if _is_varied(number) else None


def _tuned_within(
    limit: float, training: Training, lengths: Iterator[int | None], memory: DeviceMemory
) -> dict[str, Any]:
    """One tuning within a limit of so many bytes: what it has taken."""
    memory.reset()
    before, steps, most, ran_out = memory.taken().retries, 0, 0, ""
    try:
        while steps == 0 or (training.model.is_tuning and steps < training.spec["most_steps"]):
            training.step(next(lengths))
            steps, most = steps + 1, max(most, memory.taken().peak_bytes)
    except torch.OutOfMemoryError as error:
        ran_out = f"{training.model.configuration}: {error}"
    return {
        "limit_gib": limit / 2**30,
        "out_of_memory": ran_out,
        "retries": memory.taken().retries - before,
        "peak_share": most / limit,
        "steps": steps,
        "recomputed": training.model.configuration.recomputed_blocks,
        "summary": training.model.tuning.summary,
    }


def stock_runs_out(
    spec: Mapping[str, Any], device: torch.device, lengths: Iterable[int | None]
) -> bool:
    """Whether these steps run out of memory without us, too."""
    try:
        stock = Training(spec, device, is_ours=False)
        for length in lengths:
            stock.step(length)
    except torch.OutOfMemoryError:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    spec = json.loads(options.spec.read_text())
    device = torch.device("cpu")
    if spec["device"] == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        if spec["limit_gib"]:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(spec["limit_gib"] * 2**30 / total, device)
    if spec["ranks"] != "single":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    result: dict[str, Any] = {"spec": spec}
    if spec["limits"]:
        rows = result["limited"] = []
        for row in limited(spec, device):
            rows.append(row)
            write(options.out, result)
    else:
        training = Training(spec, device)
        result["tuning"] = tuned(training, spec)
        result["sweep"] = swept(training, spec, device)
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(device)
        result["out_of_memory"] = torch.cuda.memory_stats(device).get("num_ooms", 0)
        result["retries"] = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    if int(os.environ.get("RANK", "0")) == 0:
        write(options.out, result)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
