"""A training by the Trainer of HF transformers that recomputes its activations; nothing of ours.

    trainer.py STEPS FILE

Rank 0 writes what it came to: the losses that the Trainer has logged, and the weights in the end.
"""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

STEPS, FILE = int(sys.argv[1]), sys.argv[2]
TOKENS = 32

torch.set_num_threads(1)
set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=16, n_layer=4, n_head=2)
)
rows = torch.randint(TOKENS, (64, 10), generator=torch.Generator().manual_seed(1))
arguments = TrainingArguments(
    f"{FILE}-folder",
    gradient_checkpointing=True,
    use_cpu=True,
    max_steps=STEPS,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": x, "labels": x} for x in rows])
trainer.train()
if trainer.is_world_process_zero():
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    torch.save({"losses": losses, "weights": model.state_dict()}, FILE)
