"""Training steps to measure: four ConvNets, a U-Net, three transformers and an LSTM, as modules that return their loss.

The ConvNets follow the tables of their papers, with batch normalization and without auxiliary classifiers; the
transformers are Hugging Face's own, built from small configurations. Nothing is downloaded, weights and batches are
random. Images and widths are such that a step takes about a second on two cores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

NUM_CLASSES = 1000
VOCABULARY = 4096
LENGTH = 128
"""Tokens per text for the transformers."""
NUM_STEPS = 24
"""Tokens per text for the LSTM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model to train, its batches, and where people would checkpoint it."""

    name: str
    """The name, as papers write it."""
    make: Callable[[], nn.Module]
    """Makes a new module; ``forward(*batch)`` returns the loss, a scalar."""
    make_batch: Callable[[int], tuple[torch.Tensor, ...]]
    """Makes random tensors for a number of samples."""
    batch: int
    """Samples per step that suit a CPU with two cores."""
    blocks: Callable[[nn.Module], list[tuple[nn.Module, str]]]
    """Returns ``(parent, name of the child)`` of every module that activation checkpointing per block wraps."""
    block: str
    """A description of a block."""


def make(name: str, batch: int | None = None) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the module and a batch of ``WORKLOADS[name]``, on the CPU and the same every time."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    module = workload.make()
    return module, workload.make_batch(workload.batch if batch is None else batch)


def checkpointed(workload: Workload, module: nn.Module) -> nn.Module:
    """Return ``module`` itself, with each of the workload's blocks recomputed in backward.

    Loss and gradients stay the same; running statistics of batch normalization in a block are updated twice a step.
    """
    for parent, name in workload.blocks(module):
        setattr(parent, name, Checkpointed(parent.get_submodule(name)))
    return module


class Checkpointed(nn.Module):
    """A block that saves only its inputs for backward."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the block."""
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


class Classifier(nn.Module):
    """Mean cross entropy of a model's scores, ``[batch, classes, ...]``, and labels, ``[batch, ...]``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return functional.cross_entropy(self.model(inputs), labels)


class HuggingFace(nn.Module):
    """A Hugging Face model, with the loss that it computes itself."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        loss: torch.Tensor = self.model(inputs, labels=labels).loss
        return loss


def convolution(inputs: int, outputs: int, size: int, *, stride: int = 1) -> list[nn.Module]:
    """Return convolution and batch normalization; the image keeps its size at stride 1."""
    layer = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


def activated(inputs: int, outputs: int, size: int, *, stride: int = 1) -> list[nn.Module]:
    """Return convolution, batch normalization and ReLU."""
    return [*convolution(inputs, outputs, size, stride=stride), nn.ReLU(inplace=True)]


