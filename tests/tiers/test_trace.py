"""Traces that Perfetto opens."""

import json

from parking import parked

from penstock.tiers import write_trace


def test_a_trace_loads(waterfall, tmp_path):
    handle, _ = parked(waterfall)
    handle.get()
    file = tmp_path / "trace.json"
    events = waterfall.events.since()
    write_trace(file, events, memory=[(events[0].start_s - 1, 5), (events[0].end_s, 6)], name="test")
    rows = json.loads(file.read_text())["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert {row["name"] for row in spans} >= {"park storage 0", "fetch storage 0"}
    assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in spans)
    assert [row["args"]["bytes"] for row in rows if row["ph"] == "C"] == [5, 6]
    names = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names >= {"test", "device->disk", "disk->device"}
    file.unlink()


def test_an_empty_trace_loads(tmp_path):
    write_trace(tmp_path / "trace.json", [])
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 1
