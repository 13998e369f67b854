"""Writing aligned files of rows, completely or not at all, with memory for a few chunks."""

import contextlib
import math
import mmap
import os
import secrets
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.arguments import checked, must_be
from penstock.checkpoints import synchronize
from penstock.storages import as_plain
from penstock.unified._aligned import (
    CHUNK_BYTES,
    DTYPES,
    MAGIC,
    PAGE_BYTES,
    VERSION,
    chunks,
    header_page,
    stride_for,
    verified,
)
from penstock.unified._files import find_table
from penstock.unified._table import Table


@checked("penstock.unified.write_features('rows.features', tensor)")
def write_features(
    path: str | os.PathLike[str],
    source: "torch.Tensor | str | os.PathLike[str] | Iterable[torch.Tensor]",
    *,
    key: str | None = None,
    progress: bool = True,
) -> Path:
    """Write rows as an aligned file, with memory for a few chunks. Return the path.

    ``source`` is a tensor ``[rows, ...]``, a .npy or .safetensors file (``key``), or anything that yields tensors
    ``[any, ...]`` with the same dtype and row shape, such as a generator, so that the rows need never be in memory
    together. A bar shows progress on a terminal. An existing file with that name is replaced once the new one is
    complete; until then, and after a failure before that, it is unchanged.

    Raises ``ValueError`` for sources without a row type, ``OSError`` for a disk that is full or cannot be written.
    """
    path = Path(path)
    if not path.name:
        raise ValueError(f"`path` must name a file, got {str(path)!r}: write_features('rows.features', tensor)")
    blocks, num_rows = _blocks(source, key)
    first = next(blocks, None)
    if first is None or not first.dim():
        raise ValueError(
            "`source` must yield rows, got none: write_features(path, tensor) with a tensor [rows, width], or empty"
        )
    with new_file(path) as file, progress_bar(progress, num_rows, path.name) as advance:
        _TableWriter(file, first).write(_chained(first, blocks), advance)
    return path


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Any]:
    """Yield a file to write, which gets the name ``path`` when all of it is on the disk; an error leaves nothing."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(name, path)
        synchronize(path.parent)  # else a crash may undo the renaming
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def spill(directory: Path, source: torch.Tensor, *, progress: bool = True) -> Any:
    """Write a tensor's rows to an open unnamed file, which disappears when it is closed."""
    file: Any = tempfile.TemporaryFile(dir=directory, buffering=0)
    try:
        blocks, num_rows = _blocks(source, None)
        first = next(blocks)
        with progress_bar(progress, num_rows, f"to {directory}") as advance:
            _TableWriter(file, first).write(_chained(first, blocks), advance)
    except BaseException:
        file.close()
        raise
    return file


