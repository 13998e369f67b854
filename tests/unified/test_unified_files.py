"""Files of rows: what is written is read, damage is refused, nothing half-written is ever seen."""

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock import tiers, unified
from penstock.errors import BudgetError, FeatureFileError
from penstock.unified import _aligned, _write
from penstock.unified._files import find_table

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


def made(shape, dtype=torch.float32):
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@given(
    st.integers(0, 40), st.sampled_from([(), (1,), (3,), (128,), (129,), (2, 70), (0,)]), st.sampled_from(DTYPES),
    st.integers(1, 17),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path, rows, shape, dtype, chunk):
    expected, path = made((rows, *shape), dtype), tmp_path / "x.rows"
    blocks = expected.split(chunk) if rows else [expected]
    assert unified.write_features(path, iter(blocks)) == path
    unified.check(path)
    found = unified.from_file(path)
    assert found.shape == expected.shape and torch.equal(found.cpu(), expected)
    table = find_table(path)
    assert table.stride_bytes == _aligned.stride_for(table.row_bytes)
    assert os.stat(path).st_size % 4 == 0
    assert not list(tmp_path.glob(".*"))


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


def test_many_chunks_and_other_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(_write, "CHUNK_BYTES", 4096)
    expected = made((1000, 33))
    np.save(tmp_path / "x.npy", expected.numpy())
    save_file({"x": expected, "y": expected[:3].clone()}, tmp_path / "x.safetensors")
    sources = [
        expected, unified.wrap(expected), tmp_path / "x.npy", (one for one in expected.split(7)), [expected],
    ]  # fmt: skip
    for number, source in enumerate(sources):
        path = unified.write_features(tmp_path / f"{number}.rows", source, progress=False)
        unified.check(path)
        assert torch.equal(unified.from_file(path).cpu(), expected)
    again = unified.write_features(tmp_path / "again.rows", tmp_path / "0.rows")
    assert again.read_bytes() == (tmp_path / "0.rows").read_bytes()
    path = unified.write_features(tmp_path / "s.rows", tmp_path / "x.safetensors", key="x")
    assert torch.equal(unified.from_file(path).cpu(), expected)
    chunk = json.loads(path.read_bytes()[16:4096].rstrip(b"\0"))["chunk_rows"]
    assert chunk < 100


def test_rows_larger_than_a_chunk(tmp_path):
    expected = torch.randn(3, 1_100_000)
    path = unified.write_features(tmp_path / "x.rows", expected)
    unified.check(path)
    assert torch.equal(unified.from_file(path)[1].cpu(), expected[1])
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_sources_that_say_nothing(tmp_path):
    path = tmp_path / "x.rows"
    with pytest.raises(ValueError, match="must yield rows"):
        unified.write_features(path, iter([]))
    with pytest.raises(ValueError, match="all rows must have one shape and dtype"):
        unified.write_features(path, iter([made((2, 3)), made((2, 4))]))
    with pytest.raises(TypeError, match="int"):
        unified.write_features(path, 5)
    with pytest.raises(ValueError, match="float8"):
        unified.write_features(path, torch.zeros(2, 2).to(torch.float8_e4m3fn))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["npy", "safetensors", "raw", "rows"])
def test_tables_of_files(tmp_path, kind):
    expected, path = made((20, 6)), tmp_path / f"x.{kind}"
    options = {}
    if kind == "npy":
        np.save(path, expected.numpy())
    elif kind == "safetensors":
        save_file({"x": expected, "other": made((3,))}, path)
        options = {"key": "x"}
    elif kind == "raw":
        path.write_bytes(b"1234" + expected.numpy().tobytes())
        options = {"dtype": torch.float32, "shape": (20, 6), "offset": 4}
    else:
        unified.write_features(path, expected)
    budget = tiers.Budget(host="1KiB")
    found = unified.from_file(path, **options, budget=budget)
    assert torch.equal(found.cpu(), expected)
    assert budget.held_bytes("host") == 480
    with pytest.raises(BudgetError):
        unified.from_file(path, **options, budget=tiers.Budget(host=100))
    if kind == "rows":
        with pytest.raises(ValueError, match="padded rows"):
            unified.from_file(path, shared=True)
        return
    shared = unified.from_file(path, **options, shared=True)
    assert torch.equal(shared.cpu(), expected)
    shared[3] = 5
    assert torch.equal(pickle.loads(pickle.dumps(shared))[3].cpu(), torch.full((6,), 5.0))
    assert torch.equal(unified.from_file(path, **options)[3].cpu(), torch.full((6,), 5.0))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.int32, np.uint8, np.bool_, np.complex64])
