"""The models that compute on a CUDA device, at their full size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(values) + self.shortcut(values), inplace=True)


class ResNet50(nn.Module):
    """ResNet-50 on images of 224 x 224; gives the loss of a batch (images, labels)."""

    SIDE = 224
    STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
    """Width and number of blocks."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = 64
        for width, blocks in self.STAGES:
            for block in range(blocks):
                stride = 2 if block == 0 and width > 64 else 1
                layers.append(_Bottleneck(inputs, width, stride))
                inputs = 4 * width
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
        self.layers = nn.Sequential(*layers, *pool)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(images), labels)

    @classmethod
    def batch(cls, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(size, 3, cls.SIDE, cls.SIDE, device=device)
        labels = torch.randint(1000, (size,), device=device)
        return images.contiguous(memory_format=torch.channels_last), labels


class VGG16(nn.Module):
    """VGG16 (Simonyan and Zisserman 2015, configuration D); gives the loss of (images, labels)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        layers.append(nn.Flatten())
        for features, outputs in ((512 * 49, 4096), (4096, 4096)):
            layers += [nn.Linear(features, outputs), nn.ReLU(inplace=True), nn.Dropout()]
        self.layers = nn.Sequential(*layers, nn.Linear(4096, 1000))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(images), labels)

    batch = ResNet50.batch


def _transformer_layer(width: int, heads: int, norm_first: bool) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        width,
        heads,
        4 * width,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=norm_first,
    )


class BertBase(nn.Module):
    """An encoder of BERT-base's size with its pre-training heads, tied embedding; gives the loss
    of a batch of tokens, all of them masked, and of which of two sentences comes first."""

    VOCABULARY, CONTEXT, SEQUENCE, WIDTH, LAYERS, HEADS = 30522, 512, 384, 768, 12, 12

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        self.sentences = nn.Embedding(2, self.WIDTH)
        self.norm = nn.LayerNorm(self.WIDTH)
        layer = _transformer_layer(self.WIDTH, self.HEADS, norm_first=False)
        self.body = nn.TransformerEncoder(layer, self.LAYERS, enable_nested_tensor=False)
        self.pooler = nn.Linear(self.WIDTH, self.WIDTH)
        self.transform = nn.Sequential(
            nn.Linear(self.WIDTH, self.WIDTH), nn.GELU(), nn.LayerNorm(self.WIDTH)
        )
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY)
        self.head.weight = self.tokens.weight
        self.order = nn.Linear(self.WIDTH, 2)

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, order: torch.Tensor
    ) -> torch.Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        sentences = (positions >= inputs.shape[1] // 2).long()
        values = self.tokens(inputs) + self.positions(positions) + self.sentences(sentences)
        values = self.body(self.norm(values))
        logits = self.head(self.transform(values))
        ordered = self.order(self.pooler(values[:, 0]).tanh())
        words = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return words + F.cross_entropy(ordered, order)

    @classmethod
    def batch(cls, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(cls.VOCABULARY, (2, size, cls.SEQUENCE), device=device)
        return tokens[0], tokens[1], torch.randint(2, (size,), device=device)


class GPT2Small(nn.Module):
    """A decoder of GPT-2 small's size, tied embedding; gives the loss of a batch of tokens."""

    VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 50257, 1024, 768, 12, 12

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        layer = _transformer_layer(self.WIDTH, self.HEADS, norm_first=True)
        self.body = nn.TransformerEncoder(
            layer, self.LAYERS, nn.LayerNorm(self.WIDTH), enable_nested_tensor=False
        )
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        positions = torch.arange(length, device=inputs.device)
        values = self.tokens(inputs) + self.positions(positions)
        logits = self.head(self.body(values, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @classmethod
    def batch(cls, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(cls.VOCABULARY, (size, cls.CONTEXT + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]


class GPT2Medium(GPT2Small):
    """The same at the size of GPT-2 medium."""

    WIDTH, LAYERS, HEADS = 1024, 24, 16


class GPT2XL(GPT2Small):
    """The same at the size of GPT-2 XL: 1.6 billion parameters."""

    WIDTH, LAYERS, HEADS = 1600, 48, 25


class GPT2Tiny(GPT2Small):
    """The same at a size that a processor computes, to see that every part of a benchmark works."""

    VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 512, 16, 256, 4, 4


class ViTBase(nn.Module):
    """ViT-B/16 by transformers, its default; gives the loss of a batch (images, labels)."""

    def __init__(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        self.model = ViTForImageClassification(ViTConfig(num_labels=1000))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(pixel_values=images, labels=labels).loss
        return loss

    batch = ResNet50.batch


class T5Base(nn.Module):
    """T5-base by transformers; gives the loss of a batch of sequences and what they become."""

    # Texts of which spans are left out, and these spans, as in its training (Raffel et al. 2020).
    VOCABULARY, READ, WRITTEN = 32128, 512, 114

    def __init__(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        size = T5Config(
            d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
        )
        self.model = T5ForConditionalGeneration(size)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=inputs, labels=targets).loss
        return loss

    @classmethod
    def batch(cls, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randint(cls.VOCABULARY, (size, cls.READ), device=device)
        return inputs, torch.randint(cls.VOCABULARY, (size, cls.WRITTEN), device=device)


Model = ResNet50 | VGG16 | BertBase | GPT2Small | ViTBase | T5Base
# With the samples of each rank in a step: about 30, 20, 55 and 110 ms of computing on an H200; of
# the last two 85 and 182 where two ranks share one.
MODELS: dict[str, tuple[type[Model], int]] = {
    "resnet50": (ResNet50, 128),
    "vgg16": (VGG16, 64),
    "bert-base": (BertBase, 32),
    "gpt2-small": (GPT2Small, 22),
    "vit-base": (ViTBase, 96),
    "t5-base": (T5Base, 16),
}


class ComputingTraining:
    """A published model with bfloat16 products and float32 gradients, trained on random data."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in MODELS:
            raise ValueError(f"no workload {name} on {device.type}; there are {', '.join(MODELS)}")
        self._kind, self._batch = MODELS[name]
        self._device = device

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self._device:  # a processor would take seconds to draw the values of each model
            model = self._kind()
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        inputs = self._kind.batch(self._batch, self._device)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                loss = wrapped(*inputs)
            loss.backward()
            optimizer.step()

        return step
