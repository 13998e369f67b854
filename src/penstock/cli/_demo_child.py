"""One training process of the demo: plain or with Penstock, with or without a cap on its memory.

Run as ``python -m penstock.cli._demo_child``; it obeys the lines "step", "measure" and "finish" on standard input and
answers each with a line of JSON. With a cap the process may not hold more than what it has when training begins
(parameters, gradients, optimizer state, libraries) plus that many bytes: ``RLIMIT_DATA``, enforced by the kernel.
"""

import argparse
import json
import resource
import sys
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.offload import Offloader, activations
from penstock.probe import peak_bytes
from penstock.testing import GPT
from penstock.tiers import write_trace

BATCH, LENGTH, WIDTH, NUM_LAYERS = 16, 512, 256, 8


def main() -> None:
    """Trains as told."""
    arguments = _arguments()
    trainer = _Trainer()
    offloader = activations(trainer.model, disk=arguments.disk, budget=arguments.budget) if arguments.disk else None
    trainer.run_tiny_step()  # optimizer state, worker threads and library buffers exist from here on
    static_bytes = _data_bytes()
    if arguments.cap is not None:
        limit = static_bytes + arguments.cap
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    _say({"static_bytes": static_bytes, "num_parameters": sum(one.numel() for one in trainer.model.parameters())})
    for line in sys.stdin:
        command = line.strip()
        try:
            if command == "step":
                _say(_step(trainer, offloader))
            elif command == "measure":
                _say(_measure(trainer, offloader))
            elif command == "finish":
                _say(_finish(offloader, arguments.trace))
                return
        except RuntimeError as error:  # PyTorch's own error for memory that it cannot have
            _say({"error": str(error).splitlines()[0]})
            raise SystemExit(1) from error


class _Trainer:
    """A GPT on the sources of Python's standard library, as bytes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(num_layers=NUM_LAYERS, width=WIDTH, num_heads=8, context=LENGTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._text = _standard_library()
        self._generator = torch.Generator().manual_seed(0)

    def batch(self, size: int = BATCH, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self._text) - length - 1, (size,), generator=self._generator).tolist()
        rows = torch.stack([self._text[start : start + length + 1] for start in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def train(self, batch: tuple[torch.Tensor, torch.Tensor], offloader: Offloader | None) -> float:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.forward_and_backward(batch, offloader)
        self.optimizer.step()
        return loss

    def forward_and_backward(self, batch: tuple[torch.Tensor, torch.Tensor], offloader: Offloader | None) -> float:
        if offloader is None:
            loss = self.model(*batch)
            loss.backward()
        else:
            with offloader:
                loss = self.model(*batch)
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


def _step(trainer: _Trainer, offloader: Offloader | None) -> dict[str, Any]:  # any: JSON
    batch = trainer.batch()
    start_s = time.perf_counter()
    loss = trainer.train(batch, offloader)
    answer: dict[str, Any] = {"loss": loss.hex(), "step_s": time.perf_counter() - start_s}
    if offloader is not None:
        answer["offload"] = asdict(offloader.statistics())
    return answer


def _measure(trainer: _Trainer, offloader: Offloader | None) -> dict[str, Any]:
    batch = trainer.batch()
    trainer.optimizer.zero_grad(set_to_none=False)
    report = peak_bytes(lambda: trainer.forward_and_backward(batch, offloader), device="cpu")
    every = max(1, len(report.timeline) // 4000)
    return {
        "peak_bytes": report.peak_bytes,
        "start_bytes": report.start_bytes,
        "activation_bytes": report.activation_bytes,
        "rss_bytes": report.rss_bytes,
        "timeline": _thinned(report.timeline, every),
    }


def _finish(offloader: Offloader | None, trace: Path | None) -> dict[str, Any]:
    if offloader is None:
        return {}
    if trace is not None:
        write_trace(trace, offloader.trace(), name="penstock demo")
    answer = {"tiers": asdict(offloader.tier_statistics())}
    offloader.close()
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
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--trace", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
