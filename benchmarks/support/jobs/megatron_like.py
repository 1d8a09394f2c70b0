"""A training with Megatron's arguments for its communication, on CPUs: one rank, under torchrun.

Computing is slept, as on a device that computes by itself; gradients and parameters really travel,
over gloo. Arguments have the names and the meaning that they have in Megatron-LM
(megatron/core/distributed/distributed_data_parallel.py): without --overlap-grad-reduce all
gradients are one bucket, reduced after the backward pass; --overlap-param-gather needs it. Layers
that are not among --kept-layers compute their forward pass twice; a kept one takes memory instead.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

FORWARD_SECONDS, BACKWARD_SECONDS = 0.001, 0.002
GIB = 2**30


def parsed() -> argparse.Namespace:
    """The arguments. Exits, as Megatron does, where they do not go together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp-bucket-size", type=int, default=40_000_000)
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    parser.add_argument("--overlap-param-gather", action="store_true")
    parser.add_argument("--kept-layers", type=int, default=0)
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--layer-parameters", type=int, default=400_000)
    parser.add_argument("--layer-gib", type=float, default=2.0, help="memory of a kept layer")
    parser.add_argument("--steps", type=int, default=1_000_000)
    given = parser.parse_args()
    if given.overlap_param_gather and not given.overlap_grad_reduce:
        parser.error("Must use --overlap-param-gather with --overlap-grad-reduce")
    return given


class Training:
    """See the module.

    Args:
        given: see ``parsed``.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        # Only reserved: reading or writing it would take time that is not the job's.
        self._kept = [
            torch.empty(int(given.layer_gib * GIB), dtype=torch.uint8)
            for _ in range(given.kept_layers)
        ]
        count = given.num_layers * given.layer_parameters
        self._gradients, self._parameters = torch.zeros(count), torch.zeros(count)
        self._buckets = self._cut(given.ddp_bucket_size if given.overlap_grad_reduce else count)
        self._gathers: list[tuple[int, dist.Work]] = []
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.zeros(1)
        self._optimizer = torch.optim.SGD([weight], lr=0.1)

    def _cut(self, most_parameters: int) -> list[range]:
        """The layers of each bucket, in the order of the backward pass: as many as reach the size,
        so that a bucket holds one layer at least."""
        layers = max(1, -(-most_parameters // self._given.layer_parameters))
        last = self._given.num_layers
        return [range(max(end - layers, 0), end) for end in range(last, 0, -layers)]

    def step(self) -> None:
        """One step of the training."""
        self._forward()
        reductions = self._backward()
        for work in reductions:
            work.wait()
        self._optimizer.step()
        for bucket in reversed(self._buckets):
            work = self._gather(bucket)
            if self._given.overlap_param_gather:
                self._gathers.append((bucket.start, work))
            else:
                work.wait()

    def _forward(self) -> None:
        for layer in range(self._given.num_layers):
            while self._gathers and self._gathers[0][0] <= layer:
                self._gathers.pop(0)[1].wait()
            time.sleep(FORWARD_SECONDS)

    def _backward(self) -> list[dist.Work]:
        reductions = []
        starts = {bucket.start: bucket for bucket in self._buckets}
        for layer in reversed(range(self._given.num_layers)):
            again = 0.0 if layer < self._given.kept_layers else FORWARD_SECONDS
            time.sleep(again + BACKWARD_SECONDS)
            if layer in starts:
                part = self._part(self._gradients, starts[layer])
                reductions.append(dist.all_reduce(part, async_op=True))
        return reductions

    def _gather(self, bucket: range) -> dist.Work:
        whole = self._part(self._parameters, bucket)
        own = whole.chunk(dist.get_world_size())[dist.get_rank()]
        return dist.all_gather(list(whole.chunk(dist.get_world_size())), own, async_op=True)

    def _part(self, of: torch.Tensor, bucket: range) -> torch.Tensor:
        size = self._given.layer_parameters
        return of[bucket.start * size : bucket.stop * size]


def main() -> None:
    given = parsed()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(given)
    for _ in range(given.steps):
        training.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
