"""All exceptions and warnings that a user of Penstock can meet.

Misuse raises ``ValueError`` or ``TypeError``. The classes here are for everything else that can go wrong, including
bugs in Penstock.
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
    "JobResumedWarning",
    "JobRetriedWarning",
    "NodeLostError",
    "NodeLostWarning",
    "OffloadDeclinedWarning",
    "PenstockError",
    "PenstockWarning",
    "RankError",
    "SharedModelWarning",
    "TierDegradedWarning",
    "TierFullError",
    "TierReadError",
    "TierWriteError",
    "TrackerWarning",
]


class PenstockError(Exception):
    """The base of all errors that Penstock defines."""


class BudgetError(PenstockError, ValueError):
    """A budget is too small. The message names the smallest one that works, and what needs it."""


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
    """Bytes could not be written into a tier. The storage that they came from still has them.

    Attributes: ``tier`` and ``file`` (names), ``offset`` and ``size_bytes`` of the failed request, ``errno``.
    """

    _verb = "writing"
    _advice = "Nothing is lost: the storage stays where it was."


class TierReadError(_TransferError):
    """Bytes in a tier could not be read back, or differ from what was written. They are never replaced by other
    numbers.

    Attributes: ``tier`` and ``file`` (names), ``offset`` and ``size_bytes`` of the failed request, ``errno`` (``None``
    if the system reported none, as for a checksum that differs).
    """

    _verb = "reading"
    _advice = "The step cannot go on without these bytes; check the device with `dmesg` and its SMART data."


class ForkedProcessError(PenstockError):
    """A forked child asked for parked bytes. They belong to the parent, and the child does not have its lanes."""


class CaptureError(PenstockError):
    """A step could not be captured as one graph that can be planned. The message names the line and what to do."""


class CheckpointError(PenstockError):
    """A checkpoint could not be written, is damaged, or belongs to another job. Older ones are untouched."""


class FeatureFileError(PenstockError, ValueError):
    """A file of features is damaged, cut short, or of an unknown kind. Nothing in it was used."""


class FleetStateError(PenstockError):
    """The database of a fleet, in its run's folder, cannot be used."""


class NodeLostError(PenstockError):
    """No machine is left that could train a fleet's jobs. Their checkpoints are complete."""


class RankError(PenstockError, RuntimeError):
    """A process of a ``torch.distributed`` group has failed, is lost, or disagrees with the others.

    Attribute: ``ranks``, the numbers of those ranks in the group.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]):
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        return partial(type(self), str(self), ranks=self.ranks), ()


class DoubleBackwardError(PenstockError, RuntimeError):
    """``create_graph=True`` was used on a graph whose saved tensors were offloaded."""


class InternalError(PenstockError):
    """A bug in Penstock. Please report it with the message."""


class PenstockWarning(UserWarning):
    """The base of all warnings that Penstock gives."""


class TierDegradedWarning(PenstockWarning):
    """A tier works, but not as requested: without direct I/O or pinned memory, or a write has failed."""


class NodeLostWarning(PenstockWarning):
    """A machine was lost. Its jobs continue elsewhere from their last checkpoints."""


class SharedModelWarning(PenstockWarning):
    """A job's factory returned a module that something else also refers to. The fleet trains a copy of it."""


class BudgetNotKeptWarning(PenstockWarning):
    """A step takes more than its budget. The message says how much. With ``strict=True`` this is an error."""


class CompilerDeclinedWarning(PenstockWarning):
    """A planned step should be compiled but runs node by node instead. The message says why."""


class GraphBreakWarning(PenstockWarning):
    """A step could not be captured as one graph, and is planned in several. The message says where it breaks."""


class OffloadDeclinedWarning(PenstockWarning):
    """Offloading was requested but is not done, because it would not pay off. The message gives the figures."""


class JobRetriedWarning(PenstockWarning):
    """A job of a fleet failed and begins again from its last checkpoint, as `Fleet(retry=...)` asks for."""


class JobResumedWarning(PenstockWarning):
    """A job that resumes is not as it was: it had failed and is left alone, its settings differ, or its batches do."""


class TrackerWarning(PenstockWarning):
    """Metrics could not be written, or a tracker raised. Training goes on without further calls of the tracker."""
