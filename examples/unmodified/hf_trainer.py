"""A small GPT-2 that reads Python's documentation, trained by the Trainer of HF transformers.

    torchrun --nproc-per-node 2 -m bagua_client --autotune examples/unmodified/hf_trainer.py

Nothing in here knows of bagua_client. The text is in every Python installation. Arguments are those
of TrainingArguments, such as --max_steps 300.
"""

from __future__ import annotations

import sys
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

CONTEXT = 64


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, as numbers of characters."""

    def __init__(self) -> None:
        corpus = "\n".join(topics.values())
        self.alphabet = sorted(set(corpus))
        number_of = {character: number for number, character in enumerate(self.alphabet)}
        text = torch.tensor([number_of[character] for character in corpus])
        self.pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        usual = (
            f"--output_dir {folder} --use_cpu --max_steps 300 --logging_steps 20 --report_to none"
        )
        usual += " --save_strategy no --per_device_train_batch_size 4 --learning_rate 1e-3"
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            [*usual.split(), *sys.argv[1:]]
        )
        dataset = Text()
        config = GPT2Config(
            vocab_size=len(dataset.alphabet), n_positions=CONTEXT, n_embd=256, n_layer=6, n_head=8,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset).train()


if __name__ == "__main__":
    main()
