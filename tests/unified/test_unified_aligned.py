"""Aligned files touch as few sectors as possible, and their checksums tell damage from data."""

import struct
import zlib

import pytest
from unified_cases import numbers

from penstock import unified
from penstock.errors import FeatureFileError
from penstock.unified import _aligned


@pytest.mark.parametrize(
    "row_bytes, stride",
    [(0, 1), (1, 1), (3, 4), (64, 64), (65, 128), (512, 512), (513, 1024), (1024, 1024), (1500, 1536)],
)
def test_no_row_straddles_more_sectors_than_it_must(row_bytes, stride):
    assert _aligned.stride_for(row_bytes) == stride
    for row in range(20):
        begin = row * stride
        sectors = (begin + max(row_bytes, 1) - 1) // 512 - begin // 512 + 1
        assert sectors == max(1, -(-row_bytes // 512))


@pytest.mark.parametrize("place", ["rows", "checksums", "header", "end"])
def test_damage_is_told_from_data(tmp_path, place):
    path = unified.write_features(tmp_path / "x.rows", numbers((5000, 6)))
    raw = bytearray(path.read_bytes())
    position = {"rows": 4096 + 3000 * 32, "checksums": len(raw) - 2, "header": 40, "end": None}[place]
    if position is None:
        raw += b"more"
    else:
        raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.raises(
        FeatureFileError, match="rows 0 to 4999 differ from what was written" if place == "rows" else "x.rows is"
    ):
        unified.check(path)
    with pytest.raises(FeatureFileError):
        unified.from_file(path)


def test_a_file_of_another_version(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", numbers((5, 6)))
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<I", raw[8:12])[0]
    text = raw[16 : 16 + length].replace(b'"version": 1', b'"version": 2')
    raw[12:16] = struct.pack("<I", zlib.crc32(text))
    raw[16 : 16 + length] = text
    path.write_bytes(raw)
    with pytest.raises(FeatureFileError, match="format version 2, but this Penstock reads version 1"):
        unified.from_file(path)
