"""Sums over the blocks of a streamed graph: gradients of tables, and the time of a pass."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.relational._stream_graph import Cut, StreamBlock, StreamedGraph, TimedPass


class GradientSums:
    """Sums of gradients of tables, in float32 at least."""

    def __init__(self, tables: Sequence[torch.Tensor], wanted: Sequence[bool]):
        self._gradients = [
            torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32)) if wants else None
            for table, wants in zip(tables, wanted, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Size of the sums in bytes."""
        return sum(total.nbytes for total in self._gradients if total is not None)

    def wants(self, number: int) -> bool:
        """Return whether a table wants a gradient."""
        return self._gradients[number] is not None

    def add(self, number: int, where: Any, rows: torch.Tensor) -> None:
        """Add to a table's gradient, at rows that are all different."""
        total = self._gradients[number]
        assert total is not None
        if isinstance(where, torch.Tensor):
            total.index_add_(0, where, rows.to(total.dtype))
        else:
            total[slice(None) if where is None else where] += rows

    def finished(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients in the tables' dtypes."""
        return [
            None if total is None else total.to(table.dtype)
            for total, table in zip(self._gradients, tables, strict=True)
        ]


class GradientSumsOfParts(GradientSums):
    """Sums of gradients, some of which are those of another call."""

    def __init__(
        self, tables: Sequence[torch.Tensor], wanted: Sequence[bool], outer: GradientSums, numbers: Mapping[int, int]
    ):
        own = [wants and number not in numbers for number, wants in enumerate(wanted)]
        super().__init__(tables, own)
        self._outer, self._numbers = outer, numbers

    def wants(self, number: int) -> bool:
        """Return whether a table wants a gradient."""
        return self._outer.wants(self._numbers[number]) if number in self._numbers else super().wants(number)

    def add(self, number: int, where: Any, rows: torch.Tensor) -> None:
        """Add to a table's gradient, at rows that are all different."""
        if number in self._numbers:
            self._outer.add(self._numbers[number], where, rows)
        else:
            super().add(number, where, rows)


class PassClock:
    """The time and the edges of one pass, from when its first block is there."""

    def __init__(self, graph: StreamedGraph, *, is_backward: bool):
        self._graph, self._is_backward = graph, is_backward
        self._start_s: float | None = None
        self._num_blocks = self._num_edges = 0

    def add(self, cut: Cut, start_s: float) -> None:
        """Count a block that was computed since ``start_s``."""
        self._start_s = start_s if self._start_s is None else self._start_s
        self._num_blocks += max(1, len(cut.parts))
        self._num_edges += cut.last_edge - cut.first_edge
        self._graph.work.add(compute_s=time.perf_counter() - start_s)

    def stop(self) -> None:
        """Note the pass."""
        seconds = 0.0 if self._start_s is None else time.perf_counter() - self._start_s
        self._graph.work.passes.append(TimedPass(self._is_backward, self._num_blocks, self._num_edges, seconds))


def waited(
    graph: StreamedGraph, blocks: Iterator[tuple[Cut, StreamBlock | None]]
) -> Iterator[tuple[Cut, StreamBlock | None]]:
    """Yield the blocks, and count how long each was waited for."""
    while True:
        start_s = time.perf_counter()
        item = next(blocks, None)
        graph.work.add(stall_s=time.perf_counter() - start_s)
        if item is None:
            return
        yield item
        del item
