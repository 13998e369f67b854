"""Graphs in files, mapped and sampled where they are, by all processes of a machine.

A file has a header page (magic, length and CRC-32 of a JSON text), then the arrays of `Graph`, each from the start of a
page, then a CRC-32 for each chunk of them. It gets its name when all of it is on the disk.
"""

import dataclasses
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from penstock.arguments import checked
from penstock.errors import FeatureFileError
from penstock.files import check_is_file, parse_json
from penstock.ranks import PATIENCE_S, RankGroup
from penstock.unified._aligned import PAGE_BYTES, header_text, read_at
from penstock.unified._graph import Graph
from penstock.unified._page_cache import is_told_of
from penstock.unified._read_ahead import ReadAhead
from penstock.unified._table import refuse
from penstock.unified._together import Together
from penstock.units import format_bytes

MAGIC = b"PENSGRF1"
VERSION = 1
_CHUNK_BYTES = 4 * 2**20
"""Bytes that share a checksum."""
EXAMPLE = "write_graph('edges.graph', edge_index, num_nodes=1000)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphHeader:
    """The contents of a file's header page."""

    version: int
    """Version of the format."""
    num_nodes: int
    """Number of targets."""
    num_sources: int
    """Number of sources."""
    num_edges: int
    """Number of edges."""
    source_bytes: int
    """Bytes of a source's number."""
    has_positions: bool
    """Whether the file says the number of each edge as it was given."""
    num_types: int = 1
    """Number of edge types."""
    type_bytes: int = 0
    """Bytes of an edge's type; 0 if the file has no types."""
    checksums_crc: int = 0
    """CRC-32 of the checksums."""

    def ends(self) -> list[tuple[int, int]]:
        """Return where each array begins and ends, and the checksums."""
        position_bytes = 8 * self.num_edges if self.has_positions else 0
        places, begin = [], PAGE_BYTES
        type_bytes = self.type_bytes * self.num_edges
        for size_bytes in (8 * (self.num_nodes + 1), self.source_bytes * self.num_edges, position_bytes, type_bytes):
            places.append((begin, begin + size_bytes))
            begin = -(-(begin + size_bytes) // PAGE_BYTES) * PAGE_BYTES
        num_chunks = -(-(begin - PAGE_BYTES) // _CHUNK_BYTES)
        return [*places, (begin, begin + 4 * num_chunks)]


@checked("penstock.unified.open_graph('edges.graph')", patience_s=0)
def open_graph(
    path: str | os.PathLike[str],
    *,
    verify: bool = False,
    group: distributed.ProcessGroup | None = None,
    patience_s: float = PATIENCE_S,
) -> Graph:
    """Map a file of `write_graph` as a graph; it takes no memory but the page cache's, once for all processes.

    Samplers read it where it is. Of pages that are not in memory, those of a hop's nodes are asked for together before
    they are touched. ``verify`` first reads the file and compares its checksums; in a ``group`` of
    ``torch.distributed``, whose ranks all make this call, one rank of each machine does so for the others, and all
    ranks must mean the same graph.

    Raises ``FeatureFileError`` for a file that is damaged, cut short or of another kind, what ``open`` raises, and
    ``RankError`` on all ranks if one fails, disagrees, or gives no sign of life for ``patience_s`` seconds.
    """
    path = Path(path)
    if group is None:
        return _opened(path, verify=verify)
    ranks = RankGroup(group, patience_s)
    with ranks.all_or_none():
        together = Together(ranks)
        header = _read_header(path)
        ranks.agree("the graph", dataclasses.asdict(header))
        ranks.agree("`verify`", verify)
        graph = _opened(path, verify=verify and together.number == 0, alive=ranks.beat)
        ranks.exchange("open")
        return graph


def _opened(path: Path, *, verify: bool, alive: Callable[[], None] = lambda: None) -> Graph:
    header = _read_header(path)
    if verify:
        _verify(path, header, alive)
    ends = header.ends()
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), ends[-1][0], mmap.MAP_SHARED, mmap.PROT_READ)
        is_told = is_told_of(file.fileno())
    pages.madvise(mmap.MADV_RANDOM)  # a page that is touched comes alone: its neighbours are other nodes' edges
    graph = Graph.__new__(Graph)
    graph.num_nodes, graph.num_sources, graph.path = header.num_nodes, header.num_sources, path.resolve()
    sources = np.int32 if header.source_bytes == 4 else np.int64
    graph.starts = _mapped(pages, *ends[0], np.int64)
    graph.sources = _mapped(pages, *ends[1], sources)
    graph.positions = _mapped(pages, *ends[2], np.int64) if header.has_positions else None
    graph.types = (
        _mapped(pages, *ends[3], np.uint8 if header.type_bytes == 1 else np.int32) if header.type_bytes else None
    )
    graph.num_types = header.num_types
    graph.ahead = ReadAhead(is_told)
    if int(graph.starts[0]) or int(graph.starts[-1]) != header.num_edges:
        refuse(path, "its first array does not go from 0 to the number of edges")
    return graph