class _TableWriter:
    """A file that is being written. Chunks are padded in one buffer of pages and dropped from the page cache."""

    def __init__(self, file: Any, first: torch.Tensor):
        self._file = file
        self._dtype, self._shape = first.dtype, tuple(first.shape[1:])
        if str(first.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"rows of {first.dtype} cannot be written; expected one of {', '.join(DTYPES)}")
        self._row_bytes = math.prod(self._shape) * first.element_size()
        self._stride = stride_for(self._row_bytes)
        self._chunk_rows = (
            max(8, 1 << max(0, (CHUNK_BYTES // self._stride).bit_length() - 1)) if self._row_bytes else 4096
        )
        self._buffer = mmap.mmap(-1, max(PAGE_BYTES, self._chunk_rows * self._stride))
        self._rows = torch.frombuffer(self._buffer, dtype=torch.uint8)[: self._chunk_rows * self._stride].view(
            self._chunk_rows, self._stride
        )
        self._filled, self._end, self._num_rows = 0, PAGE_BYTES, 0
        self._sums: list[int] = []

    def write(self, blocks: Iterable[torch.Tensor], advance: Any) -> None:
        for block in blocks:
            if block.dtype is not self._dtype or tuple(block.shape[1:]) != self._shape:
                raise ValueError(
                    f"the source yields rows of {tuple(block.shape[1:])} {block.dtype} after rows of {self._shape} "
                    f"{self._dtype}; all rows must have one shape and dtype"
                )
            self._add(block)
            advance(len(block))
        self._flush()
        self._finish()

    def _add(self, block: torch.Tensor) -> None:
        host = block.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = host.view(-1).view(torch.uint8).view(len(block), -1) if host.numel() else host
        begin = 0
        while begin < len(block):
            count = min(len(block) - begin, self._chunk_rows - self._filled)
            if self._row_bytes:
                self._rows[self._filled : self._filled + count, : self._row_bytes] = raw[begin : begin + count]
            self._filled, begin = self._filled + count, begin + count
            if self._filled == self._chunk_rows:
                self._flush()

    def _flush(self) -> None:
        if not self._filled:
            return
        view = memoryview(self._buffer)[: self._filled * self._stride]
        self._sums.append(zlib.crc32(view))
        write_at(self._file, view, self._end)
        os.fdatasync(self._file.fileno())  # only clean pages are dropped from the page cache
        os.posix_fadvise(self._file.fileno(), self._end, len(view), os.POSIX_FADV_DONTNEED)
        self._end += len(view)
        self._num_rows += self._filled
        self._filled = 0
        self._rows.zero_()

    def _finish(self) -> None:
        sums_byte = -(-self._end // PAGE_BYTES) * PAGE_BYTES
        sums = b"".join(crc.to_bytes(4, "little") for crc in self._sums)
        write_at(self._file, memoryview(sums), sums_byte)
        self._file.truncate(sums_byte + len(sums))
        fields = {
            "version": VERSION, "shape": [self._num_rows, *self._shape],
            "dtype": str(self._dtype).removeprefix("torch."), "stride_bytes": self._stride,
            "chunk_rows": self._chunk_rows, "checksums_byte": sums_byte, "checksums_crc": zlib.crc32(sums),
        }  # fmt: skip
        write_at(self._file, memoryview(header_page(MAGIC, fields)), 0)


def write_at(file: Any, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at a position of an open file."""
    num_written = 0
    while num_written < len(view):
        num_written += os.pwrite(file.fileno(), view[num_written:], offset + num_written)


def _blocks(source: Any, key: str | None) -> tuple[Iterator[torch.Tensor], int | None]:
    if isinstance(source, torch.Tensor):
        source = as_plain("source", source)
        rows = max(1, CHUNK_BYTES // max(1, source[:1].nbytes))
        return (source[begin : begin + rows] for begin in range(0, max(1, len(source)), rows)), len(source)
    if isinstance(source, str | os.PathLike):
        table = find_table(source, key)
        return _from_table(table), table.shape[0]
    if not isinstance(source, Iterable):
        raise TypeError(f"`source` must be a tensor, a file or an iterable of tensors, got {type(source).__name__}")
    return map(_checked_block, source), None


def _checked_block(block: Any) -> torch.Tensor:
    if not isinstance(block, torch.Tensor) or not block.dim():
        example = "write_features('rows.features', (tensor for tensor in blocks))"
        raise must_be("source", "a tensor, a file, or what yields tensors [rows, ...]", block, example)
    return as_plain("source", block)


def _from_table(table: Table) -> Iterator[torch.Tensor]:
    rows = max(1, CHUNK_BYTES // max(1, table.stride_bytes))
    if not table.size_bytes:
        yield torch.empty(table.shape, dtype=table.dtype, device="cpu")
        return
    with table.path.open("rb", buffering=0) as file:
        raws = verified(table, file) if table.is_aligned else chunks(table, file, rows)
        for _, raw in raws:
            padded = torch.frombuffer(raw, dtype=torch.uint8).view(-1, table.stride_bytes)[:, : table.row_bytes]
            yield padded.contiguous().view(-1).view(table.dtype).view(-1, *table.shape[1:])


def _chained(first: torch.Tensor, rest: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield first
    yield from rest


@contextlib.contextmanager
def progress_bar(progress: bool, num_rows: int | None, name: str) -> Iterator[Any]:
    """Return a context that shows a bar on a terminal, if wanted, and gives the function that moves it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not progress or not console.is_terminal) as bar:
        task = bar.add_task(f"writing {name}", total=num_rows)
        yield lambda count: bar.advance(task, count)