def test_types_of_npy(tmp_path, dtype):
    array = np.arange(12).reshape(4, 3).astype(dtype)
    np.save(tmp_path / "x.npy", array)
    assert np.array_equal(unified.from_file(tmp_path / "x.npy").numpy(), array)


def test_files_that_are_not_read_as_they_are(tmp_path):
    np.save(tmp_path / "f.npy", np.asfortranarray(np.ones((3, 4))))
    np.save(tmp_path / "e.npy", np.ones((3, 4), dtype=">f4"))
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    save_file({"x": made((3, 4)), "y": made((3, 4))}, tmp_path / "x.safetensors")
    (tmp_path / "x.txt").write_text("1 2 3")
    for name, message in (
        ("f.npy", "ascontiguousarray"), ("e.npy", ">f4"), ("o.npy", r"\|O"), ("x.safetensors", "x, y; choose one"),
        ("x.txt", "dtype=torch.float32, shape="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            unified.from_file(tmp_path / name)
    with pytest.raises(ValueError, match="choose one of them"):
        unified.from_file(tmp_path / "x.safetensors", "z")
    with pytest.raises(ValueError, match="raw numbers need"):
        unified.from_file(tmp_path / "x.txt", dtype=torch.float32)
    with pytest.raises(FeatureFileError, match="cut short"):
        unified.from_file(tmp_path / "x.txt", dtype=torch.float32, shape=(10, 10))
    with pytest.raises(FileNotFoundError):
        unified.from_file(tmp_path / "nothing.npy")


def files(folder):
    np.save(folder / "a.npy", made((50, 6)).numpy())
    save_file({"x": made((50, 6))}, folder / "b.safetensors")
    unified.write_features(folder / "c.rows", made((5000, 6)))
    return sorted(folder.iterdir())


@pytest.mark.parametrize("number", range(3))
def test_a_file_that_is_cut_short_is_refused(tmp_path, number):
    path = files(tmp_path)[number]
    whole = path.read_bytes()
    for size in {0, 1, 7, 8, 60, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(FeatureFileError):
            unified.from_file(path)


@given(st.integers(0, 2), st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_refused_or_read_as_it_says(tmp_path, number, data):
    """No crash, no hang, nothing executed, nothing allocated that the file does not have."""
    folder = tmp_path / "files"
    if not folder.exists():
        folder.mkdir()
        files(folder)
    path = sorted(folder.iterdir())[number]
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 140))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / path.name
    damaged.write_bytes(raw)
    try:
        found = unified.from_file(damaged)
    except ValueError:  # FeatureFileError is one
        return
    assert found.nbytes <= len(raw)


@pytest.mark.parametrize("place", ["rows", "checksums", "header", "end"])
def test_damage_is_told_from_data(tmp_path, place):
    path = unified.write_features(tmp_path / "x.rows", made((5000, 6)))
    raw = bytearray(path.read_bytes())
    at = {"rows": 4096 + 3000 * 32, "checksums": len(raw) - 2, "header": 40, "end": None}[place]
    if at is None:
        raw += b"more"
    else:
        raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(
        FeatureFileError, match="rows 0 to 4999 differ from what was written" if place == "rows" else "x.rows is"
    ):
        unified.check(path)
    with pytest.raises(FeatureFileError):
        unified.from_file(path)


def test_a_file_of_another_version(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", made((5, 6)))
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<I", raw[8:12])[0]
    text = raw[16 : 16 + length].replace(b'"version": 1', b'"version": 2')
    raw[12:16] = struct.pack("<I", zlib.crc32(text))
    raw[16 : 16 + length] = text
    path.write_bytes(raw)
    with pytest.raises(FeatureFileError, match="format version 2, but this Penstock reads version 1"):
        unified.from_file(path)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", made((5, 6)))
    before = path.read_bytes()

    def fails():
        yield made((5, 6))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        unified.write_features(path, fails())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_what_was_there(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", made((5, 6)))
    code = (
        "import sys, torch\nfrom penstock import unified\n"
        "def rows():\n"
        "    yield torch.zeros(400000, 8)\n"
        "    print('half', flush=True); sys.stdin.read()\n"
        f"unified.write_features({str(path)!r}, rows())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    unified.check(path)
    assert unified.from_file(path).shape == (5, 6)
