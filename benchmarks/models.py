"""The models of the benchmarks: gradient lists without the computing, and real ones for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Shape = tuple[int, ...]


def resnet50_shapes() -> list[Shape]:
    """The 161 parameters of ResNet-50 in torchvision's order (He et al. 2016, table 1)."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            convolutions = [
                (width, inputs, 1, 1),
                (width, width, 3, 3),
                (outputs, width, 1, 1),
            ]
            if block == 0:
                convolutions.append((outputs, inputs, 1, 1))
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            inputs = outputs
    return [*shapes, (1000, 2048), (1000,)]


def bert_base_shapes() -> list[Shape]:
    """The 199 parameters of BERT-base with its pooler (Devlin et al. 2019)."""
    width, norm = 768, [(768,), (768,)]
    shapes: list[Shape] = [(30522, width), (512, width), (2, width), *norm]
    for _ in range(12):
        shapes += [(width, width), (width,)] * 4 + norm
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), *norm]
    return [*shapes, (width, width), (width,)]


class _GiveGradient(torch.autograd.Function):
    """Passes a value through; in the backward pass gives the parameter a gradient of its size."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (parameter,) = ctx.saved_tensors
        return gradient, torch.full_like(parameter, 1e-3)


class GradientList(nn.Module):
    """Parameters of the given shapes; gradients come one by one, the last parameter's first.

    Args:
        like: share this one's memory: values do not matter, only gradients do.
    """

    def __init__(self, shapes: list[Shape], like: GradientList | None = None) -> None:
        super().__init__()
        self.values = nn.ParameterList(
            torch.zeros(shape) if like is None else like.values[index].detach()
            for index, shape in enumerate(shapes)
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for parameter in self.values:
            value = _GiveGradient.apply(value, parameter)
        return value


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

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = 64
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for block in range(blocks):
                stride = 2 if block == 0 and width > 64 else 1
                layers.append(_Bottleneck(inputs, width, stride))
                inputs = 4 * width
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
        self.layers = nn.Sequential(*layers, *pool)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(images), labels)

    @staticmethod
    def batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(size, 3, 224, 224, device=device)
        labels = torch.randint(1000, (size,), device=device)
        return images.contiguous(memory_format=torch.channels_last), labels


class GPT2Small(nn.Module):
    """A decoder of GPT-2 small's size, tied embedding; gives the loss of a batch of tokens."""

    VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 50257, 1024, 768, 12, 12

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        layer = nn.TransformerEncoderLayer(
            self.WIDTH,
            self.HEADS,
            4 * self.WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
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
