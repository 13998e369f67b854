"""`penstock bench`: runs benchmarks by name and gives one JSON file and one table for each."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli._answer import Answer, as_json
from penstock.cli._bench_names import STEP, Benchmark, benchmarks
from penstock.cli._fault import Misuse
from penstock.cli._progress import Steps
from penstock.cli._tables import print_table
from penstock.errors import PenstockError

_NUM_LAST_LINES = 3


def listed() -> Answer:
    """Answer `penstock bench --list`."""
    rows = benchmarks()

    def show(console: Console) -> None:
        table = Table("benchmark", "what it measures")
        for benchmark in rows:
            table.add_row(benchmark.name, benchmark.what)
        print_table(table, console)
        if len(rows) == 1:
            console.print(_where_are_others(), highlight=False)

    return Answer(
        data={"benchmarks": [{"name": benchmark.name, "what": benchmark.what} for benchmark in rows]}, show=show
    )


def answer(
    names: list[str], quick: bool, device: str, disk: Path, out: Path | None, sizes: Mapping[str, int], steps: Steps
) -> Answer:
    """Run benchmarks one after the other; each one's JSON file is written to ``out`` as soon as it is done."""
    chosen = _chosen(names)
    if sizes and STEP not in names:
        raise Misuse(
            f"--{next(iter(sizes)).replace('num_', '')} is of `penstock bench step`; the others have their own"
        )
    documents: dict[str, dict[str, Any]] = {}
    for benchmark in chosen:
        if benchmark.tree is not None:
            steps.phase(f"running {benchmark.name}")
            documents[benchmark.name] = _from_tree(benchmark, benchmark.tree, quick, device, disk)
        else:
            from penstock.cli import _bench_step

            documents[benchmark.name] = _bench_step.measure(quick, device, disk, sizes, steps)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{benchmark.name}.json").write_text(as_json(documents[benchmark.name]) + "\n")
    return Answer(data={"benchmarks": documents}, show=lambda console: _show(documents, out, console))


def _chosen(names: list[str]) -> list[Benchmark]:
    known = {benchmark.name: benchmark for benchmark in benchmarks()}
    unknown = [name for name in names if name not in known]
    if unknown:
        others = "" if len(known) > 1 else f" {_where_are_others()}"
        raise Misuse(f"there is no benchmark {unknown[0]!r} here; there are {', '.join(known)}.{others}")
    return [known[name] for name in dict.fromkeys(names)]


def _where_are_others() -> str:
    return "The others, one per claim, need the source tree: unpack the source distribution and run this inside of it."


def _from_tree(benchmark: Benchmark, tree: Path, quick: bool, device: str, disk: Path) -> dict[str, Any]:
    """Run a benchmark of the source tree in its own process; its output goes to standard error."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        file = Path(folder) / f"{benchmark.name}.json"
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{benchmark.name}",
            "--device",
            device,
            "--disk",
            str(disk.resolve()),
        ]
        command += ["--json", str(file), *(["--quick"] if quick else [])]
        paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.run(
                command, cwd=tree, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            said.seek(0)
            text = said.read()
        sys.stderr.write(text)
        if process.returncode or not file.exists():
            last = " ".join(text.strip().splitlines()[-_NUM_LAST_LINES:])
            raise PenstockError(f"{' '.join(command[1:])} ended with {process.returncode}: {last}")
        document: dict[str, Any] = json.loads(file.read_text())
        return document


def _show(documents: Mapping[str, Mapping[str, Any]], out: Path | None, console: Console) -> None:
    for name, document in documents.items():
        if name == STEP:
            from penstock.cli import _bench_step

            _bench_step.show(document, console)
        else:
            table = Table("name", "metric", "value", "unit", "ratio", title=name, title_justify="left")
            for row in document["rows"]:
                ratio = row.get("ratio")
                table.add_row(
                    row["name"],
                    row["metric"],
                    f"{row['value']:.4g}",
                    row["unit"],
                    "" if ratio is None else f"{ratio:.3f}",
                )
            print_table(table, console)
        if out is not None:
            console.print(f"wrote {out / f'{name}.json'}", highlight=False, markup=False, soft_wrap=True)
