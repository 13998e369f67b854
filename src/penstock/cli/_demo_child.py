"""A training process of the demo, which uses one of five methods, with or without a cap on its memory.

Run as ``python -m penstock.cli._demo_child``; it obeys the lines "step", "measure" and "finish" on standard input and
answers each with a line of JSON. With a cap the process may hold at most that many bytes more than when training
begins (with parameters, gradients, optimizer state and libraries): ``RLIMIT_DATA``, enforced by the kernel. With
``--whole`` the cap also covers parameters, gradients and optimizer state.
"""

import argparse
import json
import resource
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, Self

from penstock.cli._trainer import METHODS, WHOLE, Size, Trainer, standard_library
from penstock.probe import held_bytes
from penstock.report import save
from penstock.tiers import write_trace

_SAMPLE_S = 0.005
STACK_BYTES = 512 * 1024
"""Stack size of lane threads, which run a few frames: the default of 8 MiB each would count against the cap."""


def main() -> None:
    """Train as the arguments and the commands on standard input say."""
    arguments = _arguments()
    threading.stack_size(STACK_BYTES)
    size = Size(num_layers=arguments.layers, width=arguments.width, length=512, batch=arguments.batch)
    standard_library()
    _have_library_buffers(size, arguments)
    start_bytes = data_bytes()
    if arguments.whole:
        limit(arguments.cap)
    try:
        budget = arguments.budget
        if arguments.whole and budget is not None:
            budget += held_bytes("cpu")
        trainer = Trainer(arguments.method, size, disk=arguments.disk, budget=budget)
        trainer.run_tiny_step()  # optimizer state and worker threads exist from here on
    except RuntimeError as error:
        fail(error)
    if trainer.method == "remat":
        trainer.plan(arguments.budget, disk=arguments.disk, reserve=standard_library().nbytes)
    if not arguments.whole:
        limit(arguments.cap)
    say({"num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters())})
    for line in sys.stdin:
        command = line.strip()
        try:
            if command == "step":
                if not arguments.whole:
                    say(_step(trainer))
                    continue
                with Sampled(start_bytes) as memory:
                    answer = _step(trainer)
                say(answer | {"timeline": memory.timeline})
            elif command == "measure":
                say(_measure(trainer))
            elif command == "finish":
                say(_finish(trainer, arguments.trace))
                return
        except RuntimeError as error:  # PyTorch's own error for memory that it cannot have
            fail(error)


class Sampled:
    """The memory of this process over time, as the cap counts it."""

    def __init__(self, start_bytes: int):
        self._start_bytes, self._ended = start_bytes, threading.Event()
        self.timeline: list[tuple[float, int]] = []
        """Seconds, and bytes taken since ``start_bytes``."""
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        start_s = time.perf_counter()
        while True:
            ends = self._ended.wait(_SAMPLE_S)
            self.timeline.append((time.perf_counter() - start_s, data_bytes() - self._start_bytes))
            if ends:
                return


def limit(cap_bytes: int | None) -> None:
    """Let the kernel refuse this process more than so many further bytes; ``None`` for no limit."""
    if cap_bytes is not None:
        limit = data_bytes() + cap_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def fail(error: Exception) -> NoReturn:
    """Answer with the error, and end."""
    say({"error": str(error).splitlines()[0]})
    raise SystemExit(1) from error


def _have_library_buffers(size: Size, arguments: argparse.Namespace) -> None:
    """Train one block of the given size once, and for `WHOLE` a small model by that method.

    Buffers of matrix products depend on the processor, and imports of the method on what is installed. Allocating both
    before the cap keeps them from deciding which method fits.
    """
    block = Trainer("plain", replace(size, num_layers=1))
    block.forward_and_backward(block.batch())
    if arguments.method == WHOLE:
        small = Size(num_layers=1, width=64, length=64, batch=1)
        trainer = Trainer(WHOLE, small, disk=arguments.disk, budget=held_bytes("cpu") + 2**24)
        for _ in range(2):
            trainer.train(trainer.batch())
        trainer.close()


def _step(trainer: Trainer) -> dict[str, Any]:  # any: JSON
    batch = trainer.batch()
    start_s = time.perf_counter()
    loss = trainer.train(batch)
    answer: dict[str, Any] = {"loss": loss.hex(), "step_s": time.perf_counter() - start_s}
    if trainer.offloader is not None:
        answer["offload"] = asdict(trainer.offloader.statistics())
    if trainer.training is not None:
        answer["training"] = asdict(trainer.training.statistics())
    return answer


def _measure(trainer: Trainer) -> dict[str, Any]:
    report = trainer.peak(trainer.batch())
    every = max(1, len(report.timeline) // 4000)
    return {
        "peak_bytes": report.peak_bytes,
        "start_bytes": report.start_bytes,
        "activation_bytes": report.activation_bytes,
        "rss_bytes": report.rss_bytes,
        "timeline": _thinned(report.timeline, every),
    }


def _finish(trainer: Trainer, trace: Path | None) -> dict[str, Any]:
    if trainer.planned is not None:
        plan, problem = trainer.planned.plan.plan, trainer.planned.plan.problem
        swapped = sum(problem.storages[storage].size_bytes for storage in plan.gone_slots)
        _save(trace, trainer.planned.plan)
        return {"predicted_peak_bytes": plan.peak_bytes, "extra_s": plan.extra_s, "swapped_bytes": swapped}
    if trainer.offloader is None:
        return {}
    if trace is not None:
        write_trace(trace, trainer.offloader.trace(), name="penstock demo")
    _save(trace, trainer.offloader)
    answer = {"tiers": asdict(trainer.offloader.tier_statistics())}
    trainer.close()
    return answer


def _save(trace: Path | None, ran: object) -> None:
    """Save the data for the page of the run, in a folder next to the trace."""
    if trace is not None:
        save(trace.parent / "runs" / type(ran).__name__.lower(), ran)


def _thinned(timeline: tuple[tuple[float, int], ...], every: int) -> list[tuple[float, int]]:
    """Return the highest point of every ``every`` points, which keeps the peak in the picture."""
    return [
        max(timeline[start : start + every], key=lambda point: point[1]) for start in range(0, len(timeline), every)
    ]


def data_bytes() -> int:
    """Return the bytes that the kernel counts against ``RLIMIT_DATA``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData; the demo needs Linux")


def say(answer: dict[str, Any]) -> None:
    """Answer the parent process."""
    print(json.dumps(answer), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--method", choices=(*METHODS, WHOLE), default="plain")
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--trace", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
