"""A training script that knows nothing of us: the Trainer of transformers shards its model.

python sharded_script.py FOLDER STEPS [tune]

Each rank writes its losses, its weights and what was in force to FOLDER/trainer-RANK.json. With the
word ``tune`` it trains once more, has the model tuned by itself, and writes to
FOLDER/tuned-RANK.json.
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
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

WIDTH = 16
STEP_SECONDS = 0.02
ON_GPU = torch.cuda.is_available()
IS_SHARED = ON_GPU and torch.cuda.device_count() < 2
"""Both ranks compute on one GPU, as two hosts."""
tunes = False


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

    losses: list[float] = []
    in_force: list[str] = []

    class Seen(TrainerCallback):
        trainer: Any = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            tuned(self.trainer.model_wrapped)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = seen(self.trainer.model_wrapped)
            in_force.extend(word for word in now if word not in in_force)
            time.sleep(STEP_SECONDS if now else 0)  # The service answers meanwhile.

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
        losses.extend(entry[name] for entry in history for name in names if name in entry)
        found: nn.Module = made.model_wrapped
        return found

    with as_accelerate_wants():
        train(steps // 2 + 2, None)
        saved = folder / "trainer" / f"checkpoint-{steps // 2}"
        model = train(steps // 2 + 8, str(saved))
        return {"losses": losses, "in_force": in_force, "state": told(model)}


def main() -> None:
    global tunes
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if IS_SHARED:
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_NET": "Socket", "LOCAL_RANK": "0"}
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    for name in ("trainer", "tuned") if "tune" in sys.argv else ("trainer",):
        tunes = name == "tuned"
        torch.manual_seed(0)
        (folder / name).mkdir(exist_ok=True)
        found = trainer(folder / name, steps)
        (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(found))
        gc.collect()  # A model that is gone does not keep the next one from being tuned.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
