"""Every Python block of the README and the docs runs; every link leads somewhere; what pages quote is what there is."""

import ast
import importlib
import json
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
CELLS = re.findall(r"^\| (`[^|]+) \|", TROUBLES, re.MULTILINE)
ROWS = [quoted for cell in CELLS for _, quoted in re.findall(r"(?<!`)(`+)(?!`) ?(.+?) ?(?<!`)\1(?!`)", cell)]
OF_PYTORCH = {
    "Memory block of unknown size was allocated before the profiling started",
}
OF_PARTS = {
    "the model has no ...",
    "the ... graphs of a step do not fit ...",
    "the graph of a step does not fit together with ...",
}
"""Messages that the source puts together."""


RUNNER = """
import atexit, contextlib, gc, importlib, json, os, runpy, sys, traceback
import torch

# what pages import, before there is a page; none of it starts a thread
for name in (
    "torch._functorch.aot_autograd", "torch._inductor.compile_fx", "torch.export",
    "penstock.advisor", "penstock.fleet", "penstock.offload", "penstock.relational", "penstock.remat",
    "penstock.unified", "accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2",
    "lightning.pytorch", "torch_geometric.nn", "torch_geometric.loader",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()  # a collection looks at what a page makes

for line in sys.stdin:
    folder, cache, files = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.update(TMPDIR=folder, XDG_CACHE_HOME=cache)
    code = 0
    try:
        for file in files:
            runpy.run_path(file, run_name="__main__")
            torch.compiler.reset()  # it holds what a block made, and budgets count that
            gc.collect()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


@pytest.fixture(scope="module")
def runner():
    """A process that has imported what takes seconds, and forks one for each page."""
    environment = {**os.environ, "PYTHONPATH": str(Path(errors.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run_alone(runner, tmp_path):
    """Runs blocks in a process of their own, where nothing else holds memory; returns what they print."""

    def run(blocks):
        files = []
        for number, block in enumerate(blocks):
            files.append(tmp_path / f"block_{number}.py")
            files[-1].write_text(block)
        request = [str(tmp_path), os.environ["XDG_CACHE_HOME"], [str(file) for file in files]]
        print(json.dumps(request), file=runner.stdin, flush=True)
        code = int(runner.stdout.readline())
        printed = [(tmp_path / name).read_text() for name in ("stdout", "stderr")]
        assert code == 0, printed[1]
        # PyTorch's first profiler in a process writes this, unless it is told not to
        assert "profiler_start" not in printed[1]
        return printed[0]

    return run


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks], ids=name_of)
def test_blocks_run(page, run_alone):
    run_alone(BLOCKS[page])


@pytest.mark.parametrize("block", TEN_LINES)
def test_ten_lines_are_ten_at_most(block):
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 10
    assert max(map(len, block.splitlines())) <= 120


def told_after(block, told):
    """The block, and what prints ``told`` when it has run."""
    return [f"{block}\nprint({told})\n"]


SHOWN = {
    "README.md": (0, "offloader.statistics()"),
    "docs/start.md": (2, "offloader.statistics()"),
    "docs/rooms/offload.md": (0, "offloader.statistics()"),
    "docs/rooms/report.md": (0, "offloader.statistics()"),
    "docs/integrations/hugging-face.md": (0, "callback.summary()"),
    "docs/integrations/lightning.md": (0, "callback.summary()"),
    "docs/integrations/accelerate.md": (0, "offloader.summary()"),
}
"""Blocks that show offloading first on their page, and what says what they moved."""
SLOWLY = """
import penstock.offload._learn as learn

learn._rates = lambda _: (1e6, 1e6)  # plans as if the disk carried 1 MB/s
plans, plan = [], learn.plan
learn.plan = lambda problem: plans.append(plan(problem)) or plans[-1]
"""


@pytest.mark.parametrize("page", SHOWN)
def test_first_blocks_move_bytes_however_slow_the_disk_is(page, run_alone):
    number, did = SHOWN[page]
    told = f"print(min(plan.parked_bytes for plan in plans), {did}.parked_bytes, bool({did}.declined))"
    last = run_alone([f"{SLOWLY}{BLOCKS[ROOT / page][number]}\n{told}\n"]).splitlines()[-1]
    planned, parked, is_declined = last.split()
    assert int(planned) > 0 and int(parked) > 0 and is_declined == "False"


@pytest.mark.parametrize("number", [0, 1], ids=["hugging face", "lightning"])
def test_ten_lines_keep_a_budget_that_plain_training_exceeds(number, run_alone):
    block = TEN_LINES[number]
    (text,) = re.findall(r'budget="(.*?)"', block)
    kept, free = (
        int(run_alone(told_after(source, "less.summary().peak_bytes")).split()[-1])
        for source in (block, block.replace(f'"{text}"', '"64GiB", policy=lambda saved: False'))
    )
    assert 0 < kept <= parse_bytes(text) < free


def test_ten_lines_train_a_fleet_of_eight(run_alone):
    out = run_alone([TEN_LINES[2]])
    assert out.count("done after 4 steps") == 8 and "failed" not in out


def test_ten_lines_train_on_features_beyond_memory(run_alone):
    told = "features.host_bytes, 20_000 * features.row_bytes, features.statistics().disk_rows"
    host_bytes, all_bytes, disk_rows = map(int, run_alone(told_after(TEN_LINES[3], told)).splitlines()[-1].split())
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
                yield "".join(value.value if isinstance(value, ast.Constant) else "..." for value in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


SOURCE = "\n".join(text.replace("\n", " ") for text in texts_in_source())


@pytest.mark.parametrize("head", ROWS)
def test_message_is_still_in_the_source(head):
    known = head.removeprefix("...").removesuffix("...")  # a pattern that begins with anything takes seconds
    pattern = r"[^\n]*?".join(re.escape(part) for part in known.split("..."))
    assert (re.search(pattern, SOURCE) is not None) != (head in OF_PYTORCH | OF_PARTS), head


def test_messages_are_many():
    assert len(ROWS) > 80 and len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_and_warning_has_an_entry(name):
    assert f"`{name}`" in TROUBLES


def test_table_of_results_is_what_the_files_say(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    results_table = importlib.import_module("results_table")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for table in (results_table.table(), results_table.misuse_table()):
        assert table in page, "run: python docs/results_table.py"
    real = (ROOT / "docs" / "recipes" / "real-models.md").read_text()
    for table in results_table.real_tables().values():
        assert table in real, "run: python docs/results_table.py"


def test_table_of_coverage_is_what_the_file_says(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    coverage_table = importlib.import_module("coverage_table")
    page = (ROOT / "docs" / "coverage.md").read_text()
    for tables in (coverage_table.tables(), coverage_table.loop_tables()):
        assert tables in page, "run: python docs/coverage_table.py"


@pytest.mark.parametrize("room", ["fleet", "offload", "probe", "relational", "remat", "tiers", "unified"])
def test_rooms_have_one_shape(room):
    page = (ROOT / "docs" / "rooms" / f"{room}.md").read_text()
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    shape = ["When", "When not", "How it works", "Limits", "API"]
    assert [heading for heading in headings if heading in shape] == shape
    assert f"(../../src/penstock/{room}/__init__.py)" in page.partition("## API")[2]
