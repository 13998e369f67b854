"""All measurements for a GPU, the most important first: `make gpu`.

    python -m benchmarks.gpu                          # all phases, half an hour
    python -m benchmarks.gpu --phase 2 --minutes 5    # one phase
    python -m benchmarks.gpu --device sim --quick     # on the simulated device: shows that everything runs

Each item (`benchmarks.gpu_items`) runs in its own process, within the time left of its phase. Every row is written as
soon as it is known; a failure is a row and stops nothing; an item that has ended is not run again, unless you give
``--again``. The folder then has ``gpu.json`` and ``gpu.md``, with hardware and versions.
"""

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

from benchmarks.forked import Forked
from benchmarks.gpu_items import ITEMS, PHASES
from benchmarks.gpu_rows import Context, Item
from penstock.devices import kinds
from penstock.probe import provenance

_ROW = "ROW "
"""The prefix of a line of a child's output that is a row."""
_LEAST_S = 5.0
"""Seconds that must be left of its phase for an item to start."""


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the requested items and return the rows of the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", type=int, choices=PHASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--minutes", type=float, help="of each phase, instead of its own")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, and measures nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of rows and tables")
    parser.add_argument("--data", type=Path, help="folder of data sets; without it graphs are made")
    parser.add_argument("--again", action="store_true", help="also what has come to its end before")
    settings = parser.parse_args(arguments)
    settings.out.mkdir(parents=True, exist_ok=True)
    if settings.again:
        (settings.out / "rows.jsonl").unlink(missing_ok=True)
    for phase in settings.phase or PHASES:
        run_phase(phase, settings)
    rows = rows_of(settings.out)
    write(settings, rows)
    return rows


def run_phase(phase: int, settings: argparse.Namespace) -> None:
    """Run the items of a phase in order, as far as the time allows."""
    ends_s = time.monotonic() + 60 * (PHASES[phase] if settings.minutes is None else settings.minutes)
    for item in ITEMS:
        if item.phase != phase or has_ended(settings.out, item.name) or (settings.quick and not item.is_quick):
            continue
        left_s = ends_s - time.monotonic()
        if left_s < _LEAST_S:
            print(f"phase {phase}: no time left for {item.name}", flush=True)
            continue
        print(f"phase {phase}: {item.name}, at most {left_s:.0f} s", flush=True)
        run_item(item, settings, left_s)


def run_item(item: Item, settings: argparse.Namespace, limit_s: float) -> None:
    """Run an item in its own process, and keep each of its rows at once."""
    said: list[str] = []
    about = {"item": item.name, "phase": item.phase, "headline": item.headline, "paper": item.paper}

    def heard(line: str) -> None:
        if line.startswith(_ROW):
            keep(settings.out, {**about, **json.loads(line.removeprefix(_ROW))})
        elif line.strip():
            said.append(line.rstrip())

    start_s = time.monotonic()
    status = Forked(child, item.name, settings, heard=heard).wait(limit_s)
    if status is None:
        keep(settings.out, _end(item, "late", f"stopped after {limit_s:.0f} s"))
    elif status:
        keep(settings.out, _end(item, "failed", "\n".join(said[-12:]) or f"exit code {status}"))
    else:
        keep(settings.out, _end(item, "done", f"{time.monotonic() - start_s:.0f} s"))


def child(name: str, settings: argparse.Namespace) -> None:
    """Run one item, and print its rows."""
    if settings.device == "sim":
        from penstock.testing import simulated

        simulated.load()
    elif settings.device not in kinds():
        raise SystemExit("PyTorch finds no CUDA device here; --device sim --quick shows that everything runs")
    (item,) = (item for item in ITEMS if item.name == name)
    context = Context(device=settings.device, quick=settings.quick, data=settings.data, out=settings.out)
    for result in item.run(context):
        print(_ROW + json.dumps(result.row()), flush=True)


def keep(out: Path, row: dict[str, Any]) -> None:
    """Append a row to the folder's rows."""
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Return all rows so far, without lines that were cut short."""
    file, result = out / "rows.jsonl", []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            result.append(json.loads(line))
        except ValueError:
            continue
    return result


def has_ended(out: Path, name: str) -> bool:
    """Return whether an item has ended. One that failed or exceeded its time is run again."""
    return any(row["item"] == name and row.get("state") == "done" for row in rows_of(out))


def _end(item: Item, state: str, note: str) -> dict[str, Any]:
    return {"item": item.name, "phase": item.phase, "state": state, "note": note}


def write(settings: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the JSON file and the table. A simulated device has no speed, so its numbers are left out."""
    about = provenance("cuda" if settings.device == "cuda" else "cpu")
    is_measured = settings.device == "cuda" and not settings.quick
    document = {"provenance": about, "device": settings.device, "quick": settings.quick, "rows": rows}
    (settings.out / "gpu.json").write_text(json.dumps(document, indent=1))
    lines = [
        f"{about['device']}, PyTorch {about['torch']}, CUDA {about['cuda']}, {about['cores']} cores, {about['date']}, "
        f"Penstock {about['penstock']}",
        "",
        "| headline | paper | what | peer here | ours | note |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "ours" in row:
            ours, peer = (shown(row[name], row["unit"]) if is_measured else "runs" for name in ("ours", "peer_value"))
            cells = [row["headline"], row["paper"], row["name"], f"{row['peer']} {peer}" if row["peer"] else "", ours]
            lines.append(f"| {' | '.join(cells)} | {row['note'] if is_measured else ''} |")
        elif row["state"] != "done":
            note = row["note"].replace("\n", " ").replace("|", "/")
            lines.append(f"| {row['item']} | | {row['state']} | | | {note} |")
    (settings.out / "gpu.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def shown(value: float | None, unit: str) -> str:
    """Return a number with its unit."""
    if value is None:
        return ""
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{text} {unit}".strip()


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["benchmarks.gpu_items"])
    main()
