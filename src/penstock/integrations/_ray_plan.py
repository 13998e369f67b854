"""The assignment of jobs to nodes of a fleet: longest remaining time first, to the node with the least work left.

This is longest-processing-time-first list scheduling (Graham, 1969), which on equal devices ends within 4/3 of the
optimum. A node holds twice as many jobs as devices, so that each device has another one to run while a job waits for
its bytes. The other jobs wait at the driver, and so do not have to move. Only when none waits there does a job leave a
loaded node for an idle one, if that ends sooner by more than it costs. Cost: jobs times nodes. Known gap: devices are
assumed to be equally fast.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

_JOBS_PER_DEVICE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLoad:
    """The time and memory that a job needs."""

    name: str
    """Name of the job."""
    remaining_s: float | None = None
    """Seconds of work left on one device; ``None`` before it was measured, 0 for a paused job."""
    size_bytes: int | None = None
    """Host memory that it may take; ``None`` before it was measured."""
    begin_s: float = 0.0
    """Seconds that a node takes to begin with it."""
    is_paused: bool = False
    """Whether a user has paused it."""
    can_move: bool = True
    """Whether it has begun and is not already leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """A node and its jobs."""

    name: str
    """Name of the node."""
    num_devices: int
    """Number of devices, at least 1."""
    host_bytes: int | None = None
    """Host memory for jobs; ``None`` if a disk takes the rest."""
    jobs: tuple[JobLoad, ...] = ()
    """Jobs of the node, in no order."""

    @property
    def active(self) -> list[JobLoad]:
        """Jobs that are not paused."""
        return [job for job in self.jobs if not job.is_paused]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The assignment of a waiting job to a node."""

    job: str
    """Name of the job."""
    node: str
    """Name of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The move of a job from one node to another."""

    job: str
    """Name of the job."""
    source: str
    """Node on which the job is."""
    target: str
    """Node to which it goes."""


def assign(nodes: Sequence[NodeLoad], waiting: Sequence[JobLoad]) -> list[Assignment]:
    """Return where waiting jobs go now, without those that fit nowhere yet. Unmeasured ones come first, in order."""
    everything = [*waiting, *(job for node in nodes for job in node.jobs)]
    guess_s = max((job.remaining_s for job in everything if job.remaining_s is not None), default=1.0)
    guess_bytes = max((job.size_bytes for job in everything if job.size_bytes is not None), default=None)
    places = {node.name: node for node in nodes}
    chosen = []
    for job in sorted(waiting, key=lambda job: -_seconds(job, float("inf"))):
        room = [node for node in places.values() if _has_room(node, job, guess_bytes)]
        if not room:
            continue
        best = min(room, key=lambda node: (_work_s(node.jobs, guess_s) / node.num_devices, len(node.jobs)))
        places[best.name] = replace(best, jobs=(*best.jobs, job))
        chosen.append(Assignment(job=job.name, node=best.name))
    return chosen


def move(nodes: Sequence[NodeLoad], least_gain_s: float = 1.0) -> Move | None:
    """Return the move with the highest gain for its two nodes, if it gains more than it costs plus ``least_gain_s``."""
    best: tuple[float, Move] | None = None
    for source in nodes:
        if len(source.active) <= source.num_devices:
            continue
        for target in nodes:
            if len(target.active) >= target.num_devices:
                continue
            for job in source.active:
                if job.remaining_s is None or not job.can_move or not _has_room(target, job, job.size_bytes):
                    continue
                gain_s = _gain_s(source, target, job)
                if gain_s > least_gain_s and (best is None or gain_s > best[0]):
                    best = (gain_s, Move(job=job.name, source=source.name, target=target.name))
    return None if best is None else best[1]


def _gain_s(source: NodeLoad, target: NodeLoad, job: JobLoad) -> float:
    left = [staying for staying in source.jobs if staying is not job]
    came = [*target.jobs, replace(job, remaining_s=_seconds(job, 0.0) + job.begin_s)]
    before_s = max(_end_s(source.jobs, source), _end_s(target.jobs, target))
    return before_s - max(_end_s(left, source), _end_s(came, target))


def _end_s(jobs: Sequence[JobLoad], node: NodeLoad) -> float:
    """Return when a node ends: no job is on two devices at once."""
    longest_s = max((_seconds(job, 0.0) for job in jobs), default=0.0)
    return max(_work_s(jobs, 0.0) / node.num_devices, longest_s)


def _work_s(jobs: Iterable[JobLoad], guess_s: float) -> float:
    return sum(_seconds(job, guess_s) for job in jobs)


def _seconds(job: JobLoad, guess_s: float) -> float:
    return guess_s if job.remaining_s is None else job.remaining_s


def _has_room(node: NodeLoad, job: JobLoad, guess_bytes: int | None) -> bool:
    """Return whether a node has room for a job.

    An unmeasured job is assumed to be as large as the largest known one. Before one is known, no job waits on a node.
    """
    if not node.jobs:
        return True
    if len(node.active) >= node.num_devices * (1 if guess_bytes is None else _JOBS_PER_DEVICE):
        return False
    needed = [guess_bytes or 0 if each.size_bytes is None else each.size_bytes for each in (*node.jobs, job)]
    return node.host_bytes is None or sum(needed) <= node.host_bytes
