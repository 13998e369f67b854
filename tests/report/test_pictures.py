"""Pictures are written, and a missing extra says how to get it."""

import sys

import pytest

from penstock.errors import PenstockError
from penstock.report import gantt, memory_timeline, throughput_curve


def test_gantt(tmp_path):
    path = tmp_path / "units.svg"
    gantt(
        path, {"cuda:0": [(0.0, 1.0, "one"), (1.5, 2.0, "two")], "cuda:1": [(0.5, 2.0, "one")]}, title="Who was where"
    )
    drawn = path.read_text()
    assert all(word in drawn for word in ("cuda:0", "cuda:1", "Who was where"))


def test_memory_timeline(tmp_path):
    path = tmp_path / "memory.png"
    memory_timeline(path, {"plain": [(1.0, 0), (2.0, 2**30)], "less": [(5.0, 0), (6.0, 2**20)]}, limit_bytes=2**29)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_throughput_curve(tmp_path):
    path = tmp_path / "curve.svg"
    throughput_curve(path, {"keep": [(2**30, 3.0, "8"), (2**29, 2.0, "4")]})
    assert "<!-- keep -->" in path.read_text()  # matplotlib draws letters as paths, and says what they are


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PenstockError, match=r"penstock\[report\]"):
        memory_timeline(tmp_path / "a.png", {"plain": [(0.0, 1)]})
