"""Mini-batches that are sampled and read while the training step runs."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

from penstock.arguments import checked
from penstock.devices import StreamEvent, backend_of, is_accelerator
from penstock.ranks import rank_in
from penstock.unified._counts import Counts
from penstock.unified._graph import as_seeds
from penstock.unified._sampler import NeighborSampler, Sample
from penstock.unified._tensor import UnifiedTensor
from penstock.unified._tiered import TieredFeatures
from penstock.units import format_fields

Item = TypeVar("Item")
Features = torch.Tensor | TieredFeatures
"""A table that is indexed by nodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One mini-batch."""

    sample: Sample
    """Nodes and edges around the seeds."""
    seeds: torch.Tensor
    """Seed nodes of the mini-batch, ``int64 [seeds]``, in host memory; they come first in ``nodes``."""
    x: Any
    """Feature rows of every node of the sample, ``[nodes, ...]``; a dict if several features were given."""
    y: torch.Tensor | None
    """Labels of the seeds; ``None`` if none were given."""

    @property
    def nodes(self) -> torch.Tensor:
        """Node numbers, seeds first."""
        return self.sample.nodes

    @property
    def edge_index(self) -> torch.Tensor:
        """Edges of the sample, as places in ``nodes``."""
        return self.sample.edge_index


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """The time that an epoch spent, by activity. Sampling and reading run in their own threads, next to the step."""

    num_batches: int = 0
    """Mini-batches that were taken."""
    num_nodes: int = 0
    """Nodes whose rows were read."""
    sample_s: float = 0.0
    """Seconds of sampling."""
    gather_s: float = 0.0
    """Seconds of reading rows."""
    stall_s: float = 0.0
    """Seconds that the step waited for a mini-batch; the time that overlapping did not hide."""
    peak_in_flight_bytes: int = 0
    """The most bytes of tiered rows that were read in advance. Mini-batches that the step has taken do not count."""
    wall_s: float = 0.0
    """Seconds from the first request of an epoch to its end."""

    @property
    def hidden_share(self) -> float:
        """Share of sampling and reading that overlapped with the step, 0 to 1."""
        total = self.sample_s + self.gather_s
        return max(0.0, 1 - self.stall_s / total) if total else 1.0

    def __str__(self) -> str:
        return format_fields(self, "hidden_share")


class Loader:
    """A loader that samples the neighborhoods of seeds and reads their features ``ahead`` batches in advance.

    ``features`` is a `TieredFeatures`, a tensor, or a dict of them; ``labels`` is a tensor for all nodes. The loader
    reads no more in advance than tiered features allow (``in_flight_bytes``), except that one mini-batch is always
    allowed. Order and draws depend only on ``seed`` and the epoch. If you leave an epoch early, its threads end; an
    error in a thread is raised here. With ``ahead=0`` everything runs in the calling thread.

    With a ``group`` of ``torch.distributed``, rank ``r`` of ``n`` gets mini-batches ``r``, ``r + n``, ... of the order
    of one process, with the same draws; ``batch_size`` is per rank. All ranks take the same number of steps: in the
    last, the remaining seeds are divided between them, unless ``drop_last``; a rank for which none is left repeats
    others.

    Raises ``ValueError`` for an invalid ``batch_size`` or ``ahead``, for labels of fewer nodes, and for repeated seeds;
    ``IndexError`` and ``TypeError`` for other seeds that are not nodes.
    """

    @checked("Loader(sampler, features, seeds, batch_size=512)")
    def __init__(
        self,
        sampler: NeighborSampler,
        features: Features | Mapping[str, Features],
        seeds: torch.Tensor,
        *,
        batch_size: int,
        labels: torch.Tensor | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        ahead: int = 2,
        seed: int = 0,
        group: distributed.ProcessGroup | None = None,
    ):
        if batch_size < 1 or ahead < 0:
            raise ValueError(f"`batch_size` must be at least 1 and `ahead` at least 0, got {batch_size} and {ahead}")
        self.sampler, self.features, self.labels = sampler, features, labels
        if labels is not None and len(labels) < sampler.graph.num_nodes:
            raise ValueError(
                f"`labels` must have one entry for each of {sampler.graph.num_nodes} nodes, got {len(labels)}: give "
                "the labels of all nodes, not labels[seeds]"
            )
        self.seeds = as_seeds(seeds, sampler.graph.num_nodes).cpu()
        if len(self.seeds.unique()) != len(self.seeds):
            raise ValueError(
                "a node is among the seeds twice, but a mini-batch can hold it only once: Loader(..., seeds.unique())"
            )
        self.batch_size, self.ahead, self.seed = batch_size, ahead, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self._rank_in = (0, 1) if group is None else rank_in(group)
        """This process's rank, and the number of ranks."""
        self.epoch = 0
        """Number of the next epoch; set it to continue where another run stopped."""
        self._counts = Counts(LoaderStatistics())

    def __len__(self) -> int:
        whole, rest = divmod(len(self.seeds), self.batch_size * self._rank_in[1])
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        start_s = time.perf_counter()
        gate, beside = _Gate(self._in_flight()), _Beside(self.sampler.device, self._tables())

        row_bytes = sum(table.row_bytes for table in self._tables() if isinstance(table, TieredFeatures))

        def sample(numbered: tuple[int, torch.Tensor]) -> tuple[torch.Tensor, Sample]:
            with beside():
                return self._sample(epoch, *numbered)

        def read(sampled: tuple[torch.Tensor, Sample]) -> tuple[Batch, Any, int]:
            held = len(sampled[1].nodes) * row_bytes
            gate.take(held)
            with beside():
                return self._read(sampled), beside.mark(), held

        batches = _pipeline(self._numbered(epoch), [sample, read], self.ahead, self._counts, gate.open)
        with contextlib.closing(batches):
            try:
                for batch, mark, held in batches:
                    gate.give(held)  # from here on the user holds it
                    beside.hand_over(batch, mark)
                    self._counts.add(num_batches=1, num_nodes=len(batch.nodes))
                    yield batch
            finally:
                self._counts.raise_to(peak_in_flight_bytes=gate.peak_bytes)
                self._counts.add(wall_s=time.perf_counter() - start_s)

    def statistics(self) -> LoaderStatistics:
        """Return the statistics since the last `reset_statistics`."""
        return self._counts.now()

    def reset_statistics(self) -> LoaderStatistics:
        """Return the statistics so far, and start again."""
        return self._counts.reset()

    def _numbered(self, epoch: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the seeds of this rank's mini-batches, and their numbers among those of all ranks."""
        rank, num_ranks = self._rank_in
        for turn, seeds in enumerate(self._seeds_of(epoch)):
            yield turn * num_ranks + rank, seeds

    def _seeds_of(self, epoch: int) -> Iterator[torch.Tensor]:
        seeds = self.seeds
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            seeds = seeds[torch.randperm(len(seeds), generator=generator, device="cpu")]
        rank, num_ranks = self._rank_in
        for turn in range(len(self)):
            start = turn * num_ranks * self.batch_size
            batches = seeds[start : start + num_ranks * self.batch_size].tensor_split(num_ranks)
            # a rank for which no seed is left repeats another's, since all must take as many steps
            yield batches[rank] if len(batches[rank]) else batches[0]

    def _sample(self, epoch: int, number: int, seeds: torch.Tensor) -> tuple[torch.Tensor, Sample]:
        start_s = time.perf_counter()
        # a number of its own for each mini-batch, so that draws depend neither on threads nor on what ran before
        sample = self.sampler.sample(seeds, number=(self.seed << 40) + (epoch << 20) + number)
        self._counts.add(sample_s=time.perf_counter() - start_s)
        return seeds, sample

    def _read(self, sampled: tuple[torch.Tensor, Sample]) -> Batch:
        seeds, sample = sampled
        start_s = time.perf_counter()
        rows: Any
        if isinstance(self.features, Mapping):
            rows = {name: read_features(table, sample.nodes) for name, table in self.features.items()}
        else:
            rows = read_features(self.features, sample.nodes)
        labels = None if self.labels is None else read_features(self.labels, seeds)
        self._counts.add(gather_s=time.perf_counter() - start_s)
        return Batch(sample=sample, seeds=seeds, x=rows, y=labels)

    def _tables(self) -> list[Features]:
        return list(self.features.values()) if isinstance(self.features, Mapping) else [self.features]

    def _in_flight(self) -> int | None:
        limits = [table.in_flight_bytes for table in self._tables() if isinstance(table, TieredFeatures)]
        return min((limit for limit in limits if limit is not None), default=None)


def read_features(features: Features, nodes: torch.Tensor) -> torch.Tensor:
    """Return the rows of nodes."""
    if isinstance(features, torch.Tensor) and not isinstance(features, UnifiedTensor | TieredFeatures):
        nodes = nodes.to(features.device)
    return features[nodes]


class _Beside:
    """A stream for what an accelerator samples or reads in advance; does nothing without an accelerator."""

    def __init__(self, sampler: torch.device, tables: list[Features]):
        devices = [sampler, *(table.device for table in tables if isinstance(table, TieredFeatures))]
        device = next((device for device in devices if is_accelerator(device)), None)
        self._streams = None if device is None else backend_of(device).streams
        if self._streams is not None:
            self._stream = self._streams.create()
            now = self._streams.record(self._streams.current(), is_timed=False)
            self._streams.wait(self._stream, now)  # labels and features may just have been made on the current stream

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this stream is the current one."""
        return contextlib.nullcontext() if self._streams is None else self._stream

    def mark(self) -> StreamEvent | None:
        """Record an event after all work on the stream so far."""
        return None if self._streams is None else self._streams.record(self._stream, is_timed=False)

    def hand_over(self, batch: Batch, mark: StreamEvent | None) -> None:
        """Make the step's stream wait for a batch, and keep the batch's memory until the step is done with it."""
        if self._streams is None or mark is None:
            return
        rows = batch.x.values() if isinstance(batch.x, Mapping) else [batch.x]
        sample, stream = batch.sample, self._streams.current()
        self._streams.wait(stream, mark)
        for tensor in (*rows, batch.y, sample.nodes, sample.rows, sample.cols, sample.edges, sample.seeds):
            if tensor is not None and is_accelerator(tensor.device):
                # the user holds it from here on, and nobody tells us when it is freed
                self._streams.share(tensor.untyped_storage(), stream)


@checked("penstock.unified.in_advance(batches, ahead=2)", ahead=0)
def in_advance(batches: Iterable[Item], ahead: int = 2) -> Generator[Item, None, None]:
    """Yield the items of an iterable, which a separate thread produces up to ``ahead`` items in advance.

    Use it for other loaders. PyG's loaders read rows in the process that iterates, between steps; with this they read
    while the step runs. Items in advance are not charged to any account, and on CUDA they are made on the default
    stream. If you leave the loop early, the thread ends; an error in it is raised here.
    """
    yield from _pipeline(iter(batches), [lambda item: item], ahead, Counts(LoaderStatistics()))


class _Gate:
    """A limit on bytes in flight: waits until they fit, or nothing else is in flight, so a large batch passes alone."""

    def __init__(self, limit: int | None):
        self._limit, self._held, self.peak_bytes = limit, 0, 0
        self._changed = threading.Condition()

    def take(self, size_bytes: int) -> None:
        """Block until these bytes may be held."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._held or self._limit is None or self._held + size_bytes <= self._limit
            )
            self._held += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._held)

    def give(self, size_bytes: int) -> None:
        """Give the bytes back: somebody else holds them now."""
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()

    def open(self) -> None:
        """Remove the limit, so that nobody waits any more."""
        with self._changed:
            self._limit = None
            self._changed.notify_all()


