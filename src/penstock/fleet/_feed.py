"""The batches of a job in the order of a training script, and its position in them."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.fleet._batch import Structure, flatten
from penstock.fleet._job import Job
from penstock.fleet._random import Randomness

_END = object()
_MARKED = 64
"""Numbers of a tensor that tell batches apart."""


@dataclass(slots=True)
class Position:
    """The position of a job in its training."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epoch of the next batch."""
    batch: int = 0
    """Batches of that epoch already taken."""
    micro: int = 0
    """Batches accumulated since the last step."""
    num_samples: int = 0
    """Samples trained on, as given by the first dimension of batches."""

    def is_end_of(self, job: Job) -> bool:
        """Whether the job has done its last step."""
        return self.step >= job.steps if job.steps is not None else self.epoch >= (job.epochs or 0)


class DataReaders:
    """Data that only one job of a fleet may read, each with that job. The engine's lock, ``condition``, guards it."""

    def __init__(self, condition: threading.Condition):
        self._condition = condition
        self._readers: list[tuple[object, str]] = []

    def add(self, name: str, feed: "Feed") -> None:
        """Add the data of a job. Raise ``ValueError`` if another job already reads it and only one job can."""
        for field, data in (("data", feed.data), ("validation", feed.validation)):
            if not (isinstance(data, Iterator) or getattr(data, "persistent_workers", False)):
                continue  # each job has its own iterator over it
            with self._condition:
                reader = next((reader for known, reader in self._readers if known is data), name)
                self._readers.append((data, name))
            if reader != name:
                raise ValueError(
                    f"job {name!r}: {field}() returned the {type(data).__name__} that job {reader!r} already "
                    f"reads, and each of its batches can be read only once. Make one per job: {field}=lambda: "
                    "DataLoader(dataset)"
                )

    def remove(self, name: str) -> None:
        """Let others read the data of a job. The caller holds the lock."""
        self._readers = [reader for reader in self._readers if reader[1] != name]


class Feed:
    """The batches of ``data`` from ``position`` on. It advances ``position``."""

    def __init__(
        self,
        job: Job,
        data: Iterable[Any],
        validation: Iterable[Any] | None,
        randomness: Randomness,
        position: Position,
        again: Callable[[], Iterable[Any]],
    ):
        self.data, self._again = data, again
        """The data, and a function that makes it again as it was made first."""
        self.validation = validation
        """The validation batches; ``None``: no validation."""
        self.epoch_random: dict[str, Any] | None = None
        """The job's random state at the start of the current pass, or of the last one between two."""
        self.seen = ["", ""]
        """Marks of the first and of the last batch of that pass, by which a checkpoint tells whether data repeat."""
        self._job, self._randomness, self._position = job, randomness, position
        self._batches: Iterator[Any] | None = None
        self._peeked: tuple[list[torch.Tensor], Structure] | None = None

    def peek(self) -> tuple[list[torch.Tensor], Structure]:
        """Return the batch that `next_batch` will return."""
        while self._peeked is None:
            self._peeked = self.next_batch()
        return self._peeked

    def next_batch(self) -> tuple[list[torch.Tensor], Structure] | None:
        """Return the next training batch; ``None`` at the end of a pass over the data, after which another begins.

        Raises what the data raises, and ``ValueError`` for data without batches.
        """
        if self._peeked is not None:
            peeked, self._peeked = self._peeked, None
            return peeked
        position = self._position
        if self._batches is None:
            self.epoch_random = self._randomness.state()
        with self._randomness.swapped_in():
            if self._batches is None:
                self._batches = iter(self.data)
            batch = next(self._batches, _END)
        if batch is not _END:
            self._note(position.batch, batch)
            position.batch += 1
            return flatten(batch)
        if not position.batch:
            raise ValueError(
                f"job {self._job.name!r}: its data yields no batch in epoch {position.epoch}; data() must return "
                "something that can be iterated again, such as a list or a DataLoader, not a generator"
            )
        self._batches = None
        position.epoch, position.batch = position.epoch + 1, 0
        return None

    def count_steps(self) -> int:
        """Return the optimizer steps of the whole job; an estimate if the data has no length."""
        if self._job.steps is not None:
            return self._job.steps
        try:
            num_batches = len(self.data)  # type: ignore[arg-type]  # where it has one
        except TypeError:
            return max(self._position.step + 1, 100)
        return max(1, (self._job.epochs or 1) * num_batches // self._job.accumulate)

    def _note(self, number: int, batch: Any) -> None:  # any: what the data yields
        mark = _mark(batch)
        self.seen = [mark, mark] if not number else [self.seen[0], mark]

    def skip_to(self, position: Position, epoch_random: dict[str, Any] | None, seen: Sequence[str] = ()) -> bool:
        """Continue at ``position`` of a checkpoint; return whether the data is known to go on as it would have.

        The batches of the pass that came before are taken and dropped. Data may have a state of its own that goes on
        from pass to pass: a generator, a counter. If the batches are not those that were ``seen``, the data is made
        again, and the passes before are begun, or read to their ends, if that brings back what was seen.
        """
        self._position, self._batches, self.epoch_random = position, None, epoch_random
        if epoch_random is None:
            return True
        can_begin_before = seen and position.epoch > (not position.batch)
        for reads in (None, False, True) if can_begin_before else (None,):
            if reads is not None:
                self.data = self._again()
            self._replay(position, epoch_random, reads=reads)
            if not seen or self.seen == list(seen):
                return True
        return False

    def _replay(self, position: Position, epoch_random: dict[str, Any], *, reads: bool | None) -> None:
        """Bring the data to a position. ``reads``: whether passes before are read whole, or begun; ``None``: neither.

        Between two passes, the last one is read again.
        """
        now, self.seen = self._randomness.state(), ["", ""]
        num_passes = position.epoch if position.batch else position.epoch - 1
        with self._randomness.swapped_in():
            for _ in range(0 if reads is None else num_passes):
                for _ in itertools.islice(self.data, None if reads else 1):
                    pass
        self._randomness.load(epoch_random)
        with self._randomness.swapped_in():
            batches = iter(self.data)
            for number, batch in enumerate(itertools.islice(batches, position.batch or None)):
                self._note(number, batch)
            self._batches = batches if position.batch else None
        self._randomness.load(now)


def _mark(batch: Any) -> str:  # any: what the data yields
    """Return a text that differs for batches that differ: from shapes, dtypes and some numbers of each tensor."""
    mark = hashlib.blake2b(digest_size=12)
    for leaf in flatten(batch)[0]:
        mark.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        if leaf.layout is torch.strided and leaf.numel():
            places = torch.arange(0, leaf.numel(), max(1, leaf.numel() // _MARKED))[:_MARKED]
            few = leaf.detach()[torch.unravel_index(places, leaf.shape)] if leaf.dim() else leaf  # copies only these
            mark.update(repr(few.tolist()).encode())
    return mark.hexdigest()
