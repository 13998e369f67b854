"""The demo of each room, with a small task, on the machine that runs the tests."""

import json
from pathlib import Path

import pytest

from penstock.cli import _demo_rooms
from penstock.cli._choices import DemoRoom
from penstock.cli._progress import Steps


@pytest.mark.parametrize("room", list(DemoRoom))
def test_a_room_trains_where_plain_training_fails(tmp_path, room):
    out = tmp_path / "out"
    answer = _demo_rooms.run(room, out, tmp_path, 3, Steps(), small=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing stays on the disk
    summary = json.loads((out / "room.json").read_text())
    assert {Path(file).name for file in answer.data["files"]} == {
        "room.json", "room-memory.json", "report.html", "memory.png",
    }  # fmt: skip
    assert "llocate" in summary["failures"]["plain"]  # "can't allocate memory", "Unable to allocate"
    assert summary["largest_loss_difference"] <= (1e-4 if room is DemoRoom.RELATIONAL else 0)
    assert summary["taken_bytes"]["Penstock"] <= summary["cap_bytes"] < summary["taken_bytes"]["plain"]
    assert len(summary["losses"]) >= 3 and summary["time_ratio"] > 0
    page = (out / "report.html").read_text()
    for words in ("Training under a memory cap", "Plain PyTorch and Penstock", f"penstock demo --room {room.value}"):
        assert words in page
    assert {DemoRoom.FLEET: "Jobs", DemoRoom.UNIFIED: "Features in tiers"}.get(room, "") in page
