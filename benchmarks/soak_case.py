"""One case of the campaign: what it draws, what it compares, and what must hold when it is over."""

import gc
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.probe import ledger
from penstock.tiers import Budget

SETTLE_S = 5.0
"""Threads that were told to end may take so long."""


class Injected(Exception):
    """The exception that the campaign raises in the middle of a user's code."""


@dataclass
class Case:
    """A case, drawn from its seed alone."""

    seed: int
    folder: Path
    """The case's own folder. ``home``, ``tmp`` and ``cwd`` in it must not change, and ``disk*`` must end empty."""
    figures: Counter[str] = field(default_factory=Counter)
    """Counts, by name."""
    findings: list[dict[str, str]] = field(default_factory=list)
    """Findings: the kind of fault, and a description."""
    drawn: dict[str, Any] = field(default_factory=dict)
    """Values that were drawn, for the reader."""
    budgets: list[Budget] = field(default_factory=list)
    """Accounts that must be back at zero."""

    def __post_init__(self) -> None:
        self.choices = random.Random(self.seed)

    def draw(self, name: str, options: Sequence[Any]) -> Any:
        """Draw one of the options, and note it under ``name``."""
        self.drawn[name] = chosen = self.choices.choice(options)
        return chosen

    def disk(self, name: str = "disk") -> Path:
        """Return a folder for spilled bytes, which must be empty when the case is over."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def budget(self, **places: Any) -> Budget:
        """Return an account, which must be at zero when the case is over."""
        self.budgets.append(Budget(**places))
        return self.budgets[-1]

    def found(self, kind: str, text: str) -> None:
        """Note that something is wrong."""
        self.findings.append({"kind": kind, "text": text[-4000:]})

    def injected(self, kind: str, count: int = 1) -> None:
        """Note how many faults were injected."""
        if count:
            self.figures[f"faults: {kind}"] += count

    def equal(self, what: str, ours: Any, expected: Any) -> bool:
        """Compare tensors, numbers, and lists and dictionaries of them, bit for bit."""
        if isinstance(expected, Mapping):
            if ours.keys() != expected.keys():
                self.found("wrong value", f"{what}: {sorted(ours.keys() ^ expected.keys())} are only on one side")
                return False
            return all(self.equal(f"{what}, {key}", ours[key], value) for key, value in expected.items())
        if isinstance(expected, list | tuple):
            if len(ours) != len(expected):
                self.found("wrong value", f"{what}: {len(ours)} instead of {len(expected)}")
                return False
            pairs = enumerate(zip(ours, expected, strict=True))
            return all(self.equal(f"{what}[{index}]", ours, other) for index, (ours, other) in pairs)
        if isinstance(expected, torch.Tensor):
            self.figures["compared_bytes"] += expected.nbytes
            is_same = (
                isinstance(ours, torch.Tensor)
                and (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
                and torch.equal(bits(ours), bits(expected))
            )
        else:
            self.figures["compared_bytes"] += 8
            is_same = ours == expected or str(ours) == str(expected) == "nan"
        if not is_same:
            self.found("wrong value", f"{what}: {ours} instead of {expected}")
        return is_same


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def watched(case: Case, call: Callable[[Case], None]) -> None:
    """Run a case; what it raises and what it leaves behind become findings."""
    files, threads, held_bytes = _files(), set(threading.enumerate()), ledger.held_bytes
    trees = {name: _tree(case.folder / name) for name in ("home", "tmp", "cwd")}
    with no_writes_outside(case):
        try:
            call(case)
        except BaseException:
            case.found("undocumented error", traceback.format_exc())
        torch._dynamo.reset()
        for _ in range(3):  # what the first finds holds more, by finalisers
            gc.collect()
    _wait(lambda: not set(threading.enumerate()) - threads)
    if left := set(threading.enumerate()) - threads:
        case.found("leak", f"threads: {sorted(thread.name for thread in left)}")
    if left := _files() - files:
        case.found("leak", f"open files: {sorted(left)}")
    if ledger.held_bytes != held_bytes:
        case.found("leak", f"the ledger holds {ledger.held_bytes - held_bytes} bytes")
    for budget in case.budgets:
        for place in ("device", "host", *map(str, budget.disk_bytes)):
            if budget.held_bytes(place):
                case.found("leak", f"the account holds {budget.held_bytes(place)} bytes of {place}")
    for name, before in trees.items():
        if changed := _tree(case.folder / name) ^ before:
            case.found("leak", f"files in {name}: {sorted(changed)}")
    for path in case.folder.glob("disk*"):
        if left := _tree(path):
            case.found("leak", f"files in {path.name}: {sorted(left)}")


def _wait(is_over: Callable[[], bool]) -> None:
    end_s = time.monotonic() + SETTLE_S
    while not is_over() and time.monotonic() < end_s:
        gc.collect()
        time.sleep(0.01)


def _files() -> set[tuple[int, str]]:
    result = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if not target.startswith("/proc/") and "/mpl-data/" not in target:  # fonts, which Matplotlib keeps open
            result.add((int(name), target))
    return result


_OF_OTHERS = ("torchinductor", "torch_geometric.")
"""Prefixes of files that PyTorch and PyG write to the temporary folder."""


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith(_OF_OTHERS)}


_watching: list[tuple[Any, tuple[str, ...]]] = []
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Record an event of Python: every file opened to write, and every new folder, must lie in an allowed folder."""
    if not _watching:
        return
    if event == "open":
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & _WRITES or isinstance(path, int):
            return
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "sqlite3.connect"):
        path = arguments[1 if event in ("os.rename", "os.symlink") else 0]
        if event in ("os.mkdir", "os.remove", "os.rmdir") and arguments[-1] != -1:
            return  # relative to a folder that is open
    else:
        return
    case, allowed = _watching[-1]
    if isinstance(path, str | bytes | os.PathLike):
        text = os.path.abspath(os.fsdecode(path))
        if not text.startswith(allowed):
            case.found("outside", f"{event} of {text}")


@contextmanager
def no_writes_outside(case: Any) -> Iterator[None]:
    if not any(audit is _audit for audit in getattr(sys, "_penstock_audits", ())):
        sys.addaudithook(_audit)
        sys._penstock_audits = [_audit]  # type: ignore[attr-defined]
    allowed = (str(case.folder), os.environ["XDG_CACHE_HOME"], "/dev/null", "/dev/shm", "/proc/self")
    _watching.append((case, allowed))
    try:
        yield
    finally:
        _watching.pop()
