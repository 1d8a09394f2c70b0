"""Executes blocks of Python on one rank: run_python.py JSON_FILE, prints a JSON list of errors.

The file has a list of [page, code before it, block, whether it is only compiled]. Blocks of a page
share their names, but each has a new model.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua_client

MOST_SECONDS = 250.0
"""Only to say where a block hangs."""


def train_one_step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(2, 8)).square().mean()
    loss.backward()
    return loss


def fresh() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(2, 8)).sum()
    return {
        "torch": torch,
        "bagua_client": bagua_client,
        "model": model,
        "optimizer": optimizer,
        "loss": loss,
        "train_one_step": train_one_step,
    }


def join_group(store: Path) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def error_of(names: dict[str, Any], before: str, block: str, only_compiled: bool) -> str | None:
    try:
        code = compile(block, "block", "exec")
        if not only_compiled:
            exec(before, names)
            exec(code, names)
    except Exception:
        return traceback.format_exc()
    return None


def main() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    blocks = json.loads(Path(sys.argv[1]).read_text())
    errors: list[str | None] = []
    pages: dict[str, dict[str, Any]] = {}
    for number, (page, before, block, only_compiled) in enumerate(blocks):
        join_group(Path(f"{sys.argv[1]}.{number}"))
        names = pages.setdefault(page, {"__name__": "__main__"})
        names.update(fresh())
        if "init_process_group" in block:  # a whole program
            dist.destroy_process_group()
        errors.append(error_of(names, before, block, only_compiled))
    print(json.dumps(errors), flush=True)
    os._exit(0)  # without waiting for threads and collectives that a block has begun


if __name__ == "__main__":
    main()
