"""Files of rows are written completely or not at all."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from unified_cases import ROWS, numbers

from penstock import unified
from penstock.unified import _aligned, _write
from penstock.unified._files import find_table

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


@given(
    st.integers(0, 40), st.sampled_from([(), (1,), (3,), (128,), (129,), (2, 70), (0,)]), st.sampled_from(DTYPES),
    st.integers(1, 17),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path, rows, shape, dtype, chunk):
    expected, path = numbers((rows, *shape), dtype), tmp_path / "x.rows"
    blocks = expected.split(chunk) if rows else [expected]
    assert unified.write_features(path, iter(blocks)) == path
    unified.check(path)
    read = unified.from_file(path)
    assert read.shape == expected.shape and torch.equal(read.cpu(), expected)
    table = find_table(path)
    assert table.stride_bytes == _aligned.stride_for(table.row_bytes)
    assert os.stat(path).st_size % 4 == 0
    assert not list(tmp_path.glob(".*"))


def test_many_chunks_and_other_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(_write, "CHUNK_BYTES", 4096)
    expected = numbers((1000, 33))
    np.save(tmp_path / "x.npy", expected.numpy())
    save_file({"x": expected, "y": expected[:3].clone()}, tmp_path / "x.safetensors")
    sources = [
        expected, unified.wrap(expected), tmp_path / "x.npy", (block for block in expected.split(7)), [expected],
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
        unified.write_features(path, iter([numbers((2, 3)), numbers((2, 4))]))
    with pytest.raises(TypeError, match="int"):
        unified.write_features(path, 5)
    with pytest.raises(ValueError, match="float8"):
        unified.write_features(path, torch.zeros(2, 2).to(torch.float8_e4m3fn))
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="`source` must be a tensor, a file, or what yields tensors"):
        unified.write_features(tmp_path / "a.features", (number for number in range(3)), progress=False)
    with pytest.raises(ValueError, match="`path` must name a file, got '.'"):
        unified.write_features("", ROWS, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", numbers((5, 6)))
    before = path.read_bytes()

    def fails():
        yield numbers((5, 6))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        unified.write_features(path, fails())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_what_was_there(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", numbers((5, 6)))
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
