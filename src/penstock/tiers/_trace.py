"""Export of events as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.arguments import checked, must_be
from penstock.tiers._events import Event


@checked("write_trace('run.trace.json', offloader.trace())")
def write_trace(
    path: str | Path, events: Iterable[Event], *, memory: Sequence[tuple[float, int]] = (), name: str = "penstock"
) -> None:
    """Write ``events`` as a Chrome trace (JSON) with one track per lane, one for stalls, and one counter for memory.

    ``memory`` is a timeline of ``(seconds of time.time(), bytes)``; times in the trace count from the earliest one.
    """
    events = list(events)
    for event in events:
        if not isinstance(event, Event):
            raise must_be(
                "events", "a list of penstock.tiers.Event", event, "write_trace('run.trace.json', offloader.trace())"
            )
    starts = [event.start_s for event in events] + [time_s for time_s, _ in memory[:1]]
    zero_s = min(starts, default=0.0)
    lanes = {lane: number for number, lane in enumerate(sorted({event.lane for event in events}), start=1)}
    rows: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}]
    for lane, number in lanes.items():
        rows.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": lane}})
    rows.extend(
        {
            "ph": "X",
            "pid": 1,
            "tid": lanes[event.lane],
            "name": f"{event.kind} {event.label}".strip(),
            "cat": event.kind,
            "ts": (event.start_s - zero_s) * 1e6,
            "dur": event.duration_s * 1e6,
            "args": {"size_bytes": event.size_bytes},
        }
        for event in events
    )
    rows.extend(
        {"ph": "C", "pid": 1, "name": "memory", "ts": (time_s - zero_s) * 1e6, "args": {"bytes": held_bytes}}
        for time_s, held_bytes in memory
    )
    Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
