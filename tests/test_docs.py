"""Every Python block of the README and the docs runs; every link leads somewhere; what pages quote is what there is."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import errors
from penstock.units import parse_bytes

ROOT = Path(__file__).parents[1]


def name_of(page):
    return str(page.relative_to(ROOT))


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES}
TEN_LINES = BLOCKS.pop(ROOT / "docs" / "ten-lines.md")
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \|", TROUBLES, re.MULTILINE)
OF_PYTORCH = {
    "Memory block of unknown size was allocated before the profiling started",
}


RUNNER = """
import gc, runpy, sys

for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()  # it holds what a block made, and budgets count that
    gc.collect()
"""


def run_alone(blocks, folder):
    """Runs blocks in a process of their own, where nothing else holds memory; returns what they print."""
    files = []
    for number, block in enumerate(blocks):
        files.append(folder / f"block_{number}.py")
        files[-1].write_text(block)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *files],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1]), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks], ids=name_of)
def test_blocks_run(page, tmp_path):
    run_alone(BLOCKS[page], tmp_path)


@pytest.mark.parametrize("block", TEN_LINES)
def test_ten_lines_are_ten_at_most(block):
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 10
    assert max(map(len, block.splitlines())) <= 120


def run_and_tell(block, told, folder):
    """What ``told`` is after a block has run, as text."""
    return run_alone([f"{block}\nprint({told})\n"], folder)


@pytest.mark.parametrize("number", [0, 1], ids=["hugging face", "lightning"])
def test_ten_lines_keep_a_budget_that_plain_training_exceeds(number, tmp_path):
    block = TEN_LINES[number]
    (text,) = re.findall(r'budget="(.*?)"', block)
    kept, free = (
        int(run_and_tell(one, "less.summary().peak_bytes", tmp_path).split()[-1])
        for one in (block, block.replace(f'"{text}"', '"64GiB", policy=lambda saved: False'))
    )
    assert 0 < kept <= parse_bytes(text) < free


def test_ten_lines_train_a_fleet_of_eight(tmp_path):
    out = run_alone([TEN_LINES[2]], tmp_path)
    assert out.count("done after 4 steps") == 8 and "failed" not in out


def test_ten_lines_train_on_features_beyond_memory(tmp_path):
    told = "features.host_bytes, 20_000 * features.row_bytes, features.statistics().disk_rows"
    host_bytes, all_bytes, disk_rows = map(int, run_and_tell(TEN_LINES[3], told, tmp_path).splitlines()[-1].split())
    assert host_bytes <= parse_bytes("4MiB") < all_bytes and disk_rows > 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def texts_in_source():
    """Every text in the library, with three dots for the values in it."""
    for file in sorted(Path(errors.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(one.value if isinstance(one, ast.Constant) else "..." for one in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


SOURCE = "\n".join(text.replace("\n", " ") for text in texts_in_source())


@pytest.mark.parametrize("head", ROWS)
def test_message_is_still_in_the_source(head):
    pattern = r"[^\n]*?".join(re.escape(part) for part in head.split("..."))
    assert (re.search(pattern, SOURCE) is not None) != (head in OF_PYTORCH), head


def test_messages_are_many():
    assert len(ROWS) > 80 and len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_and_warning_has_an_entry(name):
    assert f"`{name}`" in TROUBLES


def test_table_of_results_is_what_the_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    made = importlib.import_module("results_table")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for table in (made.table(), made.misuse_table()):
        assert table in page, "run: python docs/results_table.py"


@pytest.mark.parametrize("room", ["fleet", "offload", "probe", "relational", "remat", "tiers", "unified"])
def test_rooms_have_one_shape(room):
    page = (ROOT / "docs" / "rooms" / f"{room}.md").read_text()
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    shape = ["When", "When not", "How it works", "Limits", "API"]
    assert [one for one in headings if one in shape] == shape
    assert f"(../../src/penstock/{room}/__init__.py)" in page.partition("## API")[2]