class _Failure:
    """An error that is passed to the thread that takes mini-batches."""

    def __init__(self, error: BaseException):
        self.error = error


_END = object()


def _pipeline(
    source: Iterator[Any],
    steps: list[Callable[[Any], Any]],
    ahead: int,
    counts: Counts[LoaderStatistics],
    let_go: Callable[[], None] = lambda: None,
) -> Generator[Any, None, None]:
    """Yield the source's items after all steps; each step has its own thread, and at most ``ahead`` results wait."""
    if not ahead:
        for item in source:
            start_s = time.perf_counter()
            for step in steps:
                item = step(item)
            counts.add(stall_s=time.perf_counter() - start_s)
            yield item
        return
    ends = threading.Event()
    room = threading.Semaphore(ahead)  # acquired when a mini-batch is begun, released when it is taken
    pipes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in steps]
    threads = []
    for number, step in enumerate(steps):
        take = _taken(source, room, ends) if number == 0 else _received(pipes[number - 1], ends)
        thread = threading.Thread(target=_work, args=(take, step, pipes[number]), name="penstock-loader", daemon=True)
        thread.start()
        threads.append(thread)
    try:
        while True:
            start_s = time.perf_counter()
            item = pipes[-1].get()
            if item is _END:
                return
            counts.add(stall_s=time.perf_counter() - start_s)
            if isinstance(item, _Failure):
                raise item.error
            room.release()
            yield item
    finally:
        ends.set()
        let_go()  # wakes threads that wait for something else
        room.release()
        for pipe in pipes:
            pipe.put(_END)
        for thread in threads:
            thread.join()


def _work(take: Iterator[Any], step: Callable[[Any], Any], put: "queue.SimpleQueue[Any]") -> None:
    try:
        for item in take:
            put.put(item if isinstance(item, _Failure) else step(item))
    except BaseException as error:
        put.put(_Failure(error))
    put.put(_END)


def _taken(source: Iterator[Any], room: threading.Semaphore, ends: threading.Event) -> Iterator[Any]:
    while True:
        room.acquire()
        item = _END if ends.is_set() else next(source, _END)
        if item is _END:
            return
        yield item


def _received(pipe: "queue.SimpleQueue[Any]", ends: threading.Event) -> Iterator[Any]:
    while not ends.is_set():
        item = pipe.get()
        if item is _END:
            return
        yield item