def vgg16(image: int) -> nn.Module:
    """Return configuration D of Simonyan and Zisserman, arXiv:1409.1556, table 1."""
    stages = nn.Sequential()
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        widths = [inputs] + [width] * depth
        layers = [layer for pair in pairwise(widths) for layer in activated(*pair, 3)]
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        inputs = width
    head = nn.Sequential(nn.Flatten())
    for features in (512 * (image // 32) ** 2, 4096):
        head.extend([nn.Linear(features, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)])
    return Classifier(nn.Sequential(stages, head.append(nn.Linear(4096, NUM_CLASSES))))


class Bottleneck(nn.Module):
    """Three convolutions with a shortcut; the 3 x 3 one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.residual = nn.Sequential(
            *activated(inputs, width, 1), *activated(width, width, 3, stride=stride), *convolution(width, 4 * width, 1)
        )
        is_same = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*convolution(inputs, 4 * width, 1, stride=stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, inputs, height, width]`` to ``[batch, 4 * width, height / stride, width / stride]``."""
        return functional.relu(self.residual(x) + self.shortcut(x), inplace=True)


def resnet50() -> nn.Module:
    """Return the ResNet-50 of He et al., arXiv:1512.03385, table 1."""
    blocks = nn.Sequential()
    inputs = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            blocks.append(Bottleneck(inputs, width, 1 if index else stride))
            inputs = 4 * width
    stem = nn.Sequential(*activated(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
    return Classifier(nn.Sequential(stem, blocks, pooled_head(inputs)))


def pooled_head(features: int, dropout: float = 0.0) -> nn.Sequential:
    """Return a head that computes scores from the mean over the image."""
    last = nn.Linear(features, NUM_CLASSES)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *([nn.Dropout(dropout)] if dropout else []), last)


class DenseLayer(nn.Sequential):
    """New features from all earlier ones, which it concatenates itself: a checkpoint then saves them only once."""

    def __init__(self, inputs: int, growth: int):
        super().__init__(
            *(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)),
            *activated(inputs, 4 * growth, 1),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, *features: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Map tensors ``[batch, any, height, width]`` to ``[batch, growth, height, width]``."""
        return super().forward(torch.cat(features, dim=1))


class DenseBlock(nn.Module):
    """Layers that each read the features of all earlier ones."""

    def __init__(self, inputs: int, num_layers: int, growth: int):
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + index * growth, growth) for index in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, inputs, height, width]`` to ``[batch, inputs + num_layers * growth, height, width]``."""
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, dim=1)


def densenet121() -> nn.Module:
    """Return DenseNet-BC with growth 32 and compression 1/2: Huang et al., arXiv:1608.06993, table 1."""
    stem = nn.Sequential(*activated(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
    layers: list[nn.Module] = []
    width = 64
    for num_layers in (6, 12, 24, 16):
        if layers:
            norm = (nn.BatchNorm2d(width), nn.ReLU(inplace=True))
            width //= 2
            layers.append(nn.Sequential(*norm, nn.Conv2d(2 * width, width, 1, bias=False), nn.AvgPool2d(2)))
        layers.append(DenseBlock(width, num_layers, 32))
        width += num_layers * 32
    return Classifier(
        nn.Sequential(stem, *layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True), pooled_head(width)),
    )


class Inception(nn.Module):
    """Four parallel branches: 1 x 1, 3 x 3, 5 x 5 and pooling."""

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int):
        super().__init__()
        self.branches = nn.ModuleList(
            [
                nn.Sequential(*activated(inputs, one, 1)),
                nn.Sequential(*activated(inputs, three[0], 1), *activated(*three, 3)),
                nn.Sequential(*activated(inputs, five[0], 1), *activated(*five, 5)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), *activated(inputs, pool, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, inputs, height, width]`` to ``[batch, sum of the branches, height, width]``."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def googlenet() -> nn.Module:
    """Return Szegedy et al., arXiv:1409.4842, table 1, with batch normalization for local response normalization."""
    stages = [
        [(192, 64, (96, 128), (16, 32), 32), (256, 128, (128, 192), (32, 96), 64)],
        [
            (480, 192, (96, 208), (16, 48), 64),
            (512, 160, (112, 224), (24, 64), 64),
            (512, 128, (128, 256), (24, 64), 64),
            (512, 112, (144, 288), (32, 64), 64),
            (528, 256, (160, 320), (32, 128), 128),
        ],
        [(832, 256, (160, 320), (32, 128), 128), (832, 384, (192, 384), (48, 128), 128)],
    ]
    stem = nn.Sequential(*activated(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
    stem.extend([*activated(64, 64, 1), *activated(64, 192, 3)])
    body = nn.Sequential()
    for stage in stages:
        body.extend([nn.MaxPool2d(3, stride=2, padding=1), *(Inception(*widths) for widths in stage)])
    return Classifier(nn.Sequential(stem, body, pooled_head(1024, dropout=0.4)))


class UNet(nn.Module):
    """Ronneberger et al., arXiv:1505.04597, figure 1, with padding and batch normalization; ``width`` is 64 there."""

    def __init__(self, width: int, num_classes: int = 2):
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(nn.Sequential(*double(*pair)) for pair in pairwise([3, *widths]))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[3::-1])
        self.up = nn.ModuleList(nn.Sequential(*double(2 * width, width)) for width in widths[3::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 3, height, width]`` to scores of each pixel, ``[batch, num_classes, height, width]``."""
        skipped: list[torch.Tensor] = []
        for level, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if level else x)
            skipped.append(x)
        skipped.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skipped.pop(), grow(x)], dim=1))
        return self.head(x)


def double(inputs: int, outputs: int) -> list[nn.Module]:
    """Return one level of the U-Net: two convolutions."""
    return [*activated(inputs, outputs, 3), *activated(outputs, outputs, 3)]


class TimeStep(nn.Module):
    """One step in time of stacked LSTM cells, with dropout between layers but not in time (arXiv:1409.2329)."""

    def __init__(self, width: int, num_layers: int):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(num_layers))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Map ``x`` and each layer's hidden and cell state, all ``[batch, width]``, to the same one step later."""
        after: list[torch.Tensor] = []
        for cell, hidden, memory in zip(self.cells, states[::2], states[1::2], strict=True):
            after += cell(self.dropout(x), (hidden, memory))
            x = after[-2]
        return self.dropout(x), *after


class LSTM(nn.Module):
    """A language model, unrolled in time."""

    def __init__(self, width: int, num_layers: int):
        super().__init__()
        self.width, self.num_states = width, 2 * num_layers
        self.token = nn.Embedding(VOCABULARY, width)
        self.step = TimeStep(width, num_layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, length]`` to scores, ``[batch, vocabulary, length]``."""
        states = [torch.zeros(len(tokens), self.width, device=tokens.device)] * self.num_states
        outputs: list[torch.Tensor] = []
        for x in self.token(tokens).unbind(1):
            output, *states = self.step(x, *states)
            outputs.append(output)
        return self.head(torch.stack(outputs, dim=1)).transpose(1, 2)


def vit() -> nn.Module:
    """Return Hugging Face's ViT, with the paper's dropout for ImageNet; the default configuration has none."""
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
    config = transformers.ViTConfig(
        **sizes,
        image_size=96,
        patch_size=8,
        num_labels=NUM_CLASSES,
        hidden_dropout_prob=0.1,
        attn_implementation="sdpa",
    )
    return HuggingFace(transformers.ViTForImageClassification(config))


def bert() -> nn.Module:
    """Return Hugging Face's BERT, for masked language modeling."""
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
    config = transformers.BertConfig(
        **sizes, max_position_embeddings=LENGTH, vocab_size=VOCABULARY, attn_implementation="sdpa"
    )
    return HuggingFace(transformers.BertForMaskedLM(config))


def gpt2() -> nn.Module:
    """Return Hugging Face's GPT-2, for language modeling."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=256,
        n_layer=6,
        n_head=4,
        n_positions=LENGTH,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # its default, but if unset it warns, and a warning breaks the graph
    return HuggingFace(model)


def images(size: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return a maker of batches of square images and their classes."""
    return lambda batch: (torch.randn(batch, 3, size, size), torch.randint(NUM_CLASSES, (batch,)))


def pixels(size: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return a maker of batches of square images with one of two classes for each pixel."""
    return lambda batch: (torch.randn(batch, 3, size, size), torch.randint(2, (batch, size, size)))


def texts(batch: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, and the same as labels: the model shifts them itself."""
    tokens = torch.randint(VOCABULARY, (batch, LENGTH))
    return tokens, tokens.clone()


def masked_texts(batch: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, every seventh of them masked, and labels with the masked tokens."""
    tokens = torch.randint(1, VOCABULARY, (batch, LENGTH))
    is_masked = torch.arange(LENGTH) % 7 == 3
    return tokens.masked_fill(is_masked, 0), tokens.masked_fill(~is_masked, -100)


def next_tokens(batch: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, and the tokens that follow them."""
    tokens = torch.randint(VOCABULARY, (batch, NUM_STEPS + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def children(*paths: str) -> Callable[[nn.Module], list[tuple[nn.Module, str]]]:
    """Return a function that lists all children of the submodules at ``paths``."""
    return lambda module: [
        (parent, name)
        for path in paths
        for parent in [module.get_submodule(path)]
        for name, _ in parent.named_children()
    ]


def instances(*kinds: type[nn.Module]) -> Callable[[nn.Module], list[tuple[nn.Module, str]]]:
    """Return a function that lists all submodules of these classes."""
    return lambda module: [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, kinds)
    ]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="VGG-16",
            make=lambda: vgg16(64),
            make_batch=images(64),
            batch=16,
            blocks=children("model.0"),
            block="a stage: the convolutions of one resolution and their pooling",
        ),
        Workload(
            name="ResNet-50",
            make=resnet50,
            make_batch=images(96),
            batch=16,
            blocks=instances(Bottleneck),
            block="a bottleneck",
        ),
        Workload(
            name="DenseNet-121",
            make=densenet121,
            make_batch=images(96),
            batch=12,
            blocks=instances(DenseLayer),
            block="a dense layer, concatenation included",
        ),
        Workload(
            name="GoogLeNet",
            make=googlenet,
            make_batch=images(96),
            batch=32,
            blocks=instances(Inception),
            block="an inception module",
        ),
        Workload(
            name="U-Net",
            make=lambda: Classifier(UNet(32)),
            make_batch=pixels(96),
            batch=8,
            blocks=children("model.down", "model.up"),
            block="the two convolutions of a level, down or up",
        ),
        Workload(
            name="ViT",
            make=vit,
            make_batch=images(96),
            batch=12,
            blocks=children("model.vit.layers"),
            block="a transformer block",
        ),
        Workload(
            name="BERT",
            make=bert,
            make_batch=masked_texts,
            batch=8,
            blocks=children("model.bert.encoder.layer"),
            block="a transformer block",
        ),
        Workload(
            name="GPT-2",
            make=gpt2,
            make_batch=texts,
            batch=8,
            blocks=children("model.transformer.h"),
            block="a transformer block",
        ),
        Workload(
            name="LSTM",
            make=lambda: Classifier(LSTM(640, 2)),
            make_batch=next_tokens,
            batch=48,
            blocks=instances(TimeStep),
            block="a step in time of all layers",
        ),
    )
}
"""Workloads by name."""
