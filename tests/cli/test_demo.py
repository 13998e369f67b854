"""The demo, with few steps and a small model, on the machine that runs the tests."""

import json
from pathlib import Path

from rich.console import Console

from penstock.cli import _demo, _demo_child
from penstock.cli._answer import as_json
from penstock.cli._progress import Steps


def test_demo_shows_what_it_promises(tmp_path):
    console = Console(record=True, width=120)
    answer = _demo.run(tmp_path / "out", tmp_path, 3, Steps(), console, num_layers=5, batch=6, num_large_layers=4)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [Path(file).name for file in answer.data["files"]] == [
        "summary.json",
        "memory.json",
        "trace.json",
        "report.html",
        "memory.png",
    ]
    assert {**summary, "files": answer.data["files"]} == json.loads(as_json(answer.data))
    assert "can't allocate memory" in summary["plain_failure"]
    assert set(summary["methods"]) == {"checkpoint", "offload", "remat"}
    for name in ("offload", "remat"):
        method = summary["methods"][name]
        assert method["largest_loss_difference"] == 0
        assert method["activation_share"] < 0.35
        assert method["activation_bytes"] < summary["cap_bytes"] < summary["plain"]["activation_bytes"]
        assert method["peak_bytes"] <= 1.01 * summary["budget_bytes"]
    offloaded = summary["methods"]["offload"]["steps"][-1]
    assert offloaded["parked_bytes"] > 0.5 * offloaded["saved_bytes"]
    assert summary["best"] in summary["methods"]
    assert len(summary["losses"]) == 3
    whole = summary["whole"]
    assert whole["cap_bytes"] < whole["state_bytes"] / 2
    assert all("can't allocate memory" in failure for failure in whole["failures"].values())
    assert whole["largest_loss_difference"] == 0 and len(whole["losses"]) == 3
    assert sum(whole["statistics"]["step_parked"].values()) > whole["state_bytes"] / 4
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert {"park", "fetch"} <= {row.get("cat") for row in trace["traceEvents"]}
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("All methods", "Penstock: training", "Machine, versions and command", "penstock demo --out"):
        assert words in page
    assert "Offloaded activations" in page and "A step planned for a budget" in page
    shown = console.export_text()
    assert "fails" in shown
    assert "trains" in shown


def test_thinning_keeps_the_peak():
    timeline = tuple((float(second), second % 7) for second in range(100))
    assert max(held for _, held in _demo_child._thinned(timeline, 9)) == 6
