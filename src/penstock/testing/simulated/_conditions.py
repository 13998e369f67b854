"""Conditions under which the simulated accelerator runs, its races and its streams."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.errors import PenstockError
from penstock.testing.simulated._load import extension
from penstock.units import parse_bytes


@contextmanager
def conditions(
    *,
    delay_us: tuple[int, int] = (0, 0),
    lazy: bool = False,
    late: float = 0.0,
    poison: bool = False,
    check: bool = True,
    limit: str | int = 0,
    patience_s: float = 60.0,
    seed: int = 0,
) -> Iterator[None]:
    """Set how the devices behave inside the context; afterwards they are as loaded: prompt, with the race check on.

    Args:
        delay_us: The least and the most microseconds that a copy waits before it runs; drawn with ``seed``.
        lazy: Tasks run only when something waits for them or asks whether they are done.
        late: The share of operators, 0 to 1, whose results a task writes, so that other streams may be too early.
        poison: Freed memory is overwritten with 0xff when it is allocated again.
        check: Collect races, for ``take_races``.
        limit: Memory of a device; 0: no limit. Beyond it ``torch.OutOfMemoryError`` is raised.
        patience_s: How long the host waits for a stream before it raises ``RuntimeError``.
        seed: The seed of delays and lateness.
    """
    if not 0 <= late <= 1:
        raise ValueError(f"`late` must be a share of operators from 0 to 1, got {late}")
    if not 0 <= delay_us[0] <= delay_us[1]:
        raise ValueError(f"`delay_us` must be (least, most) in microseconds, got {delay_us}")
    extension().set_conditions(
        *delay_us, lazy, round(100 * late), poison, check, parse_bytes(limit), float(patience_s), seed & 0xFFFFFFFF
    )
    try:
        yield
    finally:
        extension().set_conditions(0, 0, False, 0, False, True, 0, 60.0, 0)


def take_races() -> list[str]:
    """Return the races since the last call: pairs of accesses to the same bytes that nothing orders."""
    races: list[str] = extension().take_races()
    return races


def hold(stream: torch.Stream) -> None:
    """Stop a stream before its next task. A host that waits for it raises ``RuntimeError``."""
    extension().hold(*_place(stream), True)


def release(stream: torch.Stream) -> None:
    """Let a held stream continue."""
    extension().hold(*_place(stream), False)


def num_pending(stream: torch.Stream) -> int:
    """Return the number of tasks that a stream has yet to run."""
    return int(extension().num_pending(*_place(stream)))


def _place(stream: torch.Stream) -> tuple[int, int]:
    if stream.device.type != torch.accelerator.current_accelerator().type:  # type: ignore[union-attr]
        raise PenstockError(f"{stream} is not a stream of the simulated accelerator")
    return int(stream.device.index or 0), int(stream.stream_id)
