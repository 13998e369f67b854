"""Losses of a model larger than its budget, whose process is killed (``kill -9``) again and again.

Each process goes on from the last checkpoint; its losses have to be those of the run that nobody killed, to the bit.

Run it with ``python -m benchmarks.training_kills --disk /nvme``.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks import common
from penstock import offload, probe
from penstock.testing import GPT

_NUM_STEPS = 30
_LONGEST_S = 1.0
"""The most seconds from a process's first step until it is killed."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--child", type=Path, help="be the process, with its checkpoint there")
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.kills = 3
    if settings.child is not None:
        _child(settings)
        return
    draw, counts = random.Random(settings.seed), Counter[str]()
    with tempfile.TemporaryDirectory(dir=settings.disk) as directory:
        expected = dict(_lines(_Process(settings, Path(directory) / "whole")))
        saved = Path(directory) / "saved"
        while counts["kills"] < settings.kills:
            process = _Process(settings, saved)
            killer = threading.Thread(target=_kill_soon, args=(process, draw.uniform(0, _LONGEST_S), saved, counts))
            for number, (step, loss) in enumerate(_lines(process)):
                if not number:
                    killer.start()
                counts["steps"] += 1
                counts["wrong"] += expected[step] != loss
            if killer.ident is not None:  # else nothing was left to do
                killer.join()
            if process.ended_well:
                counts["whole runs"] += 1
                shutil.rmtree(saved)
            if counts["kills"] % 20 == 0:
                print(dict(counts), flush=True)
    names = ("kills", "kills while saving", "steps", "whole runs", "wrong")
    rows = [common.Row(name="training kills", metric=name, value=float(counts[name]), unit="count") for name in names]
    common.write(settings.json, {"seed": settings.seed, "steps": _NUM_STEPS}, rows)
    common.show("Processes that are killed while they train", list(names), [[str(counts[name]) for name in names]])


class _Process:
    """A process that trains until it is killed."""

    def __init__(self, settings: argparse.Namespace, saved: Path):
        command = [
            sys.executable,
            "-m",
            "benchmarks.training_kills",
            "--child",
            str(saved),
            "--disk",
            str(settings.disk),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    @property
    def ended_well(self) -> bool:
        return self.process.wait() == 0


def _lines(process: _Process) -> Iterator[tuple[int, str]]:
    assert process.process.stdout is not None
    for line in process.process.stdout:
        if line.endswith("\n"):  # else it was killed in the middle of it
            step, loss = line.split()
            yield int(step), loss


def _kill_soon(process: _Process, delay_s: float, saved: Path, counts: Counter[str]) -> None:
    time.sleep(delay_s)
    if process.process.poll() is None:
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
        counts["kills"] += 1
        counts["kills while saving"] += saved.with_name(f".{saved.name}.draft").exists()


def _child(settings: argparse.Namespace) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return _Losses()

    saved = settings.child
    training = offload.training(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        probe.held_bytes("cpu") + 6 * 2**20,
        disk=settings.disk,
    )
    is_there = saved.exists() or saved.with_name(f".{saved.name}.old").exists()
    first = training.load(saved) if is_there else 0
    for step in range(first, _NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(256, (2, 65), generator=generator)
        with training:
            loss = training.model(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
        print(step, loss.item().hex(), flush=True)
        training.save(saved, extra=step + 1)
    training.close(discard=True)


class _Losses(nn.Module):
    """A GPT that draws random numbers, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(num_layers=4, width=128, num_heads=4, context=64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens[:, :-1], tokens[:, 1:]) * (1 + torch.rand(())) / 2


if __name__ == "__main__":
    main()
