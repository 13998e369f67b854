"""Writing a graph to a file, in bounded memory, from edges in any order.

Edges are sorted by target in two passes, since they need not fit in memory: the first writes them to files of some
consecutive targets each, which have no name; the second sorts one such file after the other by counting.
"""

import contextlib
import dataclasses
import itertools
import mmap
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.arguments import checked, must_be
from penstock.storages import as_plain
from penstock.tiers import Size
from penstock.unified._aligned import header_page, read_at
from penstock.unified._graph import Graph, by_target, type_for
from penstock.unified._graph_file import EXAMPLE, MAGIC, VERSION, GraphHeader, checksums
from penstock.unified._write import new_file, progress_bar, write_at
from penstock.units import parse_bytes

_NUM_PARTS = 256
"""The most files of the first pass."""
_EDGE_BYTES = 96
"""Bytes of memory for each edge that is sorted."""
_PASSED_BYTES = 160
"""Bytes of memory for each edge that the first pass takes."""
_BLOCK_EDGES = 4 * 2**20
"""The most edges that are taken at once."""
_MOST_BYTE_TYPES = 256
"""The most edge types of which each takes a byte."""


@checked(EXAMPLE, num_nodes=0, num_sources=0)
def write_graph(
    path: str | os.PathLike[str],
    edges: torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | Iterable[Any]
    | Graph,  # any: parts of the first two kinds
    *,
    num_nodes: int | None = None,
    num_sources: int | None = None,
    num_types: int | None = None,
    positions: bool = True,
    memory: Size = "1GiB",
    progress: bool = True,
) -> Path:
    """Write a graph to a file that `open_graph` maps. Return the path.

    ``edges`` is an ``edge_index`` (``int64 [2, edges]``: sources, then targets), a `Graph`, or anything that yields
    parts of an ``edge_index``, so that the edges need never be in memory together; then ``num_nodes`` must be given.
    Edges with types are pairs of an ``edge_index`` and of types, ``int64 [edges]`` from 0, together or in parts;
    ``num_types`` is their number, if it is more than occur. Sources and targets are the same nodes, unless
    ``num_sources`` gives the number of sources of another type. Edges of a target keep their order. ``positions``:
    whether the file holds the number of each edge as it was given (8 bytes an edge), so that `Sample.edges` can index
    features of edges; without, they are places in the file. ``memory`` bounds what sorting takes; beside the file, 8 to
    32 bytes an edge are needed on its disk for a while.

    Raises ``ValueError`` for edges whose ends are not nodes, for types outside of ``num_types`` or of some parts only,
    ``OSError`` for a disk that is full or cannot be written; an existing file of that name stays as it was.
    """
    path = Path(path)
    if not path.name:
        raise ValueError(f"`path` must name a file, got {str(path)!r}: {EXAMPLE}")
    if isinstance(edges, Graph):
        positions = positions and edges.positions is not None
        nodes, sources = edges.num_nodes, edges.num_sources
    else:
        nodes, sources = _sizes(edges, num_nodes, num_sources)
    with new_file(path) as file:
        if isinstance(edges, Graph):
            _copy(edges, file, has_positions=positions)
            return path
        most_bytes = parse_bytes(memory)
        with _bar(edges, path, progress) as advance:
            parts = _parts(edges, nodes, sources, most_bytes // _PASSED_BYTES, advance)
            _sort(
                parts, file, nodes, sources, path.parent, most_edges=max(1, most_bytes // _EDGE_BYTES),
                has_positions=positions, num_types=num_types,
            )  # fmt: skip
    return path


def _sizes(edges: Any, num_nodes: int | None, num_sources: int | None) -> tuple[int, int]:
    """Return the numbers of targets and of sources."""
    edges = edges[0] if _is_typed(edges) else edges
    if num_nodes is None and not isinstance(edges, torch.Tensor):
        raise ValueError(f"`num_nodes` must be given for edges that come in parts: {EXAMPLE}")
    if num_nodes is None:
        ends = _checked_part(edges).amax(1).tolist() if edges.numel() else [-1, -1]
        num_nodes = 1 + (max(ends) if num_sources is None else ends[1])
    return num_nodes, num_nodes if num_sources is None else num_sources


def _is_typed(part: Any) -> bool:
    """Return whether a part is a pair of an ``edge_index`` and of types."""
    is_pair = (
        isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(array, torch.Tensor) for array in part)
    )
    return is_pair and part[1].dim() == 1


def _checked_part(part: Any) -> torch.Tensor:
    if not isinstance(part, torch.Tensor) or part.dim() != 2 or len(part) != 2 or part.dtype is not torch.int64:
        raise must_be("edges", "int64 [2, edges] with sources above targets, or what yields such parts", part, EXAMPLE)
    return as_plain("edges", part)


def _parts(
    edges: Any, num_nodes: int, num_sources: int, most_edges: int, advance: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield the edges in parts of bounded size with their types, checked."""
    most_edges = min(_BLOCK_EDGES, max(1, most_edges))
    begin, is_typed = 0, None
    for part in [edges] if isinstance(edges, torch.Tensor) or _is_typed(edges) else edges:
        if is_typed not in (None, _is_typed(part)):
            raise ValueError(f"`edges` must all have types or none, got both kinds from number {begin} on: {EXAMPLE}")
        is_typed = _is_typed(part)
        ends, types = part if is_typed else (part, None)
        ends = _checked_part(ends)
        types = None if types is None else _checked_types(as_plain("edges", types), ends)
        for first in range(0, ends.shape[1], most_edges):
            piece = ends[:, first : first + most_edges].cpu()
            low, (most_source, most_target) = int(piece.min()), piece.amax(1).tolist()
            if low < 0 or most_source >= num_sources or most_target >= num_nodes:
                raise ValueError(
                    f"`edges` must lead from nodes below {num_sources} to nodes below {num_nodes}; those from "
                    f"number {begin} on have sources up to {most_source}, targets up to {most_target}, and the "
                    f"lowest number is {low}: {EXAMPLE}"
                )
            yield piece, None if types is None else types[first : first + most_edges].cpu()
            begin += piece.shape[1]
            advance(piece.shape[1])


def _checked_types(types: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if types.dtype is not torch.int64 or len(types) != ends.shape[1] or (len(types) and int(types.min()) < 0):
        raise ValueError(
            f"types of edges must be int64 [{ends.shape[1]}] from 0, got {types.dtype} {list(types.shape)}: "
            "write_graph('edges.graph', (edge_index, edge_type), num_nodes=1000)"
        )
    return types


class _Part:
    """The edges of some consecutive targets, in a file without a name: (source, target[, number][, type])."""

    def __init__(self, directory: Path, dtype: torch.dtype, width: int):
        self._file: Any = tempfile.TemporaryFile(dir=directory, buffering=2**14)
        self._dtype, self._width, self.num_edges = dtype, width, 0

    def add(self, records: torch.Tensor) -> None:
        self._file.write(memoryview(records.numpy()).cast("B"))  # type: ignore[arg-type]
        self.num_edges += len(records)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return records, ``[edges, 2 to 4]``."""
        self._file.flush()
        records = torch.empty(end - begin, self._width, dtype=self._dtype, device="cpu")
        if begin == end:
            return records
        view, offset = memoryview(records.numpy()).cast("B"), begin * self._width * self._dtype.itemsize  # type: ignore[arg-type]
        if read_at(self._file.fileno(), view, offset) < len(view):
            raise OSError("a temporary file of edges is shorter than what was written to it")
        return records

    def close(self) -> None:
        self._file.close()


def _sort(
    parts: Iterator[tuple[torch.Tensor, torch.Tensor | None]],
    file: Any,
    num_nodes: int,
    num_sources: int,
    directory: Path,
    *,
    most_edges: int,
    has_positions: bool,
    num_types: int | None,
) -> None:
    """Write the graph of edges in any order."""
    width = max(1, -(-num_nodes // _NUM_PARTS))
    dtype = torch.int64 if has_positions else type_for(max(num_nodes, num_sources))
    first, parts = _peeked(parts)
    is_typed = first is not None and first[1] is not None
    with contextlib.ExitStack() as stack:
        files: list[_Part] = []
        for _ in range(max(1, -(-num_nodes // width))):
            files.append(_Part(directory, dtype, 2 + has_positions + is_typed))
            stack.callback(files[-1].close)
        num_edges, most_type = 0, -1
        for piece, types in parts:
            _divide(piece, types, files, width, dtype, num_edges, has_positions=has_positions)
            num_edges += piece.shape[1]
            most_type = max(most_type, -1 if types is None else int(types.max()))
        num_types = max(1, most_type + 1) if num_types is None else num_types
        if most_type >= num_types:
            raise ValueError(
                f"`num_types` must be above every type of an edge, got {num_types} and type {most_type}: "
                f"num_types={most_type + 1}"
            )
        header = GraphHeader(
            version=VERSION, num_nodes=num_nodes, num_sources=num_sources, num_edges=num_edges,
            source_bytes=type_for(num_sources).itemsize, has_positions=has_positions, num_types=num_types,
            type_bytes=0 if not is_typed else 1 if num_types <= _MOST_BYTE_TYPES else 4,
        )  # fmt: skip
        writer = _Writer(file, header)
        first_node = first_edge = 0
        for part in files:
            count = min(width, num_nodes - first_node)
            if part.num_edges <= most_edges:
                _sort_part(part, writer, first_node, first_edge, count)
            else:
                _sort_large_part(part, writer, first_node, first_edge, count, most_edges)
            first_node, first_edge = first_node + count, first_edge + part.num_edges
            part.close()
        writer.add(0, torch.tensor([num_edges], device="cpu"), num_nodes)
        writer.finish()


def _peeked(parts: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    """Return the first item, if there is one, and all items."""
    first = next(parts, None)
    return first, parts if first is None else itertools.chain([first], parts)


def _divide(
    piece: torch.Tensor,
    types: torch.Tensor | None,
    files: list[_Part],
    width: int,
    dtype: torch.dtype,
    first: int,
    *,
    has_positions: bool,
) -> None:
    """Add edges to the files of their targets."""
    sources, targets = piece.contiguous()
    starts, _, order = by_target(sources, targets // width, len(files), len(sources))
    columns = [sources, targets]
    if has_positions:
        columns.append(torch.arange(first, first + len(sources), device="cpu"))
    if types is not None:
        columns.append(types)
    records = torch.stack([column.to(dtype) for column in columns], dim=1)
    records = records if order is None else records[order]
    for number, part in enumerate(files):
        begin, end = int(starts[number]), int(starts[number + 1])
        if begin < end:
            part.add(records[begin:end])


def _sort_part(part: _Part, writer: "_Writer", first_node: int, first_edge: int, num_nodes: int) -> None:
    sources, targets, more = _columns(part.read(0, part.num_edges), first_node, writer)
    starts, sorted_sources, order = by_target(sources, targets, num_nodes, writer.header.num_sources)
    writer.add(0, starts[:-1] + first_edge, first_node)
    writer.add(1, sorted_sources, first_edge)
    for array, values in more.items():
        writer.add(array, values if order is None else values[order], first_edge)


def _sort_large_part(
    part: _Part, writer: "_Writer", first_node: int, first_edge: int, num_nodes: int, most_edges: int
) -> None:
    """Sort a part that memory cannot hold, such as the edges of one hub: count, then place a piece after the other."""
    pieces = [(begin, min(begin + most_edges, part.num_edges)) for begin in range(0, part.num_edges, most_edges)]
    counts = torch.zeros(num_nodes, dtype=torch.int64, device="cpu")
    for begin, end in pieces:
        counts += torch.bincount(part.read(begin, end)[:, 1].long() - first_node, minlength=num_nodes)
    nexts = torch.cumsum(counts, 0) - counts
    writer.add(0, nexts + first_edge, first_node)
    with contextlib.ExitStack() as stack:
        written = {
            array: stack.enter_context(writer.window(array, first_edge, part.num_edges))
            for array in (1, *writer.more_arrays())
        }
        for begin, end in pieces:
            sources, targets, more = _columns(part.read(begin, end), first_node, writer)
            starts, sorted_sources, order = by_target(sources, targets, num_nodes, writer.header.num_sources)
            own = starts.diff()
            # an edge's place: where its target goes on, and its place among the target's edges of this piece
            goal = (nexts - starts[:-1]).repeat_interleave(own) + torch.arange(end - begin, device="cpu")
            written[1][goal.numpy()] = sorted_sources.numpy()
            for array, values in more.items():
                written[array][goal.numpy()] = (values if order is None else values[order]).numpy()
            nexts += own


def _columns(
    records: torch.Tensor, first_node: int, writer: "_Writer"
) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
    """Return sources, targets counted from ``first_node``, and the columns of the file's other arrays."""
    more = {array: records[:, 2 + number].clone() for number, array in enumerate(writer.more_arrays())}
    return records[:, 0].long().contiguous(), records[:, 1].long() - first_node, more


class _Writer:
    """A file that is being written: arrays in any order of their parts, then checksums and the header."""

    def __init__(self, file: Any, header: GraphHeader):
        self.header, self._file = header, file
        self._ends = header.ends()
        os.ftruncate(file.fileno(), self._ends[-1][1])

    def more_arrays(self) -> list[int]:
        """Return the numbers of the arrays that the file has beside starts and sources."""
        return [2] * self.header.has_positions + [3] * bool(self.header.type_bytes)

    def add(self, array: int, values: torch.Tensor, first: int) -> None:
        """Write values of an array (0: starts, 1: sources, 2: positions, 3: types), from number ``first`` on."""
        values = values.to(self._dtype(array)).contiguous()
        view = memoryview(values.numpy()).cast("B") if len(values) else memoryview(b"")  # type: ignore[arg-type]
        write_at(self._file, view, self._ends[array][0] + first * values.itemsize)

    @contextlib.contextmanager
    def window(self, array: int, first: int, count: int) -> Iterator[Any]:
        """Map a part of an array for writing anywhere in it."""
        dtype = self._dtype(array)
        size = dtype.itemsize
        begin = self._ends[array][0] + first * size
        start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        os.posix_fallocate(self._file.fileno(), begin, count * size)  # a full disk is an error here, not a signal later
        pages = mmap.mmap(self._file.fileno(), begin + count * size - start, offset=start)
        values = np.frombuffer(pages, dtype=str(dtype).removeprefix("torch."), count=count, offset=begin - start)
        yield values
        pages.flush()

    def finish(self) -> None:
        """Write checksums of all that was written, and the header."""
        begin, end = self._ends[-1]
        sums = b"".join(crc.to_bytes(4, "little") for crc in checksums(self._file.fileno(), begin))
        assert len(sums) == end - begin
        write_at(self._file, memoryview(sums), begin)
        header = dataclasses.replace(self.header, checksums_crc=zlib.crc32(sums))
        write_at(self._file, memoryview(header_page(MAGIC, dataclasses.asdict(header))), 0)

    def _dtype(self, array: int) -> torch.dtype:
        sizes = {1: self.header.source_bytes, 3: self.header.type_bytes}
        return {1: torch.uint8, 4: torch.int32, 8: torch.int64}[sizes.get(array, 8)]


def _copy(graph: Graph, file: Any, *, has_positions: bool) -> None:
    header = GraphHeader(
        version=VERSION, num_nodes=graph.num_nodes, num_sources=graph.num_sources, num_edges=graph.num_edges,
        source_bytes=graph.sources.element_size(), has_positions=has_positions, num_types=graph.num_types,
        type_bytes=0 if graph.types is None else graph.types.element_size(),
    )  # fmt: skip
    writer = _Writer(file, header)
    arrays = (graph.starts, graph.sources, graph.positions if has_positions else None, graph.types)
    for number, array in enumerate(arrays):
        first = 0
        for part in () if array is None else array.split(_BLOCK_EDGES):
            writer.add(number, part, first)
            first += len(part)
    writer.finish()


def _bar(edges: Any, path: Path, progress: bool) -> Any:
    edges = edges[0] if _is_typed(edges) else edges
    total = edges.shape[1] if isinstance(edges, torch.Tensor) and edges.dim() == 2 else None
    return progress_bar(progress, total, path.name)
