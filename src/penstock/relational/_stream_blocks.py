"""How a streamed graph is cut into blocks for a layer, within the graph's budget, and read ahead of the computation."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Any

import torch

from penstock.devices import backend_of
from penstock.errors import BudgetError
from penstock.relational._peak import input_bytes, step_bytes
from penstock.relational._run import CompiledProgram
from penstock.relational._stream_graph import Cut, StreamBlock, StreamedGraph
from penstock.units import format_bytes

_HEAP_BYTES = 8 * 2**20
"""Bytes that malloc keeps for the threads that read ahead and compute, but at most a quarter of the budget."""
_LIVE = 0.7
"""Share of the rest that a block's tensors may have; malloc keeps freed ones in fragments for the next block."""
_FILLED = 0.9
"""Share of that for which a block's size is chosen, from the blocks before it."""
_INDEX_BYTES = 128
"""Bytes of edges and indexes for each edge or target, before any were built."""
_FIRST_EDGES = 2**16
"""Most edges of the first block, from which the others are estimated."""
_FIRST_EDGE_BYTES = 512
"""Bytes of the budget for each of them."""


class LayerBlocks:
    """The blocks in which one compiled layer goes through a graph; they are chosen when it does so first."""

    def __init__(self, graph: StreamedGraph, compiled: CompiledProgram, item_bytes: int, *, with_positions: bool):
        self.graph, self._compiled, self._item_bytes = graph, compiled, item_bytes
        self.with_positions = with_positions
        self._num_threads = torch.get_num_threads()
        self._most_bytes = int(_LIVE * (graph.limit_bytes - min(_HEAP_BYTES, graph.limit_bytes // 4)))
        self._cuts: list[Cut] | None = None
        self._keys: tuple[Any, ...] = ()
        self._index_bytes = float(_INDEX_BYTES)
        self._most_edges = min(_FIRST_EDGES, graph.limit_bytes // _FIRST_EDGE_BYTES)

    def blocks(self, *, backwards: bool = False) -> Iterator[tuple[Cut, StreamBlock | None]]:
        """Yield all targets with their edges in blocks, read in advance; no block for a target that is cut into parts.

        ``backwards`` begins at the end, where a pass forwards has left the file in memory.
        """
        chosen: list[Cut] = []
        if self.graph.num_sampled is not None:
            read = self._sampled(self.graph.num_sampled)
        elif self._cuts is None:
            read = self._chosen(chosen)
        else:
            chosen = self._cuts
            read = self._read(reversed(chosen) if backwards else iter(chosen))
        with self._ahead(read) as blocks:
            yield from blocks
        if self.graph.num_sampled is None:
            self._cuts = chosen

    def parts(self, cut: Cut) -> Iterator[StreamBlock]:
        """Yield the parts of a target's edges."""
        with self._ahead(self._read(cut.part(*edges) for edges in cut.parts)) as blocks:
            for _, block in blocks:
                assert block is not None
                yield block

    def _ahead(
        self, read: Iterator[tuple[Cut, StreamBlock | None]]
    ) -> "closing[Generator[tuple[Cut, StreamBlock | None], None, None]]":
        """Return the blocks, one read in advance by a thread, on the stream that computes here and frees them."""
        from penstock.unified import in_advance

        streams = backend_of(self.graph.device).streams
        stream: Any = nullcontext() if streams is None else streams.current()

        def on_stream() -> Iterator[tuple[Cut, StreamBlock | None]]:
            with stream:
                yield from read

        return closing(in_advance(on_stream(), ahead=1))

    def learn(self, block: StreamBlock) -> None:
        """Note which indexes the layer has built for a block, so that they are built in advance for the next ones."""
        kept = block.graph.indexes.kept
        if block.graph.num_edges and len(kept.snapshot()) > len(self._keys):
            self._keys = _read_keys(tuple(kept.snapshot()))
            # forward builds some of the indexes only, and comes first
            least = float(_INDEX_BYTES) if self._compiled.wanted else 0.0
            self._index_bytes = max(least, _index_bytes(block) / _size_of(block))

    def _read(self, cuts: Iterator[Cut]) -> Iterator[tuple[Cut, StreamBlock | None]]:
        for cut in cuts:
            yield cut, None if cut.parts else self._block(cut)

    def _block(self, cut: Cut) -> StreamBlock:
        block = self.graph.read(cut, with_positions=self.with_positions)
        block.graph.indexes.build(self._keys)
        return block

    def _chosen(self, chosen: list[Cut]) -> Iterator[tuple[Cut, StreamBlock | None]]:
        """Yield blocks, each as large as those before it suggest, and halved until it fits."""
        first = 0
        while first < self.graph.num_targets:
            cut, block = self._fitting(self.graph.cut(first, self._most_edges))
            chosen.append(cut)
            yield cut, block
            first = cut.last_target

    def _sampled(self, count: int) -> Iterator[tuple[Cut, StreamBlock | None]]:
        """Yield blocks that are spread over the edges."""
        starts, last = self.graph.topology.starts, -1
        for number in range(count):
            place = self.graph.num_edges * (2 * number + 1) // (2 * count)
            first = int(torch.searchsorted(starts, place, right=True)) - 1
            if last <= first < self.graph.num_targets:
                cut, block = self._fitting(self.graph.cut(first, self._most_edges))
                yield cut, block
                last = cut.last_target

    def _fitting(self, cut: Cut) -> tuple[Cut, StreamBlock | None]:
        while True:
            num_edges = cut.last_edge - cut.first_edge
            if num_edges > 2 * self._most_edges and cut.last_target == cut.first_target + 1:
                return cut._replace(parts=self._parts_of(cut)), None
            block = self._block(cut)
            needed = self.bytes_of(block)
            if needed <= self._most_bytes:
                size = num_edges + cut.last_target - cut.first_target
                grown = int(_FILLED * self._most_bytes * size / max(1, needed))
                self._most_edges = max(1, min(grown, 4 * max(size, self._most_edges)))
                return cut, block
            del block
            has_one_target = cut.last_target == cut.first_target + 1
            if num_edges <= 1 and has_one_target:
                raise self._too_small(needed)
            if has_one_target:
                self._most_edges = max(1, int(_FILLED * num_edges * self._most_bytes / needed))
                return cut._replace(parts=self._parts_of(cut)), None
            size = num_edges + cut.last_target - cut.first_target
            self._most_edges = max(1, min(size // 2, int(_FILLED * size * self._most_bytes / needed)))
            cut = self.graph.cut(cut.first_target, self._most_edges)

    def _too_small(self, needed: int) -> BudgetError:
        least = int(1.5 * needed / _LIVE / 0.75) + 1  # others may need more than this one
        return BudgetError(
            f"`budget` must be at least {least} bytes for this layer, which needs as much for one edge, got "
            f"{format_bytes(self.graph.limit_bytes)}: RelationalGraph.stream(path, budget={least})"
        )

    def _parts_of(self, cut: Cut) -> tuple[tuple[int, int], ...]:
        """Return the parts of one target's edges; the first is checked, and all are of its size."""
        size = max(1, min(self._most_edges, cut.last_edge - cut.first_edge))
        while True:
            needed = self.bytes_of(self._block(cut.part(cut.first_edge, cut.first_edge + size)))
            if needed <= _FILLED * self._most_bytes:
                break
            if size == 1:
                raise self._too_small(int(needed / _FILLED))
            size = max(1, min(size // 2, int(_FILLED * size * self._most_bytes / needed)))
        starts = range(cut.first_edge, cut.last_edge, size)
        return tuple((start, min(start + size, cut.last_edge)) for start in starts)

    def bytes_of(self, block: StreamBlock) -> int:
        """Return the bytes that a block takes while it is computed and the next one is read."""
        rows, compiled = block.graph.indexes.count, self._compiled
        inputs = input_bytes(compiled.program, rows, self._item_bytes)
        indexes = max(int(self._index_bytes * _size_of(block)), _index_bytes(block))
        return 2 * indexes + inputs + step_bytes(compiled, rows, self._num_threads)


def _read_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys of indexes without pairs that no other index is made of: only choices of programs needed them."""
    others = [key for key in keys if key[0] != "pairs"]
    return tuple(key for key in keys if key[0] != "pairs" or any(key[1] in other for other in others))


def _size_of(block: StreamBlock) -> int:
    """Return the number of a block's edges and targets."""
    return max(1, block.graph.num_edges + block.graph.num_targets)


def _index_bytes(block: StreamBlock) -> int:
    """Return the bytes of a block's edges and indexes."""
    edges = block.graph.indexes.edges
    arrays = (edges.edge_index, edges.edge_type, *edges.node_types, block.sources, block.positions)
    return sum(array.nbytes for array in arrays if array is not None) + block.graph.indexes.kept.nbytes


def item_bytes_of(tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Return the bytes of the largest number among tensors."""
    return max((tensor.dtype.itemsize for pair in tensors.values() for tensor in pair), default=4)
