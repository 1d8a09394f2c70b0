"""Trainings by the Trainer of HF transformers, of models made from a configuration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.integrations.arms import Run, Trained
from tests.integrations.trainings.accelerate_loops import forget_state
from tests.integrations.trainings.recuts import Recuts

TOKENS = 32


class _Between(TrainerCallback):
    """Sees the wrapper before its first step, and the end of each backward pass."""

    def __init__(self, recuts: Recuts) -> None:
        self.trainer: Trainer | None = None
        self._recuts = recuts

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self._recuts.wrapped(self.trainer.model_wrapped)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._recuts.stepped()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._recuts.stepped()


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def _gpt2() -> PreTrainedModel:
    """Its first and its last layer share their weights, and it has dropout."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def _sentences(rows: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in torch.randint(TOKENS, (rows, 10))]


def _train(
    run: Run, model: PreTrainedModel, max_steps: int, resume: str | None = None, **options: Any
) -> Trained:
    forget_state()
    recuts = Recuts(run)
    between = _Between(recuts)
    # What the Trainer logs is of all ranks.
    losses: list[float] = []
    model.register_forward_hook(lambda _, __, output: losses.append(float(output["loss"])))
    arguments = TrainingArguments(
        run.folder,
        use_cpu=True,
        max_steps=max_steps * run.times,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=_sentences(40),
        eval_dataset=_sentences(8),
        callbacks=[between],
    )
    trainer.remove_callback(PrinterCallback)
    between.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return recuts.trained(
        trainer.accelerator.unwrap_model(trainer.model), losses + _logged(trainer)
    )


def _logged(trainer: Trainer) -> list[float]:
    names = "loss", "eval_loss", "grad_norm"
    entries = trainer.state.log_history
    return [entry[name] for entry in entries for name in names if name in entry]


def default(run: Run) -> Trained:
    """As the Trainer wraps unasked: with find_unused_parameters; gradients are clipped."""
    return _train(run, _gpt2(), 12, eval_strategy="steps", eval_steps=5)


def accumulation(run: Run) -> Trained:
    return _train(
        run, _llama(), 7, bf16=True, ddp_find_unused_parameters=False, gradient_accumulation_steps=3
    )


def resumed(run: Run) -> Trained:
    """Activations are computed twice; the training ends, and another one goes on from there."""
    options: dict[str, Any] = {
        "gradient_checkpointing": True,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    _train(run, _llama(), 6, **options)
    return _train(run, _llama(), 14, f"{run.folder}/checkpoint-4", **options)
