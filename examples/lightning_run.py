"""Train a GPT with Lightning and its activations on disk. Needs the `lightning` extra.

python examples/lightning_run.py --disk /nvme
"""

import argparse

import lightning.pytorch as lightning
import torch

from penstock.integrations import LightningOffload
from penstock.testing import GPT
from penstock.units import format_bytes

VOCABULARY, LENGTH = 512, 256


class Counting(lightning.LightningModule):
    """A GPT that learns to count upward from a random token."""

    def __init__(self, num_layers: int, width: int):
        super().__init__()
        self.gpt = GPT(num_layers=num_layers, width=width, num_heads=4, context=LENGTH, vocabulary=VOCABULARY)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:  # noqa: ARG002  # Lightning's
        loss = self.gpt(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--disk", default=".", help="a directory on an SSD")
    options.add_argument("--budget", default="200MiB", help="bytes of the device; the default is for the default sizes")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--steps", type=int, default=5)
    settings = options.parse_args()

    tokens = (torch.randint(VOCABULARY, (64, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
    loader = torch.utils.data.DataLoader(tokens, batch_size=8)
    callback = LightningOffload(budget=settings.budget, disk=settings.disk)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=settings.steps, callbacks=[callback], **quiet)
    trainer.fit(Counting(settings.layers, settings.width), loader)
    summary = callback.summary()
    assert summary is not None
    print(f"loss {trainer.callback_metrics['loss']:.3f}")
    print(f"{format_bytes(summary.parked_bytes)} moved in {summary.num_cycles} steps")


if __name__ == "__main__":
    main()
