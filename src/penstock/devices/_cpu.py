"""Main memory as the device: operators run synchronously, and nothing counts their bytes."""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.devices._backend import Backend


class Cpu(Backend):
    """The processor and main memory."""

    def finish(self) -> None:
        """Do nothing: operators have ended when they return."""

    def finish_current(self) -> None:
        """Do nothing: operators have ended when they return."""

    def is_on_default_stream(self) -> bool:
        return True

    def seconds(self, run: Callable[[], Any]) -> float:
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s

    @property
    def name(self) -> str:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return platform.machine()

    def memory_bytes(self) -> tuple[int, int]:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available, total = (int(rows[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        return available, total

    def use(self, *, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)
