"""Files of rows: what is written is read, damage is refused, nothing half-written is ever seen."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from unified_cases import numbers

from penstock import unified
from penstock.errors import FeatureFileError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.int32, np.uint8, np.bool_, np.complex64])
def test_types_of_npy(tmp_path, dtype):
    array = np.arange(12).reshape(4, 3).astype(dtype)
    np.save(tmp_path / "x.npy", array)
    assert np.array_equal(unified.from_file(tmp_path / "x.npy").numpy(), array)


def test_files_that_are_not_read_as_they_are(tmp_path):
    np.save(tmp_path / "f.npy", np.asfortranarray(np.ones((3, 4))))
    np.save(tmp_path / "e.npy", np.ones((3, 4), dtype=">f4"))
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    save_file({"x": numbers((3, 4)), "y": numbers((3, 4))}, tmp_path / "x.safetensors")
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
    np.save(folder / "a.npy", numbers((50, 6)).numpy())
    save_file({"x": numbers((50, 6))}, folder / "b.safetensors")
    unified.write_features(folder / "c.rows", numbers((5000, 6)))
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
        table = unified.from_file(damaged)
    except ValueError:  # FeatureFileError is one
        return
    assert table.nbytes <= len(raw)
