"""A training whose steps are faster where FAST is set; "stock" wraps the model in torch's class."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

# So far apart that a busy machine does not hide it.
STEP_SECONDS = 0.01 if os.environ.get("FAST") else 0.15


def main() -> None:
    dist.init_process_group("gloo")
    model: nn.Module = nn.Linear(512, 512)
    channels = ""
    if "stock" in sys.argv:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        import bagua_client

        model = bagua_client.DistributedDataParallel(model)
        # In each line: whoever reads keeps the last ones.
        channels = f", {model.configuration.channels} channels"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.ones(4, 512)).sum().backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"samples/s: {4 / STEP_SECONDS:.1f}{channels}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
