"""BERT and GPT-2 in two sizes each, with the parameter names of Hugging Face's implementations.

In all of them the token embedding is the output layer's weight too; its gradient is complete
only when the backward pass has come to the embedding, at the very end.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_simulator.workload import Architecture, Layer

BERT_VOCABULARY, BERT_POSITIONS, BERT_SEQUENCE, BERT_BATCH = 30522, 512, 384, 7
# On a V100 of 32 GB with mixed precision at this batch (NVIDIA DeepLearningExamples, BERT-large
# on SQuAD, whose sequences have 384 tokens, DGX-1).
BERT_LARGE_SEQUENCES_PER_SECOND = 24.29
GPT2_VOCABULARY, GPT2_SEQUENCE, GPT2_BATCH = 50257, 1024, 2
BERT_LATE = ("bert.embeddings.word_embeddings.weight",)
GPT2_LATE = ("transformer.wte.weight",)
# Operations of a layer normalisation for each of its values; it is bound by memory.
NORM_OPERATIONS = 10


@dataclass(frozen=True)
class _Size:
    layers: int
    width: int


BASE, LARGE = _Size(layers=12, width=768), _Size(layers=24, width=1024)


def bert_base() -> Architecture:
    """110.1 million parameters with the pre-training heads (Devlin et al. 2019)."""
    layers = _bert_layers(BASE)
    return Architecture("bert-base", tuple(layers), _seconds(layers, BERT_BATCH), BERT_LATE)


def bert_large() -> Architecture:
    """336.2 million parameters with the pre-training heads (Devlin et al. 2019)."""
    seconds = BERT_BATCH / BERT_LARGE_SEQUENCES_PER_SECOND
    return Architecture("bert-large", tuple(_bert_layers(LARGE)), seconds, BERT_LATE)


def gpt2_small() -> Architecture:
    """124.4 million parameters (Radford et al. 2019)."""
    return _gpt2("gpt2-small", BASE)


def gpt2_medium() -> Architecture:
    """354.8 million parameters (Radford et al. 2019)."""
    return _gpt2("gpt2-medium", LARGE)


def _gpt2(name: str, size: _Size) -> Architecture:
    layers = _gpt2_layers(size)
    return Architecture(name, tuple(layers), _seconds(layers, GPT2_BATCH), GPT2_LATE)


def _seconds(layers: list[Layer], batch: int) -> float:
    """The length of a step at the operations per second of BERT-large: no published throughputs of
    the others on a V100 under the same conditions were found."""
    operations_per_second = _operations(_bert_layers(LARGE)) * BERT_LARGE_SEQUENCES_PER_SECOND
    return batch * _operations(layers) / operations_per_second


def _bert_layers(size: _Size) -> list[Layer]:
    tokens, width = BERT_SEQUENCE, size.width
    root = "bert.embeddings"
    embeddings = (
        (f"{root}.word_embeddings.weight", (BERT_VOCABULARY, width)),
        (f"{root}.position_embeddings.weight", (BERT_POSITIONS, width)),
        (f"{root}.token_type_embeddings.weight", (2, width)),
    )
    layers = [Layer(embeddings, float(tokens * width)), _norm(f"{root}.LayerNorm", width, tokens)]
    for index in range(size.layers):
        name = f"bert.encoder.layer.{index}"
        layers += [
            _linear(f"{name}.attention.self.query", width, width, tokens),
            _linear(f"{name}.attention.self.key", width, width, tokens),
            _linear(f"{name}.attention.self.value", width, width, tokens),
            _attention(width, tokens),
            _linear(f"{name}.attention.output.dense", width, width, tokens),
            _norm(f"{name}.attention.output.LayerNorm", width, tokens),
            _linear(f"{name}.intermediate.dense", width, 4 * width, tokens),
            _linear(f"{name}.output.dense", 4 * width, width, tokens),
            _norm(f"{name}.output.LayerNorm", width, tokens),
        ]
    head = "cls.predictions"
    return [
        *layers,
        _linear("bert.pooler.dense", width, width, 1),
        _linear(f"{head}.transform.dense", width, width, tokens),
        _norm(f"{head}.transform.LayerNorm", width, tokens),
        Layer(((f"{head}.bias", (BERT_VOCABULARY,)),), 2.0 * tokens * width * BERT_VOCABULARY),
        _linear("cls.seq_relationship", width, 2, 1),
    ]


def _gpt2_layers(size: _Size) -> list[Layer]:
    tokens, width = GPT2_SEQUENCE, size.width
    embeddings = (
        ("transformer.wte.weight", (GPT2_VOCABULARY, width)),
        ("transformer.wpe.weight", (GPT2_SEQUENCE, width)),
    )
    layers = [Layer(embeddings, float(tokens * width))]
    for index in range(size.layers):
        name = f"transformer.h.{index}"
        layers += [
            _norm(f"{name}.ln_1", width, tokens),
            _linear(f"{name}.attn.c_attn", width, 3 * width, tokens),
            _attention(width, tokens),
            _linear(f"{name}.attn.c_proj", width, width, tokens),
            _norm(f"{name}.ln_2", width, tokens),
            _linear(f"{name}.mlp.c_fc", width, 4 * width, tokens),
            _linear(f"{name}.mlp.c_proj", 4 * width, width, tokens),
        ]
    output = Layer((), 2.0 * tokens * width * GPT2_VOCABULARY)
    return [*layers, _norm("transformer.ln_f", width, tokens), output]


def _operations(layers: list[Layer]) -> float:
    return sum(layer.operations for layer in layers)


def _linear(name: str, inputs: int, outputs: int, tokens: int) -> Layer:
    parameters = ((f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,)))
    return Layer(parameters, 2.0 * inputs * outputs * tokens)


def _attention(width: int, tokens: int) -> Layer:
    """Scores and weighted values: two products of tokens x tokens x width."""
    return Layer((), 4.0 * tokens**2 * width)


def _norm(name: str, width: int, tokens: int) -> Layer:
    parameters = ((f"{name}.weight", (width,)), (f"{name}.bias", (width,)))
    return Layer(parameters, float(NORM_OPERATIONS * tokens * width))
