"""BERT-large and GPT-2 medium, with the parameter names of Hugging Face's implementations.

In both the token embedding is the output layer's weight too; its gradient is complete only when
the backward pass has come to the embedding, at the very end.
"""

from __future__ import annotations

from bagua_autotune.simulation.workload import Layer, Workload, from_layers

LAYERS, WIDTH = 24, 1024
BERT_VOCABULARY, BERT_POSITIONS, BERT_SEQUENCE, BERT_BATCH = 30522, 512, 384, 7
# On a V100 of 32 GB with mixed precision at this batch (NVIDIA DeepLearningExamples, BERT-large
# on SQuAD, whose sequences have 384 tokens, DGX-1).
BERT_SEQUENCES_PER_SECOND = 24.29
GPT2_VOCABULARY, GPT2_SEQUENCE, GPT2_BATCH = 50257, 1024, 2
# Operations of a layer normalisation for each of its values; it is bound by memory.
NORM_OPERATIONS = 10


def bert_large() -> Workload:
    """336.2 million parameters with the pre-training heads (Devlin et al. 2019)."""
    return from_layers(
        "bert-large",
        _bert_layers(),
        BERT_BATCH / BERT_SEQUENCES_PER_SECOND,
        late=["bert.embeddings.word_embeddings.weight"],
    )


def gpt2_medium() -> Workload:
    """354.8 million parameters (Radford et al. 2019), at as many operations per second as
    BERT-large reaches: no published throughput of this size on a V100 was found."""
    operations_per_second = _operations(_bert_layers()) * BERT_SEQUENCES_PER_SECOND
    layers = _gpt2_layers()
    compute_seconds = GPT2_BATCH * _operations(layers) / operations_per_second
    return from_layers("gpt2-medium", layers, compute_seconds, late=["transformer.wte.weight"])


def _bert_layers() -> list[Layer]:
    tokens = BERT_SEQUENCE
    root = "bert.embeddings"
    embeddings = (
        (f"{root}.word_embeddings.weight", (BERT_VOCABULARY, WIDTH)),
        (f"{root}.position_embeddings.weight", (BERT_POSITIONS, WIDTH)),
        (f"{root}.token_type_embeddings.weight", (2, WIDTH)),
    )
    layers = [Layer(embeddings, float(tokens * WIDTH)), _norm(f"{root}.LayerNorm", tokens)]
    for index in range(LAYERS):
        name = f"bert.encoder.layer.{index}"
        layers += [
            _linear(f"{name}.attention.self.query", WIDTH, WIDTH, tokens),
            _linear(f"{name}.attention.self.key", WIDTH, WIDTH, tokens),
            _linear(f"{name}.attention.self.value", WIDTH, WIDTH, tokens),
            _attention(tokens),
            _linear(f"{name}.attention.output.dense", WIDTH, WIDTH, tokens),
            _norm(f"{name}.attention.output.LayerNorm", tokens),
            _linear(f"{name}.intermediate.dense", WIDTH, 4 * WIDTH, tokens),
            _linear(f"{name}.output.dense", 4 * WIDTH, WIDTH, tokens),
            _norm(f"{name}.output.LayerNorm", tokens),
        ]
    head = "cls.predictions"
    return [
        *layers,
        _linear("bert.pooler.dense", WIDTH, WIDTH, 1),
        _linear(f"{head}.transform.dense", WIDTH, WIDTH, tokens),
        _norm(f"{head}.transform.LayerNorm", tokens),
        Layer(((f"{head}.bias", (BERT_VOCABULARY,)),), 2.0 * tokens * WIDTH * BERT_VOCABULARY),
        _linear("cls.seq_relationship", WIDTH, 2, 1),
    ]


def _gpt2_layers() -> list[Layer]:
    tokens = GPT2_SEQUENCE
    embeddings = (
        ("transformer.wte.weight", (GPT2_VOCABULARY, WIDTH)),
        ("transformer.wpe.weight", (GPT2_SEQUENCE, WIDTH)),
    )
    layers = [Layer(embeddings, float(tokens * WIDTH))]
    for index in range(LAYERS):
        name = f"transformer.h.{index}"
        layers += [
            _norm(f"{name}.ln_1", tokens),
            _linear(f"{name}.attn.c_attn", WIDTH, 3 * WIDTH, tokens),
            _attention(tokens),
            _linear(f"{name}.attn.c_proj", WIDTH, WIDTH, tokens),
            _norm(f"{name}.ln_2", tokens),
            _linear(f"{name}.mlp.c_fc", WIDTH, 4 * WIDTH, tokens),
            _linear(f"{name}.mlp.c_proj", 4 * WIDTH, WIDTH, tokens),
        ]
    output = Layer((), 2.0 * tokens * WIDTH * GPT2_VOCABULARY)
    return [*layers, _norm("transformer.ln_f", tokens), output]


def _operations(layers: list[Layer]) -> float:
    return sum(layer.operations for layer in layers)


def _linear(name: str, inputs: int, outputs: int, tokens: int) -> Layer:
    parameters = ((f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,)))
    return Layer(parameters, 2.0 * inputs * outputs * tokens)


def _attention(tokens: int) -> Layer:
    """Scores and weighted values: two products of tokens x tokens x width."""
    return Layer((), 4.0 * tokens**2 * WIDTH)


def _norm(name: str, tokens: int) -> Layer:
    parameters = ((f"{name}.weight", (WIDTH,)), (f"{name}.bias", (WIDTH,)))
    return Layer(parameters, float(NORM_OPERATIONS * tokens * WIDTH))
