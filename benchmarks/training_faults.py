"""Disk faults while a model larger than its budget trains, which must not change any number.

Each trial draws a model, an optimizer, a budget, a way to step and a rate of faults, and trains plainly first. Writes
that fail (full disk, I/O error, cut short) have to change nothing: losses, parameters and states equal plain PyTorch's,
to the bit. Reads that fail have to raise `TierReadError`, and losses before are those of plain training.

Run it with ``python -m benchmarks.training_faults --disk /nvme``.
"""

import argparse
import contextlib
import copy
import errno
import gc
import os
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import nn

from benchmarks import common
from penstock import offload, probe
from penstock.directio import SpillFile
from penstock.errors import BudgetError, TierReadError
from penstock.testing import GPT

_NUM_STEPS = 4
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--faults", type=int, default=10_000, help="until so many were injected")
    options.add_argument("--trials", type=int, default=100, help="and so many models have trained")
    options.add_argument("--seed", type=int, default=0)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.faults, settings.trials = 50, 2
    counts: Counter[str] = Counter()
    seed = settings.seed
    while counts["faults"] < settings.faults or counts["trials"] < settings.trials:
        for name, number in trial(settings, seed).items():
            counts[name] += number
        seed += 1
        if seed % 20 == 0:
            print(dict(counts), flush=True)
    names = ("trials", "faults", "failed reads told", "refused budgets", "wrong")
    rows = [common.Row(name="training faults", metric=name, value=float(counts[name]), unit="count") for name in names]
    common.write(settings.json, {"seed": settings.seed, "steps": _NUM_STEPS}, rows)
    common.show(
        "Faults while a model larger than its budget trains", list(names), [[str(counts[name]) for name in names]]
    )


def trial(settings: argparse.Namespace, seed: int) -> Counter[str]:
    """Train one model twice, plainly and under faults; return the counts of what happened."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = GPT(num_layers=draw.randint(1, 4), width=draw.choice([64, 128]), num_heads=2, context=32)
    make_optimizer, accumulated = OPTIMIZERS[draw.choice(list(OPTIMIZERS))], draw.choice([1, 1, 3])
    clips, fails_reads = draw.random() < 0.5, draw.random() < 0.2
    rate, share = draw.choice([0.02, 0.1, 0.3, 1.0]), draw.uniform(0.25, 0.9)
    batches = [torch.randint(256, (accumulated, draw.choice([1, 4]), 33)) for _ in range(_NUM_STEPS)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
        total = 0.0
        for part in batch:
            loss = model(part[:, :-1], part[:, 1:])
            loss.backward()
            total += loss.item()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return total

    twin = copy.deepcopy(model)
    optimizer = make_optimizer(twin)
    expected = []
    with probe.record_memory("cpu") as recording:
        expected = [step(twin, optimizer, batch) for batch in batches]
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    after = [parameter.detach() for parameter in twin.parameters()]
    states = [optimizer.state[parameter] for parameter in twin.parameters()]
    gc.collect()
    extra = recording.report.peak_bytes - recording.report.start_bytes + own_bytes
    budget = probe.held_bytes("cpu") - own_bytes + int(share * extra)
    counts = Counter({"trials": 1})
    optimizer = make_optimizer(model)
    with tempfile.TemporaryDirectory(dir=settings.disk) as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            training = offload.training(model, optimizer, budget, disk=directory)
        except BudgetError:
            return counts + Counter({"refused budgets": 1})
        losses = []
        try:
            with faults(draw, rate, counts, fails_reads=fails_reads):
                for batch in batches:
                    with training:
                        losses.append(step(model, optimizer, batch))
        except BudgetError:
            counts["refused budgets"] += 1
        except TierReadError:
            counts["failed reads told"] += 1
        finally:
            training.close()
    wrong = losses != expected[: len(losses)]
    if len(losses) == _NUM_STEPS:
        wrong |= not all(torch.equal(parameter, two) for parameter, two in zip(model.parameters(), after, strict=True))
        for parameter, state in zip(model.parameters(), states, strict=True):
            mine = optimizer.state[parameter]
            wrong |= not all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(state[key])) for key in state)
    if wrong:
        print(f"WRONG: seed {seed}", flush=True)
    counts["wrong"] += wrong
    return counts


@contextlib.contextmanager
def faults(draw: random.Random, rate: float, counts: Counter[str], *, fails_reads: bool) -> Iterator[None]:
    """Make writes fail at that rate inside the block, and reads at a hundredth of it."""
    write, read = SpillFile.write, SpillFile.read

    def failing_write(self: SpillFile, view: memoryview, offset: int) -> int:
        if not fails_reads and draw.random() < rate:
            counts["faults"] += 1
            kind = draw.choice([errno.ENOSPC, errno.EIO, 0])
            if kind:
                raise OSError(kind, os.strerror(kind))
            return 0
        return write(self, view, offset)

    def failing_read(self: SpillFile, view: memoryview, offset: int) -> int:
        if fails_reads and draw.random() < rate / 100:
            counts["faults"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, view, offset)

    with mock.patch.object(SpillFile, "write", failing_write), mock.patch.object(SpillFile, "read", failing_read):
        yield


if __name__ == "__main__":
    main()
