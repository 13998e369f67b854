"""One training process of the demo, by one of four methods, with or without a cap on its memory.

Run as ``python -m penstock.cli._demo_child``; it obeys the lines "step", "measure" and "finish" on standard input and
answers each with a line of JSON. With a cap the process may not hold more than what it has when training begins
(parameters, gradients, optimizer state, libraries) plus that many bytes: ``RLIMIT_DATA``, enforced by the kernel.
"""

import argparse
import contextlib
import json
import resource
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.offload import activations
from penstock.probe import peak_bytes
from penstock.remat import OptimizedStep, optimize
from penstock.testing import GPT
from penstock.tiers import write_trace

BATCH, LENGTH, WIDTH, NUM_LAYERS = 16, 512, 256, 8


METHODS = ("plain", "checkpoint", "offload", "remat")


def main() -> None:
    """Trains as told."""
    arguments = _arguments()
    trainer = _Trainer(arguments.method, arguments.disk, arguments.budget)
    trainer.run_tiny_step()  # optimizer state, worker threads and library buffers exist from here on
    trainer.plan()
    static_bytes = _data_bytes()
    if arguments.cap is not None:
        limit = static_bytes + arguments.cap
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    _say({"static_bytes": static_bytes, "num_parameters": sum(one.numel() for one in trainer.model.parameters())})
    for line in sys.stdin:
        command = line.strip()
        try:
            if command == "step":
                _say(_step(trainer))
            elif command == "measure":
                _say(_measure(trainer))
            elif command == "finish":
                _say(_finish(trainer, arguments.trace))
                return
        except RuntimeError as error:  # PyTorch's own error for memory that it cannot have
            _say({"error": str(error).splitlines()[0]})
            raise SystemExit(1) from error


class _Trainer:
    """A GPT on the sources of Python's standard library, as bytes."""

    def __init__(self, method: str, disk: Path | None, budget: int | None):
        torch.manual_seed(0)
        self.model = GPT(
            num_layers=NUM_LAYERS, width=WIDTH, num_heads=8, context=LENGTH, checkpointed=method == "checkpoint"
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.method, self.disk, self.budget = method, disk, budget
        self.offloader = activations(self.model, disk=disk, budget=budget) if method == "offload" else None
        self.planned: OptimizedStep | None = None
        self._text = _standard_library()
        self._generator = torch.Generator().manual_seed(0)

    def plan(self) -> None:
        """Plans the whole step, where that is the method."""
        if self.method == "remat":
            state = self._generator.get_state()
            self.planned = optimize(
                self.model,
                self.batch(),
                self.budget,
                optimizer=self.optimizer,
                disk=self.disk,
                reserve=self._text.nbytes,
            )
            self._generator.set_state(state)

    def batch(self, size: int = BATCH, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self._text) - length - 1, (size,), generator=self._generator).tolist()
        rows = torch.stack([self._text[start : start + length + 1] for start in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def train(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.forward_and_backward(batch)
        self.optimizer.step()
        return loss

    def forward_and_backward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        step = self.model if self.planned is None else self.planned
        with self.offloader or contextlib.nullcontext():
            loss: torch.Tensor = step(*batch)
            loss.backward()
        return float(loss.detach())

    def run_tiny_step(self) -> None:
        """Allocates gradients and optimizer state without training: the learning rate is 0 for it."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.model(*self.batch(1, 8)).backward()
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-4


def _step(trainer: _Trainer) -> dict[str, Any]:  # any: JSON
    batch = trainer.batch()
    start_s = time.perf_counter()
    loss = trainer.train(batch)
    answer: dict[str, Any] = {"loss": loss.hex(), "step_s": time.perf_counter() - start_s}
    if trainer.offloader is not None:
        answer["offload"] = asdict(trainer.offloader.statistics())
    return answer


def _measure(trainer: _Trainer) -> dict[str, Any]:
    batch = trainer.batch()
    trainer.optimizer.zero_grad(set_to_none=False)
    report = peak_bytes(lambda: trainer.forward_and_backward(batch), device="cpu")
    every = max(1, len(report.timeline) // 4000)
    return {
        "peak_bytes": report.peak_bytes,
        "start_bytes": report.start_bytes,
        "activation_bytes": report.activation_bytes,
        "rss_bytes": report.rss_bytes,
        "timeline": _thinned(report.timeline, every),
    }


def _finish(trainer: _Trainer, trace: Path | None) -> dict[str, Any]:
    if trainer.planned is not None:
        plan, problem = trainer.planned.plan.plan, trainer.planned.plan.problem
        swapped = sum(problem.storages[one].size_bytes for one in plan.gone_slots)
        return {"predicted_peak_bytes": plan.peak_bytes, "extra_s": plan.extra_s, "swapped_bytes": swapped}
    if trainer.offloader is None:
        return {}
    if trace is not None:
        write_trace(trace, trainer.offloader.trace(), name="penstock demo")
    answer = {"tiers": asdict(trainer.offloader.tier_statistics())}
    trainer.offloader.close()
    return answer


def _thinned(timeline: tuple[tuple[float, int], ...], every: int) -> list[tuple[float, int]]:
    """The highest point of every few: the peak stays in the picture."""
    return [max(timeline[at : at + every], key=lambda point: point[1]) for at in range(0, len(timeline), every)]


def _standard_library() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def _data_bytes() -> int:
    """What the kernel counts against ``RLIMIT_DATA``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData; the demo needs Linux")


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=METHODS, default="plain")
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--trace", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
