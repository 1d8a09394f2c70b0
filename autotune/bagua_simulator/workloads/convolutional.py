"""VGG16 and ResNet-50 on images of 224 x 224, with torchvision's parameter names."""

from __future__ import annotations

from bagua_simulator.workload import Architecture, Layer

VGG16_BATCH = 32
# On a P100 at this batch 144 (https://www.tensorflow.org/performance/benchmarks, 2017), times the
# ratio of the peak float32 rates of V100 and P100, 15.7 and 10.6 TFLOP/s.
VGG16_IMAGES_PER_SECOND = 144 * 15.7 / 10.6
RESNET50_BATCH = 128
# On a V100 with mixed precision (NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, DGX-1).
RESNET50_IMAGES_PER_SECOND = 1200
# Operations of a batch normalisation for each of its values; it is bound by memory.
NORM_OPERATIONS = 10


def vgg16() -> Architecture:
    """138.4 million parameters, nine tenths of them in the last three layers (Simonyan and
    Zisserman 2015, configuration D)."""
    layers, inputs, size, position = [], 3, 224, 0
    for channels, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers.append(_convolution(f"features.{position}", inputs, channels, 3, size, True))
            inputs, position = channels, position + 2
        size, position = size // 2, position + 1
    for index, (outputs, features) in enumerate(((4096, 512 * 49), (4096, 4096), (1000, 4096))):
        layers.append(_linear(f"classifier.{3 * index}", features, outputs))
    return Architecture("vgg16", tuple(layers), VGG16_BATCH / VGG16_IMAGES_PER_SECOND)


def resnet50() -> Architecture:
    """25.6 million parameters in 161 tensors (He et al. 2016, table 1)."""
    layers = [_convolution("conv1", 3, 64, 7, 112), _norm("bn1", 64, 112)]
    inputs, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            # The first block of a stage is where the image shrinks, in its second convolution.
            before = size
            if block == 0 and stage > 1:
                size //= 2
            layers += _bottleneck(f"layer{stage}.{block}", inputs, width, before, size, block == 0)
            inputs = 4 * width
    layers.append(_linear("fc", 2048, 1000))
    return Architecture("resnet50", tuple(layers), RESNET50_BATCH / RESNET50_IMAGES_PER_SECOND)


def _bottleneck(
    name: str, inputs: int, width: int, before: int, size: int, has_shortcut: bool
) -> list[Layer]:
    layers = [
        _convolution(f"{name}.conv1", inputs, width, 1, before),
        _norm(f"{name}.bn1", width, before),
        _convolution(f"{name}.conv2", width, width, 3, size),
        _norm(f"{name}.bn2", width, size),
        _convolution(f"{name}.conv3", width, 4 * width, 1, size),
        _norm(f"{name}.bn3", 4 * width, size),
    ]
    if has_shortcut:
        layers.append(_convolution(f"{name}.downsample.0", inputs, 4 * width, 1, size))
        layers.append(_norm(f"{name}.downsample.1", 4 * width, size))
    return layers


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, size: int, has_bias: bool = False
) -> Layer:
    weight = (f"{name}.weight", (outputs, inputs, kernel, kernel))
    bias = ((f"{name}.bias", (outputs,)),) if has_bias else ()
    operations = 2.0 * inputs * outputs * kernel**2 * size**2
    return Layer((weight, *bias), operations)


def _norm(name: str, channels: int, size: int) -> Layer:
    parameters = ((f"{name}.weight", (channels,)), (f"{name}.bias", (channels,)))
    return Layer(parameters, float(NORM_OPERATIONS * channels * size**2))


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    parameters = ((f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,)))
    return Layer(parameters, 2.0 * inputs * outputs)
