"""Jobs for the measurements of fleets: GPTs on tinyshakespeare and Hugging Face's ViT, at any size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import data_folder
from benchmarks.models import HuggingFace
from penstock import fleet
from penstock.testing import GPT

RATES = (1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 6e-3)
NUM_BATCHES = 64
PATCH = 16
NUM_CLASSES = 10


def text_file() -> Path:
    """Return the path of the text on which jobs train; the file may be missing."""
    return data_folder() / "tinyshakespeare" / "input.txt"


def make_model(settings: Any) -> nn.Module:
    """Make a model whose ``forward`` takes the two tensors of a batch and returns the loss."""
    heads = max(1, settings.width // 64)
    if settings.model == "gpt":
        return GPT(num_layers=settings.layers, width=settings.width, num_heads=heads, context=settings.length)
    import transformers

    config = transformers.ViTConfig(
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        intermediate_size=4 * settings.width,
        image_size=image_size(settings.length),
        patch_size=PATCH,
        num_labels=NUM_CLASSES,
    )
    return HuggingFace(transformers.ViTForImageClassification(config))


def image_size(length: int) -> int:
    """Return the pixels per side of a square image with about ``length`` patches."""
    return PATCH * round(length**0.5)


def batches(settings: Any, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield mini-batches, the same at every call."""
    if settings.model == "gpt":
        return texts(batch, settings.length, NUM_BATCHES)
    return images(batch, image_size(settings.length), NUM_BATCHES)


def texts(batch: int, length: int, num_batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random places of the text (counting bytes if the file is missing), with each next character as target."""
    generator = torch.Generator().manual_seed(0)
    text = text_file()
    raw = text.read_bytes() if text.is_file() else bytes(range(256)) * 4096
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    for _ in range(num_batches):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def images(batch: int, size: int, num_batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield noise that is brighter the higher the class, with the class as target."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_batches):
        classes = torch.randint(NUM_CLASSES, (batch,), generator=generator)
        noise = torch.randn(batch, 3, size, size, generator=generator)
        yield noise + classes.view(-1, 1, 1, 1) / NUM_CLASSES, classes


def make_job(settings: Any, rate: float, batch: int, steps: int) -> fleet.Job:
    return fleet.Job(
        name=f"lr={rate} batch={batch}",
        model=lambda: make_model(settings),
        data=lambda: list(batches(settings, batch)),
        loss=lambda model, batch: model(*batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, foreach=False),
        steps=steps,
        tags={"lr": rate, "batch": batch},
    )


def jobs_of(settings: Any, num_jobs: int, steps: int) -> list[fleet.Job]:
    """Return jobs of all learning rates and batch sizes, with about as many samples for each."""
    result = [
        make_job(settings, rate, batch, steps * settings.batches[-1] // batch)
        for batch in settings.batches
        for rate in RATES
    ]
    return result[:: max(1, len(result) // num_jobs)][:num_jobs]


def state_bytes(settings: Any) -> int:
    """Return the bytes of one model's parameters, gradients and AdamW state."""
    with torch.device("meta"):
        model = make_model(settings)
    return 4 * sum(parameter.nbytes for parameter in model.parameters())
