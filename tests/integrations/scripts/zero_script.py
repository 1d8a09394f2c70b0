"""A training script that knows nothing of us, and trains by DeepSpeed, also in a framework.

python zero_script.py FOLDER STEPS FRAMEWORK...

Each rank writes its losses, its weights and what was in force to FOLDER/FRAMEWORK-RANK.json. Of the
frameworks that follow the word ``tune`` the program has the engines tuned by itself, and writes to
FOLDER/FRAMEWORK-tuned-RANK.json. On a GPU that two ranks share they are two hosts, as NCCL sees it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ON_GPU = os.environ.get("DS_ACCELERATOR") != "cpu"
WIDTH, STEP_SECONDS = 16, 0.02
tunes = False


def tuned(engine: Any) -> Any:
    """By the program itself."""
    if not tunes:
        return engine
    import bagua_client

    return bagua_client.tune(engine)


class Losses:
    """Of each step, and what was in force in it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.in_force: list[str] = []

    def add(self, loss: float, engine: Any) -> None:
        self.losses.append(loss)
        word = str(engine.configuration) if hasattr(engine, "configuration") else ""
        if word and word not in self.in_force:
            self.in_force.append(word)
        time.sleep(STEP_SECONDS)

    def told(self, engine: Any) -> dict[str, Any]:
        import deepspeed

        state = {}
        for name, value in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([value]):
                state[name] = value.detach().float().flatten().tolist()
        return {"losses": self.losses, "in_force": self.in_force, "state": state}


def zero(stage: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"reduce_bucket_size": 700, "overlap_comm": stage > 1}
    if stage == 3:
        sizes |= {"stage3_prefetch_bucket_size": 300, "stage3_param_persistence_threshold": 10}
    return {"zero_optimization": {"stage": stage, **sizes}, "zero_allow_untested_optimizer": True}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(4, WIDTH, generator=generator).to(device)
    return inputs, 2 * inputs[:, :3]


def by_itself(folder: Path, steps: int, stage: int) -> dict[str, Any]:
    """Saved and loaded in the midst."""
    import deepspeed

    model, losses = net(), Losses()
    config = {"train_micro_batch_size_per_gpu": 4, **zero(stage)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = tuned(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])

    def train(first: int, end: int) -> None:
        for step in range(first, end):
            inputs, targets = batch(step, engine.device)
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.add(loss.item(), engine)

    train(0, steps // 2)
    engine.save_checkpoint(str(folder / "saved"))
    train(steps // 2, steps // 2 + 4)
    engine.load_checkpoint(str(folder / "saved"))
    train(steps // 2, steps)
    found = losses.told(engine)
    engine.destroy()
    return found


def accelerate(folder: Path, steps: int, stage: int) -> dict[str, Any]:
    """With accumulation and clipping."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        **zero(stage),
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model, losses = net(), Losses()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, optimizer = accelerator.prepare(model, optimizer)
    engine = tuned(engine)
    for step in range(2 * steps):  # Two of these are a step of the optimizer.
        with accelerator.accumulate(engine):
            inputs, targets = batch(step, engine.device)
            loss = nn.functional.mse_loss(engine(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.add(loss.item(), engine)
    found = losses.told(engine)
    engine.destroy()
    return found


def trainer(folder: Path, steps: int, stage: int) -> dict[str, Any]:
    """The Trainer of transformers, which evaluates and saves."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    losses = Losses()

    class Seen(TrainerCallback):
        trainer: Any = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            tuned(self.trainer.model_wrapped)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            losses.add(0.0, self.trainer.model_wrapped)

    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not ON_GPU,
        deepspeed={"train_micro_batch_size_per_gpu": "auto", **zero(stage)},
        save_steps=steps // 2,
        eval_strategy="steps",
        eval_steps=20,
    )
    shape = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape, **heads))
    rows = torch.randint(32, (64, 10), generator=torch.Generator().manual_seed(3))
    sentences = [{"input_ids": row, "labels": row} for row in rows]
    callback = Seen()
    made = Trainer(
        model, arguments, train_dataset=sentences, eval_dataset=sentences[:8], callbacks=[callback]
    )
    made.remove_callback(PrinterCallback)
    callback.trainer = made
    made.train()
    history = made.state.log_history
    names = ("loss", "eval_loss", "grad_norm")
    losses.losses = [float(entry[name]) for entry in history for name in names if name in entry]
    engine = made.model_wrapped
    found = losses.told(engine)
    engine.destroy()
    return found


FRAMEWORKS = {
    "zero-1": lambda folder, steps: by_itself(folder, steps, 1),
    "zero-2": lambda folder, steps: by_itself(folder, steps, 2),
    "zero-3": lambda folder, steps: by_itself(folder, steps, 3),
    "accelerate": lambda folder, steps: accelerate(folder, steps, 2),
    "trainer": lambda folder, steps: trainer(folder, steps, 3),
}


def main() -> None:
    global tunes
    folder, steps, frameworks = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    if ON_GPU:
        if torch.cuda.device_count() < 2:
            os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_NET": "Socket"}
            os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # It would compile an operation of its own for messages in shared memory, for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if ON_GPU else "gloo", verbose=False)
    for framework in frameworks:
        if framework == "tune":
            tunes = True
            continue
        torch.manual_seed(0)
        name = f"{framework}-tuned" if tunes else framework
        (folder / name).mkdir(exist_ok=True)
        found = FRAMEWORKS[framework](folder / name, steps)
        (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(found))
        gc.collect()  # An engine that is gone does not keep the next one from being tuned.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
