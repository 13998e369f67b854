"""The table of `docs/coverage.md`, made from the dated file of `benchmarks/results`.

python docs/coverage_table.py

writes it between the page's two marks. A test compares, so that page and file cannot drift apart.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "coverage.md"
MARKS = ("<!-- coverage: python docs/coverage_table.py -->", "<!-- end of coverage -->")
DOORS = {
    "offload": "`offload.activations`",
    "optimize": "`remat.optimize`",
    "compile": "`remat.compile`",
    "string": '`backend="penstock"`',
    "fleet": "`fleet.run`",
}
"""As columns are headed, by the door's name."""


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


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{tables()}\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
