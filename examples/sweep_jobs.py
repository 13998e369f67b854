"""The jobs of sweep.yaml: a tiny GPT on random tokens, one per learning rate and batch size.

penstock fleet run examples/sweep.yaml
"""

import torch

from penstock.fleet import Job
from penstock.testing import GPT

VOCABULARY, LENGTH = 64, 16


def make_job(lr: float, batch: int, width: int = 32, steps: int = 5) -> Job:
    """Make the job of a GPT that learns to count upward from a random token."""

    def batches():
        begins = torch.randint(VOCABULARY, (16, batch, 1), generator=torch.Generator().manual_seed(0))
        tokens = (begins + torch.arange(LENGTH + 1)) % VOCABULARY
        return [(token[:, :-1], token[:, 1:]) for token in tokens]  # gone through again in each epoch

    return Job(
        name="gpt",  # the command line appends the parameters, since all have this name
        model=lambda: GPT(num_layers=2, width=width, num_heads=2, context=LENGTH, vocabulary=VOCABULARY),
        data=batches,
        loss=lambda model, batch: model(*batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        steps=steps,
        tags={"lr": lr, "batch": batch},
    )
