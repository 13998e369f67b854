"""The tables of `docs/coverage.md`, made from the dated files of `benchmarks/results`.

python docs/coverage_table.py

writes them between the page's marks. A test compares, so that page and file cannot drift apart.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "coverage.md"
MARKS = ("<!-- coverage: python docs/coverage_table.py -->", "<!-- end of coverage -->")
LOOP_MARKS = ("<!-- loops: python docs/coverage_table.py -->", "<!-- end of loops -->")
DOORS = {
    "offload": "`offload.activations`",
    "optimize": "`remat.optimize`",
    "compile": "`remat.compile`",
    "string": '`backend="penstock"`',
    "fleet": "`fleet.run`",
}
"""As columns are headed, by the door's name."""
LOOP_DOORS = {
    "activations": "`offload.activations`",
    "training": "`offload.training`",
    "compile": "`remat.compile`",
    "string": '`backend="penstock"`',
    "fleet": "`fleet.run`",
}
"""The same for loops."""
GOOD = ("equal", "told", "refused", "PYTORCH")
"""Verdicts that keep what is promised."""


def tables() -> str:
    """Return the counts and the table as Markdown, from the newest file."""
    file = max(RESULTS.glob("20??-??-??-cpu-coverage.json"))
    content = json.loads(file.read_text())
    cases: dict[tuple[str, str], dict[str, Any]] = {(row["name"], row["door"]): row for row in content["cases"]}
    versions = ", ".join(f"{name} {version}" for name, version in content["configuration"]["libraries"].items())
    link = f"[{file.stem[:10]}](../benchmarks/results/{file.name})"
    said = f"From {link}: PyTorch {content['machine']['torch']}, {versions}."
    return "\n\n".join([said, _counts(content["cases"]), _architectures(cases)])


def _counts(cases: list[dict[str, Any]]) -> str:
    rows = [
        "| door | ran | bit-identical | close | refused | failed, crashed or hung | not equal "
        "| budget kept exactly | within 1% | above that, with a warning | above that, without a warning |",
        "|---" * 11 + "|",
    ]
    for door, title in DOORS.items():
        mine = [case for case in cases if case["door"] == door]
        verdicts = Counter(row["verdict"] for row in mine)
        errors = sum(verdicts[verdict] for verdict in ("failed", "crashed", "hung"))
        cells = [title, len(mine), verdicts["equal"], verdicts["close"], verdicts["refused"], errors]
        cells += [verdicts["not equal"], *_held([row for row in mine if "is_held" in row])]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _held(cases: list[dict[str, Any]]) -> list[int]:
    """Return how many kept their budget, did so within 1%, exceeded it and said so, and exceeded it in silence."""
    above = [case for case in cases if case["peak_bytes"] > 1.01 * case["budget_bytes"]]
    kept, said = sum(case["is_held"] for case in cases), sum(bool(row["said"]) for row in above)
    return [kept, len(cases) - kept - len(above), said, len(above) - said]


def _architectures(cases: dict[tuple[str, str], dict[str, Any]]) -> str:
    cells = {name: [_cell(cases.get((name, door))) for door in DOORS] for name, _ in cases}
    rows = [f"| {name} | {' | '.join(some)} |" for name, some in cells.items()]
    head = [f"| architecture | {' | '.join(DOORS.values())} |", "|---" * (len(DOORS) + 1) + "|"]
    return "\n".join(head + rows)


def _cell(case: dict[str, Any] | None) -> str:
    """Return the verdict, and the peak as a share of the budget."""
    if case is None:
        return ""
    if "is_held" not in case:
        return f"**{case['verdict']}**"
    share = f"{case['peak_bytes'] / case['budget_bytes']:.2%}"
    if case["is_held"]:
        return f"{case['verdict']}, {share}"
    return f"{case['verdict']}, {share} {'(warned)' if case['said'] else '**over**'}"


def loop_tables() -> str:
    """Return the counts and the tables of loops as Markdown, from the newest file."""
    file = max(RESULTS.glob("20??-??-??-cpu-loops.json"))
    content = json.loads(file.read_text())
    rows = [row for row in content["cases"] if row["verdict"] not in ("none", "PLAIN")]
    loops, classes = ([row for row in rows if (row["theme"] == "public") is is_public] for is_public in (False, True))
    link = f"[{file.stem[:10]}](../benchmarks/results/{file.name})"
    said = f"From {link}: PyTorch {content['machine']['torch']}."
    of_classes = "Classes of the package pytorch-optimizer, of which those that are not equal through every door:"
    return "\n\n".join([said, _loop_counts(loops), _loops(loops), of_classes, _loop_counts(classes), _unequal(classes)])


def _loop_counts(rows: list[dict[str, Any]]) -> str:
    lines = ["| door | ran | equal | told | refused | as PyTorch's own | over, untold | other |", "|---" * 8 + "|"]
    for door, title in LOOP_DOORS.items():
        verdicts = Counter(row["verdict"] for row in rows if row["door"] == door)
        if not verdicts:
            continue
        known = ("equal", "told", "refused", "PYTORCH", "OVER")
        others = {verdict: number for verdict, number in verdicts.items() if verdict not in known}
        rest = ", ".join(f"{number} {verdict.lower()}" for verdict, number in sorted(others.items())) or "0"
        lines.append(f"| {title} | {verdicts.total()} | {' | '.join(str(verdicts[name]) for name in known)} | {rest} |")
    return "\n".join(lines)


def _loops(rows: list[dict[str, Any]]) -> str:
    doors = [door for door in LOOP_DOORS if any(row["door"] == door for row in rows)]
    lines = [f"| loop | theme | {' | '.join(LOOP_DOORS[door] for door in doors)} |", "|---" * (len(doors) + 2) + "|"]
    verdicts = {(row["name"], row["door"]): row["verdict"] for row in rows}
    for name, theme in dict.fromkeys((row["name"], row["theme"]) for row in rows):
        cells = [_verdict(verdicts.get((name, door))) for door in doors]
        lines.append(f"| {name.replace('_', ' ')} | {theme} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _unequal(rows: list[dict[str, Any]]) -> str:
    doors = [door for door in LOOP_DOORS if any(row["door"] == door for row in rows)]
    verdicts = {(row["name"], row["door"]): row["verdict"] for row in rows}
    names = sorted({name for (name, _), verdict in verdicts.items() if verdict != "equal"})
    lines = [f"| class | {' | '.join(LOOP_DOORS[door] for door in doors)} |", "|---" * (len(doors) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(_verdict(verdicts.get((name, door))) for door in doors)} |" for name in names]
    return "\n".join(lines)


def _verdict(verdict: str | None) -> str:
    if verdict is None:
        return ""
    said = "as PyTorch's own" if verdict == "PYTORCH" else verdict.lower()
    return said if verdict in GOOD else f"**{said}**"


def main() -> None:
    """Write the tables into the page."""
    for marks, content in ((MARKS, tables()), (LOOP_MARKS, loop_tables())):
        before, _, rest = PAGE.read_text().partition(marks[0])
        after = rest.partition(marks[1])[2]
        PAGE.write_text(f"{before}{marks[0]}\n\n{content}\n\n{marks[1]}{after}")


if __name__ == "__main__":
    main()
