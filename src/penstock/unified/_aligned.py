"""Penstock's file format for rows: rows touch as few sectors as possible, and checksums detect damage.

The file has a header page (magic, length and CRC-32 of a JSON text: version, shape, dtype, stride, and the position and
CRC-32 of the checksums), then rows from byte 4096 on, ``stride_bytes`` apart, then a CRC-32 for each chunk of rows.
Strides up to a sector are powers of two, larger ones multiples of a sector. The file is written under a temporary name
and renamed when all of it is on the disk, so a file with the right name is complete. Opening a file checks the header,
the checksums' own CRC-32 and the length; ``check`` checks the rows.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.arguments import checked
from penstock.errors import FeatureFileError
from penstock.files import check_is_file, parse_json
from penstock.unified._table import Table, check_shape, refuse
from penstock.units import format_bytes

MAGIC = b"PENSROW1"
"""The first bytes of a file."""
SECTOR_BYTES = 512
PAGE_BYTES = 4096
VERSION = 1
CHUNK_BYTES = 4 * 2**20
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
        torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The contents of a file's header page."""

    table: Table
    """The rows' place in the file."""
    chunk_rows: int
    """Number of rows that share a checksum."""
    checksums: tuple[int, ...]
    """CRC-32 of every chunk, padding included."""


def stride_for(row_bytes: int) -> int:
    """Return the bytes from row to row with which rows touch as few sectors as possible."""
    if row_bytes <= SECTOR_BYTES:  # powers of two divide a sector, so no short row straddles two
        return 1 << max(0, row_bytes - 1).bit_length()
    return -(-row_bytes // SECTOR_BYTES) * SECTOR_BYTES


def header_page(magic: bytes, fields: dict[str, Any]) -> bytes:
    """Return a header page: ``magic`` (8 bytes), length and CRC-32 of a JSON text, and the text."""
    text = json.dumps(fields).encode()
    head = magic + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    return head.ljust(PAGE_BYTES, b"\0")


def header_text(path: Path, page: bytes, magic: bytes) -> bytes:
    """Return the JSON text of a file's header page. Raises ``FeatureFileError`` if it is damaged."""
    length, crc = int.from_bytes(page[8:12], "little"), int.from_bytes(page[12:16], "little")
    text = page[16 : 16 + length]
    if page[:8] != magic or len(page) < PAGE_BYTES or length > PAGE_BYTES - 16 or zlib.crc32(text) != crc:
        refuse(path, "its header differs from what was written")
    return text


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read from a position of a file until ``view`` is full or the file ends. Return the number of bytes read."""
    num_read = 0
    while num_read < len(view):
        count = os.preadv(descriptor, [view[num_read:]], offset + num_read)
        if not count:
            break
        num_read += count
    return num_read


def read_header(path: Path, file: Any) -> Header:
    """Return the header of an open file after checking it. Raises ``FeatureFileError``."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    page = file.read(PAGE_BYTES)
    text = header_text(path, page, MAGIC)
    try:
        header = parse_json(text, "the header")
        if header["version"] != VERSION:
            raise FeatureFileError(
                f"{path} has format version {header['version']}, but this Penstock reads version {VERSION}. Write it "
                "again with this version of Penstock"
            )
        table = Table(
            path=path, shape=tuple(header["shape"]), dtype=DTYPES[header["dtype"]], first_byte=PAGE_BYTES,
            stride_bytes=header["stride_bytes"], is_aligned=True,
        )  # fmt: skip
        check_shape(path, table.shape)
        chunk_rows, sums_byte = header["chunk_rows"], header["checksums_byte"]
        if any(type(number) is not int or number < 0 for number in (chunk_rows, sums_byte, header["stride_bytes"])):
            refuse(path, "a number in its header is not a whole number of at least 0")
        num_chunks = -(-table.shape[0] // chunk_rows)
        is_whole = size == sums_byte + 4 * num_chunks and sums_byte >= table.end_byte
        if not is_whole or table.stride_bytes != stride_for(table.row_bytes):
            refuse(path, f"it has {format_bytes(size)}, but its header says otherwise")
        file.seek(sums_byte)
        raw = file.read(4 * num_chunks)
        if len(raw) != 4 * num_chunks or zlib.crc32(raw) != header["checksums_crc"]:
            refuse(path, "its checksums differ from what was written")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, FeatureFileError):
            raise
        refuse(path, f"its header cannot be read ({error})")
    sums = tuple(int.from_bytes(raw[4 * chunk : 4 * chunk + 4], "little") for chunk in range(num_chunks))
    return Header(table=table, chunk_rows=chunk_rows, checksums=sums)


@checked("penstock.unified.check('rows.features')")
def check(path: str | os.PathLike[str]) -> None:
    """Read a whole aligned file and compare its checksums.

    Raises ``FeatureFileError``, which names the damaged rows.
    """
    check_all(Path(path), lambda: None)


def check_all(path: Path, alive: Callable[[], None]) -> None:
    """Do the same, calling ``alive`` now and then."""
    check_is_file(path)
    with path.open("rb", buffering=0) as file:
        for _ in verified(read_header(path, file).table, file):
            alive()


def read_all(table: Table, raw: torch.Tensor) -> None:
    """Read all rows without padding into ``raw``, ``uint8 [rows * row_bytes]``, and check every chunk."""
    if not table.size_bytes:
        return check(table.path)
    rows = raw.view(table.shape[0], -1)
    with table.path.open("rb", buffering=0) as file:
        for begin, chunk in verified(table, file):
            padded = torch.frombuffer(chunk, dtype=torch.uint8).view(-1, table.stride_bytes)
            rows[begin : begin + len(padded)] = padded[:, : table.row_bytes]
    return None


def verified(table: Table, file: Any) -> Iterator[tuple[int, bytearray]]:
    """Yield the ``chunks`` of an aligned file. Raises ``FeatureFileError`` at a chunk whose checksum differs."""
    header = read_header(table.path, file)
    for number, (begin, raw) in enumerate(chunks(table, file, header.chunk_rows)):
        if zlib.crc32(raw) != header.checksums[number]:
            end = min(begin + header.chunk_rows, table.shape[0]) - 1
            refuse(table.path, f"rows {begin} to {end} differ from what was written")
        yield begin, raw


def chunks(table: Table, file: Any, chunk_rows: int) -> Iterator[tuple[int, bytearray]]:
    """Yield the first row and the bytes of every chunk, including padding."""
    for begin in range(0, table.shape[0], chunk_rows):
        raw = bytearray(min(chunk_rows, table.shape[0] - begin) * table.stride_bytes)
        offset = table.first_byte + begin * table.stride_bytes
        num_read = read_at(file.fileno(), memoryview(raw), offset)
        if num_read < len(raw):
            refuse(table.path, f"it ends within row {begin + num_read // table.stride_bytes}")
        os.posix_fadvise(file.fileno(), offset, len(raw), os.POSIX_FADV_DONTNEED)
        yield begin, raw
