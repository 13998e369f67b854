"""The driver of what a GPU has to show: every item runs, failures are rows, and it goes on where it stopped."""

import json

import pytest
from benchmarks import gpu
from benchmarks.gpu_items import ITEMS, PHASES

from penstock.devices import kinds
from penstock.testing import simulated


@pytest.fixture(autouse=True)
def _a_device():
    reason = simulated.why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("phases", [(1, 3), (2, 6), (4, 5)], ids=str)
def test_every_phase_runs_on_the_simulated_device(tmp_path, phases, capsys):
    options = ["--device", "sim", "--quick", "--out", str(tmp_path), "--minutes", "20"]
    options += [part for phase in phases for part in ("--phase", str(phase))]
    rows = gpu.main(options)
    wanted = {item.name for item in ITEMS if item.phase in phases and item.is_quick}
    assert {row["item"] for row in rows if row.get("state") == "done"} == wanted, capsys.readouterr().out
    assert {row["item"] for row in rows if "ours" in row} == wanted
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == rows
    table = (tmp_path / "gpu.md").read_text()
    assert "| runs |" in table  # a simulated device has no speed
    for row in rows:
        if row["item"] == "tests of tiers" and "ours" in row:
            assert row["ours"] >= 1
            assert row["peer_value"] == 0
    capsys.readouterr()
    assert gpu.main(options) == rows  # nothing runs again
    assert "at most" not in capsys.readouterr().out


def test_all_phases_have_items():
    assert {item.phase for item in ITEMS} == set(PHASES)
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    assert all(any(item.is_quick for item in ITEMS if item.phase == phase) for phase in PHASES)


@pytest.mark.skipif("cuda" in kinds(), reason="there is a CUDA device here")
def test_a_failure_is_a_row_and_stops_nothing(tmp_path, capsys):
    rows = gpu.main(["--phase", "4", "--phase", "5", "--out", str(tmp_path)])
    assert [(row["item"], row["state"]) for row in rows] == [
        (name, "failed") for name in ("fleets", "batches", "budgets")
    ]
    assert all("PyTorch finds no CUDA device here" in row["note"] for row in rows)
    assert "| fleets | | failed |" in (tmp_path / "gpu.md").read_text()
    capsys.readouterr()
    assert len(gpu.main(["--phase", "4", "--out", str(tmp_path)])) == 4  # tried again


def test_what_is_late_is_stopped_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_LEAST_S", 0.0)
    rows = gpu.main(["--device", "sim", "--quick", "--phase", "5", "--minutes", "0.005", "--out", str(tmp_path)])
    assert [(row["item"], row["state"]) for row in rows] == [("batches", "late")]


def test_a_line_that_was_cut_short_is_no_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"item": "link", "state": "done"}) + '\n{"item": "li')
    assert gpu.rows_of(tmp_path) == [{"item": "link", "state": "done"}]
    assert gpu.has_ended(tmp_path, "link")
