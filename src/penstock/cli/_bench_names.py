"""The available benchmarks: `step`, which comes with the package, and those of the source tree if it is present."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

STEP = "step"
_TREE = Path(__file__).parents[3]
_TAKES_OPTIONS = re.compile(r"^from benchmarks\.common import .*\bparser\b|\bcommon\.parser\(", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark that can run here."""

    name: str
    """The name on the command line."""
    what: str
    """A sentence on what it measures."""
    tree: Path | None
    """The source tree that holds it; ``None`` for a benchmark that comes with the package."""


def benchmarks() -> list[Benchmark]:
    """Return the benchmarks that can run here."""
    what = "a GPT's step, plain, checkpointed, offloaded and planned, in turn: time, peak, equality of losses"
    result = [Benchmark(name=STEP, what=what, tree=None)]
    tree = source_tree()
    for file in [] if tree is None else sorted((tree / "benchmarks").glob("*.py")):
        text = file.read_text()
        if _TAKES_OPTIONS.search(text) is not None:
            said = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
            result.append(Benchmark(name=file.stem, what=" ".join(said.split()), tree=tree))
    return result


def source_tree() -> Path | None:
    """Return the source tree if the package runs from it or the current directory is one, otherwise ``None``."""
    for folder in (_TREE, Path.cwd()):
        if (folder / "benchmarks" / "common.py").is_file() and (folder / "src" / "penstock").is_dir():
            return folder
    return None


def benchmark_names(incomplete: str) -> list[str]:
    """Complete names of benchmarks for a shell."""
    return [benchmark.name for benchmark in benchmarks() if benchmark.name.startswith(incomplete)]