def _mapped(pages: mmap.mmap, begin: int, end: int, dtype: Any) -> torch.Tensor:
    array = np.frombuffer(pages, dtype=dtype, count=(end - begin) // np.dtype(dtype).itemsize, offset=begin)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")  # nobody writes to a graph's arrays
        return torch.from_numpy(array)


def checksums(descriptor: int, end: int) -> Iterator[int]:
    """Yield the checksum of every chunk of a file's arrays, which end at byte ``end``."""
    buffer = bytearray(_CHUNK_BYTES)
    for begin in range(PAGE_BYTES, end, _CHUNK_BYTES):
        view = memoryview(buffer)[: min(_CHUNK_BYTES, end - begin)]
        num_read = read_at(descriptor, view, begin)
        if num_read < len(view):
            raise OSError(f"the file ended at byte {begin + num_read} while it was read")
        os.posix_fadvise(descriptor, begin, len(view), os.POSIX_FADV_DONTNEED)
        yield zlib.crc32(view)


def _read_header(path: Path) -> GraphHeader:
    """Return the header of a file after checking it. Raises ``FeatureFileError``."""
    check_is_file(path)
    with path.open("rb") as file:
        page, size = file.read(PAGE_BYTES), os.fstat(file.fileno()).st_size
    if page[:8] != MAGIC:
        raise FeatureFileError(f"{path} is not a graph of Penstock: write it with penstock.unified.{EXAMPLE}")
    fields = parse_json(header_text(path, page, MAGIC), "the header")
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise FeatureFileError(
            f"{path} has another format than this Penstock reads, version {VERSION}. Write it again with this version "
            "of Penstock"
        )
    try:
        header = GraphHeader(**fields)
    except TypeError as error:
        refuse(path, f"its header cannot be read ({error})")
    if size != header.ends()[-1][1]:
        refuse(path, f"it has {format_bytes(size)}, but its header says {format_bytes(header.ends()[-1][1])}")
    return header


def _verify(path: Path, header: GraphHeader, alive: Callable[[], None]) -> None:
    """Read a whole file and compare its checksums. Raises ``FeatureFileError``."""
    begin, end = header.ends()[-1]
    with path.open("rb", buffering=0) as file:
        sums = os.pread(file.fileno(), end - begin, begin)
        if zlib.crc32(sums) != header.checksums_crc:
            refuse(path, "its checksums differ from what was written")
        for number, crc in enumerate(checksums(file.fileno(), begin)):
            alive()
            if crc != int.from_bytes(sums[4 * number : 4 * number + 4], "little"):
                first = PAGE_BYTES + number * _CHUNK_BYTES
                refuse(
                    path, f"its bytes from {first} to {min(first + _CHUNK_BYTES, begin)} differ from what was written"
                )
