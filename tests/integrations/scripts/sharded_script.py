"""A training script that knows nothing of us, and shards its model by a framework.

python sharded_script.py FOLDER STEPS FRAMEWORK...

Each rank writes its losses, its weights and what was in force to FOLDER/FRAMEWORK-RANK.json. Of the
frameworks that follow the word ``tune`` the program has the models tuned by itself, and writes to
FOLDER/FRAMEWORK-tuned-RANK.json.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH = 16
STEP_SECONDS = 0.02
ON_GPU = torch.cuda.is_available()
IS_SHARED = ON_GPU and torch.cuda.device_count() < 2
"""Both ranks compute on one GPU, as two hosts."""
DEVICES: dict[str, Any] = {"accelerator": "gpu" if ON_GPU else "cpu", "devices": 2}
if IS_SHARED:
    DEVICES |= {"devices": 1, "num_nodes": 2}
tunes = False


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.tanh(self.inner(values))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        found: torch.Tensor = self.head(values)
        return found


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(4, WIDTH, generator=generator)
    return inputs, 2 * inputs[:, :3]


def told(model: nn.Module) -> dict[str, Any]:
    """All weights."""
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    return {name: value.flatten().tolist() for name, value in weights.items()}


def tuned(model: Any) -> Any:
    """By the program itself."""
    if not tunes:
        return model
    import bagua_client

    return bagua_client.tune(model)


def seen(model: Any) -> list[str]:
    """What is in force, where it is tuned."""
    return [str(model.configuration)] if hasattr(model, "configuration") else []


class Losses:
    """Of each step, and what was in force in it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.in_force: list[str] = []

    def add(self, loss: torch.Tensor, model: Any) -> None:
        self.losses.append(loss.item())
        now = seen(model)
        self.in_force += [word for word in now if word not in self.in_force]
        time.sleep(STEP_SECONDS if now else 0)  # The service answers meanwhile.


def as_accelerate_wants() -> Any:
    """Accelerate shards where each rank has an accelerator of its own, and nowhere else: on CPUs it
    is told so. What it does then is its own."""
    from accelerate import state

    if ON_GPU:
        return mock.patch.dict(os.environ, {})
    backend = mock.Mock(return_value=("gloo", state.DistributedType.MULTI_GPU))

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    return mock.patch.multiple(state.PartialState, _prepare_backend=backend, set_device=set_device)


def forget_state() -> None:
    """Accelerate keeps its options for the life of a process, which here trains many times."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerate(folder: Path, steps: int) -> dict[str, Any]:
    """With accumulation and clipping, saved and loaded in the midst."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    with as_accelerate_wants():
        forget_state()
        accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        model, losses = tuned(model), Losses()

        def train(first: int, end: int) -> None:
            for step in range(first, end):
                with accelerator.accumulate(model):
                    inputs, targets = (each.to(accelerator.device) for each in batch(step))
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.add(loss, model)

        train(0, steps // 2)
        accelerator.save_state(str(folder / "state"))
        train(steps // 2, steps // 2 + 4)
        accelerator.load_state(str(folder / "state"))
        train(steps // 2, steps)
        found = told(model)
    return {"losses": losses.losses, "in_force": losses.in_force, "state": found}


def trainer(folder: Path, steps: int) -> dict[str, Any]:
    """The Trainer of transformers, which evaluates, saves, and goes on from what it saved."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    losses = Losses()

    class Seen(TrainerCallback):
        trainer: Any = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            tuned(self.trainer.model_wrapped)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = seen(self.trainer.model_wrapped)
            losses.in_force += [word for word in now if word not in losses.in_force]
            time.sleep(STEP_SECONDS if now else 0)

    def train(most: int, resume: str | None) -> nn.Module:
        forget_state()
        torch.manual_seed(0)
        shape = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape, **heads))
        arguments = TrainingArguments(
            str(folder / "trainer"),
            max_steps=most,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
            save_steps=steps // 2,
            eval_strategy="steps",
            eval_steps=5,
        )
        rows = torch.randint(32, (64, 10), generator=torch.Generator().manual_seed(3))
        sentences = [{"input_ids": row, "labels": row} for row in rows]
        callback = Seen()
        made = Trainer(
            model,
            arguments,
            train_dataset=sentences,
            eval_dataset=sentences[:8],
            callbacks=[callback],
        )
        made.remove_callback(PrinterCallback)
        callback.trainer = made
        made.train(resume_from_checkpoint=resume)
        names = ("loss", "eval_loss", "grad_norm")
        history = made.state.log_history
        losses.losses += [entry[name] for entry in history for name in names if name in entry]
        found: nn.Module = made.model_wrapped
        return found

    with as_accelerate_wants():
        train(steps // 2 + 2, None)
        saved = folder / "trainer" / f"checkpoint-{steps // 2}"
        model = train(steps // 2 + 8, str(saved))
        return {"losses": losses.losses, "in_force": losses.in_force, "state": told(model)}


def _parallelize(model: Any, device_mesh: Any) -> Any:
    mesh = device_mesh["data_parallel"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)
    return tuned(model)


def fabric(folder: Path, steps: int) -> dict[str, Any]:
    """Lightning Fabric's ModelParallelStrategy, saved and loaded in the midst."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        parallelize_fn=_parallelize, data_parallel_size=2, tensor_parallel_size=1
    )
    made = Fabric(strategy=strategy, **DEVICES)
    made.launch()
    model: Any = made.setup_module(Net())
    optimizer: Any = made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses, state = Losses(), {"model": model, "optimizer": optimizer}

    def train(first: int, end: int) -> None:
        for step in range(first, end):
            is_last = step % 2 == 1
            with made.no_backward_sync(model, enabled=not is_last):
                inputs, targets = (made.to_device(each) for each in batch(step))
                loss = nn.functional.mse_loss(model(inputs), targets)
                made.backward(loss)
            if is_last:
                made.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
            losses.add(loss, model.module)

    train(0, steps // 2)
    made.save(folder / "fabric", state)
    train(steps // 2, steps // 2 + 4)
    made.load(folder / "fabric", state)
    train(steps // 2, steps)
    return {"losses": losses.losses, "in_force": losses.in_force, "state": told(model.module)}


def lightning(folder: Path, steps: int) -> dict[str, Any]:
    """Lightning's Trainer with ModelParallelStrategy, and validation."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses = Losses()

    class Module(LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = Net()
                _parallelize(self.net, self.device_mesh)

        def training_step(self, rows: Any, _: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(rows), 2 * rows[:, :3])
            losses.add(loss, self.net)
            return loss

        def validation_step(self, rows: Any, _: int) -> None:
            losses.losses.append(nn.functional.mse_loss(self.net(rows), rows[:, :3]).item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    rows = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True
    )
    trainer = Trainer(
        strategy=strategy,
        **DEVICES,
        max_steps=steps // 2,
        val_check_interval=10,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(folder / "saved")
    return {"losses": losses.losses, "in_force": losses.in_force, "state": told(module.net)}


FRAMEWORKS = {
    "accelerate": accelerate,
    "trainer": trainer,
    "fabric": fabric,
    "lightning": lightning,
}


def main() -> None:
    global tunes
    folder, steps, frameworks = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if IS_SHARED:
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_NET": "Socket", "LOCAL_RANK": "0"}
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    for framework in frameworks:
        if framework == "tune":
            tunes = True
            continue
        torch.manual_seed(0)
        name = f"{framework}-tuned" if tunes else framework
        (folder / name).mkdir(exist_ok=True)
        found = FRAMEWORKS[framework](folder / name, steps)
        (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(found))
        gc.collect()  # A model that is gone does not keep the next one from being tuned.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
