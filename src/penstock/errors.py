"""Every exception and warning that a user of Penstock can meet.

Misuse raises ``ValueError`` or ``TypeError``; the classes here name the faults of the world, and our own.
"""

from collections.abc import Callable
from functools import partial
from typing import Self

__all__ = [
    "BudgetError",
    "BudgetNotKeptWarning",
    "CaptureError",
    "CheckpointError",
    "CompilerDeclinedWarning",
    "DoubleBackwardError",
    "FeatureFileError",
    "FleetStateError",
    "ForkedProcessError",
    "GraphBreakWarning",
    "InternalError",
    "NodeLostError",
    "NodeLostWarning",
    "OffloadDeclinedWarning",
    "PenstockError",
    "PenstockWarning",
    "TierDegradedWarning",
    "TierFullError",
    "TierReadError",
    "TierWriteError",
    "SharedModelWarning",
    "TrackerWarning",
]


class PenstockError(Exception):
    """Base of all errors that Penstock defines."""


class BudgetError(PenstockError, ValueError):
    """A budget that cannot be met. The message names the smallest one that can, and what needs it."""


class TierFullError(PenstockError):
    """A tier has no room for a reservation: its capacity, its budget or the file system is exhausted."""


class _TransferError(PenstockError, OSError):
    _verb = ""
    _advice = ""

    def __init__(self, *, tier: str, file: str, offset: int, size_bytes: int, reason: str, errno: int | None = None):
        where = f"{size_bytes} bytes at offset {offset} of {file} (tier {tier!r})"
        message = f"{self._verb} {where} failed: {reason}. {self._advice}"
        super().__init__(*([message] if errno is None else [errno, message]))
        self.tier, self.file, self.offset, self.size_bytes, self.reason = tier, file, offset, size_bytes, reason

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        names = ("tier", "file", "offset", "size_bytes", "reason", "errno")
        return partial(type(self), **{name: getattr(self, name) for name in names}), ()


class TierWriteError(_TransferError):
    """Bytes could not be written into a tier. The storage they came from is still whole where it was.

    Attributes: ``tier`` and ``file`` (names), ``offset`` and ``size_bytes`` of the failed request, ``errno``.
    """

    _verb = "writing"
    _advice = "Nothing is lost: the storage stays where it was."


class TierReadError(_TransferError):
    """Bytes in a tier could not be read back, or came back different. Never answered with other numbers.

    Attributes: ``tier`` and ``file`` (names), ``offset`` and ``size_bytes`` of the failed request, ``errno``
    (``None`` where the system reported none, as for a checksum that differs).
    """

    _verb = "reading"
    _advice = "The step cannot go on without these bytes; check the device with `dmesg` and its SMART data."


class ForkedProcessError(PenstockError):
    """Parked bytes were asked for in a forked child. They belong to the parent, whose lanes the child lacks."""


class CaptureError(PenstockError):
    """A step could not be captured as one graph that can be planned. The message names the line and what to do."""


class CheckpointError(PenstockError):
    """A checkpoint could not be written, or is damaged or another job's. Older ones are whole."""


class FeatureFileError(PenstockError, ValueError):
    """A file of features is damaged, cut short, or of no kind that is known. Nothing of it was used."""


class FleetStateError(PenstockError):
    """The database of a fleet, in its run's folder, cannot be used."""


class NodeLostError(PenstockError):
    """No machine is left that could train a fleet's jobs. Their checkpoints are whole."""


class DoubleBackwardError(PenstockError, RuntimeError):
    """``create_graph=True`` was used on a graph whose saved tensors were offloaded."""


class InternalError(PenstockError):
    """A bug in Penstock. Please report it with the message."""


class PenstockWarning(UserWarning):
    """Base of all warnings that Penstock gives."""


class TierDegradedWarning(PenstockWarning):
    """A tier works, but with less than was asked: no direct I/O, no pinned memory, or a failed write."""


class NodeLostWarning(PenstockWarning):
    """A machine was lost; its jobs go on elsewhere from their last checkpoints."""


class SharedModelWarning(PenstockWarning):
    """A job's factory returned a module that somebody else holds too. The fleet trains a copy of it."""


class BudgetNotKeptWarning(PenstockWarning):
    """A step takes more than its budget. The message says how much; with ``strict=True`` it is an error."""


class CompilerDeclinedWarning(PenstockWarning):
    """A planned step was to be compiled and runs node by node instead. The message says why."""


class GraphBreakWarning(PenstockWarning):
    """A step could not be captured as one graph, and is planned in several. The message says where it breaks."""


class OffloadDeclinedWarning(PenstockWarning):
    """Offloading was asked for and is not being done, because it would not pay. The message says by how much."""


class TrackerWarning(PenstockWarning):
    """Metrics could not be written, or a tracker raised. Training goes on; the tracker is told nothing more."""
