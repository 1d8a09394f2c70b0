"""What a step costs the training thread after a tuning: with a hook on the buckets, and as watched.

One rank alone, so that nothing is waited for; three wrappers of one small model take turns. The
processor time of the thread is compared, so other programs disturb little.

    python benchmarks/watching.py --layers 20 --bucket-mb 0.004
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel
from bagua_client.integrations.distributed_data_parallel import _tunable_of
from bagua_client.measuring.rank_measurement import RankMeasurement

ROUNDS, STEPS = 400, 3
REPORTED_STEPS = 24


class Training:
    """Of one wrapper."""

    def __init__(self, wrapper: type[Stock], layers: int, bucket_mb: float) -> None:
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
        self.model: Any = wrapper(model, bucket_cap_mb=bucket_mb)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._optimizer.zero_grad()
            self.model(torch.ones(2, 16)).sum().backward()
            self._optimizer.step()

    def observe(self, is_watched: bool) -> None:
        """As an agent does, but for its reports."""
        tunable = _tunable_of(self.model)
        tunable.attach()
        measurement = RankMeasurement(tunable, [], records=False)

        def reduced() -> None:
            measurement.tick()
            if measurement.step % REPORTED_STEPS == 0:
                measurement.take(True, REPORTED_STEPS)

        tunable.after_reduction = reduced
        self.steps(4)
        if is_watched:
            tunable.watch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--bucket-mb", type=float, default=0.004)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours = DistributedDataParallel
    trainings = {
        name: Training(wrapper, arguments.layers, arguments.bucket_mb)
        for name, wrapper in (("stock", Stock), ("by a hook", ours), ("watched", ours))
    }
    trainings["by a hook"].observe(is_watched=False)
    trainings["watched"].observe(is_watched=True)
    costs: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(ROUNDS):
        for name, training in trainings.items():
            training.steps(1)
            began = time.thread_time()
            training.steps(STEPS)
            costs[name].append((time.thread_time() - began) / STEPS)
    stock = median(costs["stock"])
    for name, seconds in costs.items():
        more = (median(seconds) - stock) * 1e6
        print(f"{name:10} {median(seconds) * 1e6:7.0f} us a step, {more:+5.0f} us over stock")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
