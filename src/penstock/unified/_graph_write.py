"""Writing a graph to a file, in bounded memory, from edges in any order.

Edges are sorted by target in two passes, since they need not fit in memory: the first writes them to files of some
consecutive targets each, which have no name; the second sorts one such file after the other by counting.
"""

import contextlib
import dataclasses
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
from penstock.tiers import Size
from penstock.unified._aligned import header_page, read_at
from penstock.unified._graph import Graph, by_target, type_for
from penstock.unified._graph_file import EXAMPLE, MAGIC, VERSION, GraphHeader, checksums
from penstock.unified._write import new_file, progress_bar, write_at
from penstock.units import parse_bytes

_NUM_PARTS = 256
"""The most files of the first pass."""
_EDGE_BYTES = 80
"""Bytes of memory for each edge that is sorted."""
_PASSED_BYTES = 128
"""Bytes of memory for each edge that the first pass takes."""
_BLOCK_EDGES = 4 * 2**20
"""The most edges that are taken at once."""


@checked(EXAMPLE, num_nodes=0, num_sources=0)
def write_graph(
    path: str | os.PathLike[str],
    edges: torch.Tensor | Iterable[torch.Tensor] | Graph,
    *,
    num_nodes: int | None = None,
    num_sources: int | None = None,
    positions: bool = True,
    memory: Size = "1GiB",
    progress: bool = True,
) -> Path:
    """Write a graph to a file that `open_graph` maps. Return the path.

    ``edges`` is an ``edge_index`` (``int64 [2, edges]``: sources, then targets), a `Graph`, or anything that yields
    parts of an ``edge_index``, so that the edges need never be in memory together; then ``num_nodes`` must be given.
    Sources and targets are the same nodes, unless ``num_sources`` gives the number of sources of another type. Edges
    of a target keep their order. ``positions``: whether the file holds the number of each edge as it was given (8 bytes
    an edge), so that `Sample.edges` can index features of edges; without, they are places in the file. ``memory``
    bounds what sorting takes; beside the file, 8 to 24 bytes an edge are needed on its disk for a while.

    Raises ``ValueError`` for edges whose ends are not nodes, ``OSError`` for a disk that is full or cannot be written;
    an existing file of that name stays as it was.
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
                has_positions=positions,
            )  # fmt: skip
    return path


def _sizes(edges: Any, num_nodes: int | None, num_sources: int | None) -> tuple[int, int]:
    """Return the numbers of targets and of sources."""
    if num_nodes is None and not isinstance(edges, torch.Tensor):
        raise ValueError(f"`num_nodes` must be given for edges that come in parts: {EXAMPLE}")
    if num_nodes is None:
        ends = _checked_part(edges).amax(1).tolist() if edges.numel() else [-1, -1]
        num_nodes = 1 + (max(ends) if num_sources is None else ends[1])
    return num_nodes, num_nodes if num_sources is None else num_sources


def _checked_part(part: Any) -> torch.Tensor:
    if not isinstance(part, torch.Tensor) or part.dim() != 2 or len(part) != 2 or part.dtype is not torch.int64:
        raise must_be("edges", "int64 [2, edges] with sources above targets, or what yields such parts", part, EXAMPLE)
    return part


def _parts(edges: Any, num_nodes: int, num_sources: int, most_edges: int, advance: Any) -> Iterator[torch.Tensor]:
    """Yield the edges in parts of bounded size, checked."""
    most_edges = min(_BLOCK_EDGES, max(1, most_edges))
    begin = 0
    for part in [edges] if isinstance(edges, torch.Tensor) else edges:
        for piece in _checked_part(part).split(most_edges, 1):
            piece = piece.cpu()
            if piece.numel():
                low, (most_source, most_target) = int(piece.min()), piece.amax(1).tolist()
                if low < 0 or most_source >= num_sources or most_target >= num_nodes:
                    raise ValueError(
                        f"`edges` must lead from nodes below {num_sources} to nodes below {num_nodes}; those from "
                        f"number {begin} on have sources up to {most_source}, targets up to {most_target}, and the "
                        f"lowest number is {low}: {EXAMPLE}"
                    )
                yield piece
            begin += piece.shape[1]
            advance(piece.shape[1])


class _Part:
    """The edges of some consecutive targets, in a file without a name, as records (source, target[, number])."""

    def __init__(self, directory: Path, dtype: torch.dtype, width: int):
        self._file: Any = tempfile.TemporaryFile(dir=directory, buffering=2**14)
        self._dtype, self._width, self.num_edges = dtype, width, 0

    def add(self, records: torch.Tensor) -> None:
        self._file.write(memoryview(records.numpy()).cast("B"))  # type: ignore[arg-type]
        self.num_edges += len(records)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return records, ``[edges, 2 or 3]``."""
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
    parts: Iterator[torch.Tensor],
    file: Any,
    num_nodes: int,
    num_sources: int,
    directory: Path,
    *,
    most_edges: int,
    has_positions: bool,
) -> None:
    """Write the graph of edges in any order."""
    width = max(1, -(-num_nodes // _NUM_PARTS))
    dtype = torch.int64 if has_positions else type_for(max(num_nodes, num_sources))
    with contextlib.ExitStack() as stack:
        files: list[_Part] = []
        for _ in range(max(1, -(-num_nodes // width))):
            files.append(_Part(directory, dtype, 3 if has_positions else 2))
            stack.callback(files[-1].close)
        num_edges = 0
        for piece in parts:
            _divide(piece, files, width, dtype, num_edges, has_positions=has_positions)
            num_edges += piece.shape[1]
        header = GraphHeader(
            version=VERSION, num_nodes=num_nodes, num_sources=num_sources, num_edges=num_edges,
            source_bytes=type_for(num_sources).itemsize, has_positions=has_positions,
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


def _divide(
    piece: torch.Tensor, files: list[_Part], width: int, dtype: torch.dtype, first: int, *, has_positions: bool
) -> None:
    """Add edges to the files of their targets."""
    sources, targets = piece.contiguous()
    starts, _, order = by_target(sources, targets // width, len(files), len(sources))
    columns = [sources, targets]
    if has_positions:
        columns.append(torch.arange(first, first + len(sources), device="cpu"))
    records = torch.stack([column.to(dtype) for column in columns], dim=1)
    records = records if order is None else records[order]
    for number, part in enumerate(files):
        begin, end = int(starts[number]), int(starts[number + 1])
        if begin < end:
            part.add(records[begin:end])


def _sort_part(part: _Part, writer: "_Writer", first_node: int, first_edge: int, num_nodes: int) -> None:
    sources, targets, numbers = _columns(part.read(0, part.num_edges), first_node, writer)
    starts, sorted_sources, order = by_target(sources, targets, num_nodes, writer.header.num_sources)
    writer.add(0, starts[:-1] + first_edge, first_node)
    writer.add(1, sorted_sources, first_edge)
    if numbers is not None:
        writer.add(2, numbers if order is None else numbers[order], first_edge)


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
    with (
        writer.window(1, first_edge, part.num_edges) as written_sources,
        writer.window(2, first_edge, part.num_edges) as written_numbers,
    ):
        for begin, end in pieces:
            sources, targets, numbers = _columns(part.read(begin, end), first_node, writer)
            starts, sorted_sources, order = by_target(sources, targets, num_nodes, writer.header.num_sources)
            own = starts.diff()
            # an edge's place: where its target goes on, and its place among the target's edges of this piece
            goal = (nexts - starts[:-1]).repeat_interleave(own) + torch.arange(end - begin, device="cpu")
            written_sources[goal.numpy()] = sorted_sources.numpy()
            if numbers is not None:
                written_numbers[goal.numpy()] = (numbers if order is None else numbers[order]).numpy()
            nexts += own


def _columns(
    records: torch.Tensor, first_node: int, writer: "_Writer"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return sources, targets counted from ``first_node``, and numbers if the file has them."""
    numbers = records[:, 2].clone() if writer.header.has_positions else None
    return records[:, 0].long().contiguous(), records[:, 1].long() - first_node, numbers


class _Writer:
    """A file that is being written: arrays in any order of their parts, then checksums and the header."""

    def __init__(self, file: Any, header: GraphHeader):
        self.header, self._file = header, file
        self._ends = header.ends()
        os.ftruncate(file.fileno(), self._ends[-1][1])

    def add(self, array: int, values: torch.Tensor, first: int) -> None:
        """Write values of an array (0: starts, 1: sources, 2: positions), from number ``first`` on."""
        values = values.to(self._dtype(array)).contiguous()
        view = memoryview(values.numpy()).cast("B") if len(values) else memoryview(b"")  # type: ignore[arg-type]
        write_at(self._file, view, self._ends[array][0] + first * values.itemsize)

    @contextlib.contextmanager
    def window(self, array: int, first: int, count: int) -> Iterator[Any]:
        """Map a part of an array for writing anywhere in it."""
        if array == 2 and not self.header.has_positions:
            yield None
            return
        size = self._dtype(array).itemsize
        begin = self._ends[array][0] + first * size
        start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        os.posix_fallocate(self._file.fileno(), begin, count * size)  # a full disk is an error here, not a signal later
        pages = mmap.mmap(self._file.fileno(), begin + count * size - start, offset=start)
        values = np.frombuffer(pages, dtype=np.int32 if size == 4 else np.int64, count=count, offset=begin - start)
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
        return torch.int32 if array == 1 and self.header.source_bytes == 4 else torch.int64


def _copy(graph: Graph, file: Any, *, has_positions: bool) -> None:
    header = GraphHeader(
        version=VERSION, num_nodes=graph.num_nodes, num_sources=graph.num_sources, num_edges=graph.num_edges,
        source_bytes=graph.sources.element_size(), has_positions=has_positions,
    )  # fmt: skip
    writer = _Writer(file, header)
    for number, array in enumerate((graph.starts, graph.sources, graph.positions if has_positions else None)):
        first = 0
        for part in () if array is None else array.split(_BLOCK_EDGES):
            writer.add(number, part, first)
            first += len(part)
    writer.finish()


def _bar(edges: Any, path: Path, progress: bool) -> Any:
    total = edges.shape[1] if isinstance(edges, torch.Tensor) and edges.dim() == 2 else None
    return progress_bar(progress, total, path.name)
