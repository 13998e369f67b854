"""Coverage: which architectures train through which door like plain PyTorch, and within their budget.

    python -m benchmarks.coverage --json coverage.json          # rows that are in the file are not run again
    python -m benchmarks.coverage --model bert --door compile   # one case, with its message
    python -m benchmarks.coverage --library timm --again --json coverage.json

Each case (an architecture and a door) runs in its own process under a time limit, forked from one that has imported
the libraries, so that a crash is a row. Verdicts:

- equal: losses, gradients of every step, parameters and buffers are bit-identical to plain PyTorch's;
- close: they are equal within rounding, and plain PyTorch does not repeat itself exactly either;
- refused: an error of Penstock's own, which says why;
- failed: any other error; crashed: the process ended; hung: it ran past the limit;
- not equal: it trained, and differs.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common, coverage_case, processes, zoo

LIMIT_S = 300.0
VERDICTS = ("equal", "close", "refused", "failed", "crashed", "hung", "not equal")
_QUICK = ("bert", "gpt2", "t5", "resnet")
_PRELOADED = ("benchmarks.coverage_preload",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An architecture and a door."""

    name: str
    """Name of the architecture."""
    door: str
    """One of `coverage_case.NAMES`, or of its ``PEERS``."""

    @property
    def key(self) -> tuple[str, str]:
        """The key that identifies its row."""
        return self.name, self.door


def in_this_process(case: Case, disk: Path, share: float, num_each: int) -> dict[str, Any]:
    """Run a case here, and return its row."""
    import torch

    torch.set_num_threads(1)
    steps = coverage_case.schedule(num_each)
    return coverage_case.case(zoo.all_architectures()[case.name], case.door, disk, share=share, steps=steps)


def _target(case: Case, disk: Path, tell: processes.Tell, share: float, num_each: int) -> None:
    tell(in_this_process(case, disk, share, num_each))


def _row(ended: processes.Ended[Case]) -> dict[str, Any]:
    """Return the row of a case."""
    case, log = ended.case, ended.log[-2000:]
    row: dict[str, Any] = {"name": case.name, "door": case.door}
    row["library"] = zoo.all_architectures()[case.name].library
    if ended.row is not None:
        row |= ended.row
    elif ended.is_late:
        row |= {"verdict": "hung", "message": f"more than {ended.duration_s:.0f} s", "trace": log}
    elif ended.exit_code == 1:  # Python's own end: plain training failed
        row |= {"verdict": "failed", "message": f"plain training: {log.strip().splitlines()[-1]}", "trace": log}
    else:
        row |= {"verdict": "crashed", "message": f"exit status {ended.exit_code}", "trace": log}
    return row | {"duration_s": ended.duration_s}


def run(cases: Sequence[Case], settings: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run cases, ``settings.jobs`` at once, and yield each row when it is complete."""
    yield from map(
        _row,
        processes.run(
            _target,
            cases,
            arguments=(settings.share, settings.steps),
            preloaded=_PRELOADED,
            jobs=settings.jobs,
            limit_s=settings.limit,
            scratch=scratch,
        ),
    )


def rows_of(cases: Sequence[dict[str, Any]]) -> list[common.Row]:
    """Count verdicts and budgets, over all and by library."""
    rows = []
    for door in coverage_case.NAMES:
        mine = [case for case in cases if case["door"] == door]
        if not mine:
            continue
        verdicts = Counter(row["verdict"] for row in mine)
        rows += [
            common.Row(name=door, metric=verdict, value=verdicts[verdict], unit="architectures") for verdict in VERDICTS
        ]
        trained = [row for row in mine if "is_held" in row and not row["said"]]
        named = [row for row in trained if row["is_named"]]
        for what, some in (("budgets", trained), ("named budgets", named)):
            rows.append(common.Row(name=door, metric=f"{what} tried", value=len(some), unit="budgets"))
            kept = sum(row["is_held"] for row in some)
            rows.append(common.Row(name=door, metric=f"{what} held", value=kept, unit="budgets"))
    return rows


def table(cases: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a line per case for the terminal."""
    return [
        [case["name"], case["door"], case["verdict"], _budget(case), case.get("message", "")[:90]] for case in cases
    ]


def _budget(row: dict[str, Any]) -> str:
    if "is_held" not in row:
        return ""
    ratio = f"{row['peak_bytes'] / row['budget_bytes']:.4f} of " + ("the named" if row["is_named"] else "the first")
    return ratio + (", and said so" if row["said"] else "")


def chosen(settings: argparse.Namespace) -> list[Case]:
    """Return the requested cases whose library is installed."""
    architectures = zoo.all_architectures()
    names = settings.model or (_QUICK if settings.quick else list(architectures))
    if unknown := set(names) - set(architectures):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(architectures)}")
    wanted = [
        architectures[name] for name in names if architectures[name].library in (settings.library or zoo.LIBRARIES)
    ]
    for library in sorted({architecture.library for architecture in wanted if not architecture.is_installed}):
        print(f"without {library}, which is not installed: pip install 'penstock[zoo]'")
    return [
        Case(name=architecture.name, door=door)
        for door in settings.door or coverage_case.NAMES
        for architecture in wanted
        if architecture.is_installed
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--model", action="append", help="an architecture; may be given several times")
    options.add_argument("--library", action="append", choices=zoo.LIBRARIES)
    options.add_argument("--door", action="append", choices=[*coverage_case.NAMES, *coverage_case.PEERS])
    options.add_argument("--share", type=float, default=0.05, help="of plain's activation peak: the first budget")
    options.add_argument(
        "--steps", type=int, default=coverage_case.NUM_EACH, help="with each size of batch, at least 2"
    )
    options.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    options.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a case may take")
    options.add_argument("--again", action="store_true", help="run cases again that are in the file of --json")
    settings = options.parse_args(arguments)
    cases = chosen(settings)
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if settings.json is not None and settings.json.is_file():
        known = {(row["name"], row["door"]): row for row in json.loads(settings.json.read_text())["cases"]}
    todo = [case for case in cases if settings.again or case.key not in known]
    results = []
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="coverage-") as scratch:
        for row in run(todo, settings, Path(scratch)):
            key = row["name"], row["door"]
            known[key] = row
            results.append(row)
            print("  ".join([f"{len(results)}/{len(todo)}", *table([row])[0], f"{row['duration_s']} s"]), flush=True)
            _write(settings, list(known.values()))
    wanted = {case.key for case in cases}
    shown = [row for key, row in known.items() if key in wanted]
    common.show("Architectures through doors", ["architecture", "door", "verdict", "peak", ""], table(shown))
    for row in rows_of(shown):
        print(f"{row.name}: {row.metric}: {row.value}")
    return shown


def _write(settings: argparse.Namespace, cases: Sequence[dict[str, Any]]) -> None:
    """Write all rows; the old file stays complete until the new one is."""
    if settings.json is None:
        return
    draft = settings.json.with_name(settings.json.name + ".new")
    libraries = {library: _version(library) for library in zoo.LIBRARIES}
    configuration = {"share": settings.share, "steps": settings.steps, "libraries": libraries}
    draft.write_text(common.as_json(configuration, rows_of(cases), cases=cases))
    draft.replace(settings.json)


def _version(library: str) -> str:
    return importlib.metadata.version(library) if importlib.util.find_spec(library) else ""


if __name__ == "__main__":
    main()
