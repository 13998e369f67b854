"""What holds for every command: an example that works, one JSON document, exit codes, errors in one paragraph."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from cli_examples import advise, demo_child, option, write_files
from rich.console import Console
from typer.testing import CliRunner

import penstock
from penstock.cli import _bench_names, _demo, _demo_whole, _fleet, app
from penstock.cli._answer import ExitCode, as_json
from penstock.cli._fault import explain
from penstock.cli._progress import Steps
from penstock.errors import BudgetError, InternalError, PenstockError


def commands():
    """``{"fleet run": command}`` of all."""
    root = typer.main.get_command(app)
    found = {name: command for name, command in root.commands.items() if not hasattr(command, "commands")}
    return found | {f"fleet {name}": command for name, command in root.commands["fleet"].commands.items()}


ALL = [
    "probe", "demo", "plan", "advise", "bench", "fleet run", "fleet simulate", "fleet ps", "fleet draw", "fleet pause",
    "fleet resume", "fleet stop", "fleet clone", "report",
]  # fmt: skip
"""In an order in which each finds what it needs: `report` shows what the others left."""


def penstock_says(*arguments, **environment):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment, prog_name="penstock")


def example_of(name):
    """The words of the example in the help of a command, without ``penstock``."""
    words = shlex.split(re.search(r"Example: penstock (.*)", commands()[name].help)[1])
    return [*words, "--quick"] if name == "bench" and "--quick" not in words else words


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with everything that the examples name; long work is stood in for."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    monkeypatch.setattr(penstock.advisor, "advise", advise)
    monkeypatch.setattr(_demo, "child", demo_child)
    monkeypatch.setattr(_demo_whole, "child", demo_child)
    monkeypatch.setattr(_fleet, "ask", lambda *_: None)
    return tmp_path


def test_there_are_no_other_commands():
    assert set(commands()) == set(ALL)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["shown", "json"])
def test_every_example_works(workplace, options):
    for name in ALL:
        result = penstock_says(*example_of(name), *options, COLUMNS="60", NO_COLOR="1")
        assert result.exit_code == 0, f"{name}: {result.output}"
        if options:
            assert json.loads(result.stdout), name
        else:
            assert result.stdout, name
            tables = [line for line in result.stdout.splitlines() if line[:1] in "┃│┏┡└"]
            assert all(len(line) <= 60 for line in tables), result.stdout
            assert "\x1b" not in result.output
        assert "Traceback" not in result.output


def test_what_a_users_code_prints_is_not_in_the_document(workplace):
    result = penstock_says("advise", "train.py:make", "--budget", "1GiB", "--json")
    assert json.loads(result.stdout)["best"] == "offload"
    assert "so may a factory" in result.stderr
    assert "so may a factory" in penstock_says("advise", "train.py:make", "--budget", "1GiB").stdout


@pytest.mark.parametrize("name", ALL)
def test_every_command_takes_json_and_debug(name):
    options = {word for parameter in commands()[name].params for word in parameter.opts}
    assert {"--json", "--debug"} <= options


# Exit codes


def test_exit_codes_are_told_in_help():
    text = " ".join(penstock_says("--help").output.split())
    for code in ExitCode:
        assert f"{int(code)} " in text.partition("Exit codes:")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["probe", "--nothing"],
        ["plan"],
        ["plan", "train.py"],
        ["plan", "train.py:make_step", "--budget", "much"],
        ["plan", "train.py:make_step", "--method", "magic"],
        ["advise", "train.py:make"],
        ["advise", "train.py:make", "--budget", "-1"],
        ["demo", "--steps", "1"],
        ["bench", "nothing"],
        ["bench", "offload", "--layers", "2"],
        ["report"],
        ["fleet", "simulate", "problem.yaml", "--scheduler", "best"],
        ["fleet", "run", "sweep.yaml", "--budget", "much"],
        ["fleet", "clone", "runs/1", "a", "b", "--set", "lr"],
    ],
)
def test_misuse_is_2(workplace, arguments):
    result = penstock_says(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["probe", "--disk", "nowhere"], "the spill directory nowhere does not exist"),
        (["probe", "--disk", "train.py"], "train.py"),
        (["plan", "nothing.py:make"], "there is no file nothing.py"),
        (["plan", "broken.py:make"], "broken.py cannot be loaded: SyntaxError"),
        (["plan", "script.py:make"], "script.py cannot be loaded: it ended the process with 3"),
        (["plan", "imports.py:make"], "imports.py cannot be loaded: ModuleNotFoundError"),
        (["plan", "raises.py:make"], "raises.py:make() failed: KeyError: 'no such data'"),
        (["plan", "raises.py:make_mismatch"], "raises.py, line 11"),
        (["advise", "raises.py:make", "--budget", "1GiB"], "raises.py:make() failed: KeyError: 'no such data'"),
        (["advise", "raises.py:stop", "--budget", "1GiB"], "it ended the process with 'enough'"),
        (["report", "nowhere"], "nowhere is not there"),
        (["report", "train.py"], "train.py is a file"),
        (["fleet", "run", "nothing.yaml"], "nothing.yaml"),
        (["fleet", "run", "bytes.yaml"], "bytes.yaml is not text in UTF-8: byte 0"),
        (["fleet", "run", "cut.yaml"], "cut.yaml, line 2"),
        (["fleet", "simulate", "cut.yaml"], "cut.yaml, line 2"),
        (["fleet", "ps", "nowhere"], "no fleet was ever run in nowhere"),
        (["fleet", "ps", "damaged"], "fleet.db"),
        (["fleet", "draw", "damaged"], "holds no units of a fleet"),
        (["fleet", "draw", "damaged", "--last", "0"], "the last 0.0 s"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["shown", "json"])
def test_a_failure_is_1_and_one_paragraph(workplace, arguments, words, options):
    (workplace / "broken.py").write_text("def make(:\n")
    (workplace / "script.py").write_text("import sys\nsys.exit(3)\n")
    (workplace / "imports.py").write_text("import no_such_module\n")
    (workplace / "raises.py").write_text(RAISES)
    (workplace / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (workplace / "cut.yaml").write_text("job: jobs.py:make_job\nparameters: {lr: [1e-2, ")
    (workplace / "damaged").mkdir()
    (workplace / "damaged" / "fleet.db").write_bytes(b"\x00 no database" * 400)
    (workplace / "damaged" / "units.jsonl").write_text('{"torn')
    result = penstock_says(*arguments, *options)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    told = result.stderr.strip()
    name = f"penstock {' '.join(arguments[: 2 if arguments[0] == 'fleet' else 1])}"
    assert told.startswith(f"error: {name}: ") and "\n\n" not in told
    assert words in told
    assert told.endswith("With --debug there is a traceback.")
    if options:
        error = json.loads(result.stdout)["error"]
        assert (error["command"], error["exit_code"]) == (name, 1)
        assert words in error["message"]
    else:
        assert result.stdout == ""


RAISES = """
import signal, sys, torch

def make():
    raise KeyError("no such data")

def stop():
    sys.exit("enough")

def mismatch(x):
    return torch.nn.functional.linear(x, torch.ones(3, 5))

def make_mismatch():
    return mismatch, [torch.ones(2, 2)]

def interrupt():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(workplace, place):
    (workplace / "raises.py").write_text(RAISES)
    words = ["plan", "raises.py:make"]
    result = penstock_says(*(["--debug", *words] if place == "before" else [*words, "--debug"]))
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert 'raise KeyError("no such data")' in result.stderr


def test_a_budget_that_cannot_be_met_is_3(workplace, monkeypatch):
    plan = penstock_says("plan", "train.py:make_step", "--budget", "1KiB", "--json")
    assert plan.exit_code == 3
    rows = json.loads(plan.stdout)["plans"]
    assert [row["is_refused"] for row in rows if row["budget_bytes"] == 1024] == [True]
    simulated = (workplace / "problem.yaml").read_text().replace("copies: 2, in_", "copies: 2, budget_bytes: 1MB, in_")
    (workplace / "small.yaml").write_text(simulated)
    small = penstock_says("fleet", "simulate", "small.yaml", "--json")
    assert small.exit_code == 3
    assert "no device is large enough for job 'gpt 0'" in json.loads(small.stdout)["error"]["message"]

    def refuse(*_, **__):
        raise BudgetError("1.0 KiB is below 2.0 KiB")

    monkeypatch.setattr(penstock.advisor, "advise", refuse)
    advised = penstock_says("advise", "train.py:make", "--budget", "1KiB")
    assert advised.exit_code == 3
    assert "1.0 KiB is below 2.0 KiB" in advised.stderr


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["shown", "json"])
def test_an_interrupt_is_130(workplace, options):
    (workplace / "raises.py").write_text(RAISES)
    before = signal.getsignal(signal.SIGINT)
    try:
        result = penstock_says("plan", "raises.py:interrupt", *options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1] == "error: penstock plan: interrupted."
    if options:
        assert json.loads(result.stdout)["error"]["exit_code"] == 130


# Words for errors


def test_our_own_bugs_ask_for_a_report():
    assert "please report it" in explain(InternalError("that cannot be"), "penstock plan")
    assert "please report it" not in explain(PenstockError("that can be"), "penstock plan")


def test_long_words_are_cut():
    text = explain(RuntimeError("CUDA says\n" * 400), "penstock plan")
    assert text.startswith("penstock plan: RuntimeError: CUDA says CUDA says")
    assert len(text) < 600


def test_json_knows_no_infinity():
    assert json.loads(as_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")})) == {
        "a": None, "b": [None, 1.5], "c": "x",
    }  # fmt: skip


# Advice


MAPPING = "def make():\n    return {{'model': torch.nn.Linear(2, 2), 'batch': torch.ones(2, 2){more}}}\n"


@pytest.mark.parametrize(
    "source, words",
    [
        (
            "def make(): return torch.nn.Linear(2, 2)",
            "returns a Linear, not a model with a batch: `return model, batch`",
        ),
        ("def make(): pass", "returns nothing, not a model"),
        ("def make(): return 1, 2, 3", "a tuple of 3 (int, int, int)"),
        ("def make(): return torch.ones(2), torch.ones(2)", "is a Tensor, no module"),
        (MAPPING.format(more=", 'lose': 1"), "has 'lose', which nobody reads"),
        ("def make(): return {'model': torch.nn.Linear(2, 2)}", "has no 'batch'"),
        (MAPPING.format(more=", 'loss': 3"), "'loss': lambda model, batch:"),
        ("def make(size): return size", "own.py:make cannot be called: missing a required argument: 'size'"),
    ],
)
def test_advise_shows_what_a_factory_returns(workplace, source, words):
    (workplace / "own.py").write_text(f"import torch\n{source}\n")
    result = penstock_says("advise", "own.py:make", "--budget", "1GiB")
    assert result.exit_code == 1
    assert words in result.stderr


def test_advise_hands_everything_on(workplace, monkeypatch):
    given = {}

    def recorded(model, batch, budget, **rest):
        given.update(rest, model=model, batch=batch, budget=budget)
        return advise(model, batch, budget)

    monkeypatch.setattr(penstock.advisor, "advise", recorded)
    more = ", 'loss': (lambda model, batch: model(batch).sum()), 'optimizer': torch.optim.SGD"
    (workplace / "own.py").write_text("import torch\n" + MAPPING.format(more=more))
    result = penstock_says("advise", "own.py:make", "--budget", "1GiB", "--disk", workplace, "--host", "2GiB", "--json")
    report = json.loads(result.stdout)
    assert (given["budget"], given["host"], given["disk"]) == (2**30, 2**31, workplace)
    assert given["loss"](given["model"], given["batch"]).ndim == 0
    assert given["optimizer"].__name__ == "SGD"
    assert report["budget_bytes"] == 2**30
    assert [option["name"] for option in report["options"]] == ["plain", "offload"]
    assert report["options"][1] == {
        "name": "offload", "is_refused": False, "reason": "it fits", "peak_bytes": 100, "ratio": 1.1,
        "is_measured": True, "code": "offload(model)",
    }  # fmt: skip
    penstock_says("advise", "own.py:make", "--budget", "3GiB")
    assert given["budget"] == 3 * 2**30


def test_advice_is_asked_for_and_given(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef make():\n    model = torch.nn.Linear(8, 8)\n"
        "    return {'model': model, 'batch': torch.randn(4, 8), 'loss': lambda model, batch: model(batch).mean()}\n"
    )
    monkeypatch.chdir(tmp_path)
    result = penstock_says("advise", "own.py:make", "--budget", "1GiB", "--rounds", "1", "--json")
    found = json.loads(result.stdout)
    assert found["best"] in {option["name"] for option in found["options"]}
    assert all(option["is_measured"] and option["peak_bytes"] <= 2**30 for option in found["options"])
    (code,) = (option["code"] for option in found["options"] if option["name"] == "remat")
    model = torch.nn.Linear(8, 8)
    names = {"model": model, "batches": [torch.randn(4, 8)], "optimizer": torch.optim.SGD(model.parameters())}
    exec(code, names | {"loss": lambda model, batch: model(batch).mean()})
    assert "penstock.tiers.Budget(device='1GiB')" in code


def test_advice_that_refuses_all_is_3(workplace, monkeypatch):
    def refused(model, batch, budget, **_):
        advice = advise(model, batch, budget)
        advice.options = (option("plain", is_refused=True),)
        return advice

    monkeypatch.setattr(penstock.advisor, "advise", refused)
    result = penstock_says("advise", "train.py:make", "--budget", "1GiB", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["best"] is None


def test_what_processes_of_a_factory_print_is_not_in_the_document(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os, torch\ndef make():\n    os.system('echo from below')\n    print('from Python')\n"
        "    model = torch.nn.Linear(4, 4)\n    return (lambda x: model(x).mean()), [torch.randn(2, 4)]\n"
    )
    command = [sys.executable, "-c", "from penstock.cli import app; app()", "plan", "loud.py:make", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["plans"]
    assert {"from below", "from Python"} <= set(done.stderr.splitlines())


# Progress


def test_progress_is_for_terminals(capsys):
    with Steps(is_wanted=True) as steps:
        steps.phase("working", 3)
        steps.advance(1, 3)
    assert capsys.readouterr() == ("", "")


def test_progress_says_what_is_done_and_left():
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, record=True, width=100)
        with Steps(is_wanted=True, console=console) as steps:
            steps.phase("looking around")
            steps.phase("training in turn", 4)
            steps.advance(3, 4)
        quiet = Console(file=nowhere, force_terminal=True, record=True)
        with Steps(is_wanted=False, console=quiet) as steps:
            steps.phase("training in turn", 4)
    shown = console.export_text()
    assert "training in turn" in shown and "3 of 4" in shown
    assert quiet.export_text() == ""


def test_without_a_terminal_progress_is_told_now_and_then(capsys, monkeypatch):
    now_s = iter([0.0, 1.0, 2.0, 40.0, 41.0, 50.0, 51.0, 52.0, 90.0, 91.0, 92.0])
    monkeypatch.setattr("penstock.cli._progress.time", SimpleNamespace(monotonic=lambda: next(now_s)))
    with Steps() as steps:
        steps.phase("training", 4)
        steps.advance(1, 4)
        steps.advance(2, 4)
    assert capsys.readouterr().err == "training: 1 of 4, about 117.0 s left\n"


# Shells


def completed(words, number):
    environment = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    return penstock_says(**environment).stdout.split()


def test_shells_complete_what_there_is(workplace, monkeypatch):
    for name in ("gpt-1", "gpt-2", "other"):
        (workplace / "runs" / "1" / "jobs" / name).mkdir(parents=True)
    (workplace / "runs" / "1" / "jobs" / "grid lr=0.1,batch=4").mkdir()
    assert completed("penstock fleet pause runs/1 gpt", 4) == ["gpt-1", "gpt-2"]
    assert completed("penstock fleet pause runs/1 gr", 4) == ["grid\\", "lr=0.1,batch=4"]  # one word to the shell
    assert completed("penstock fleet stop nowhere gpt", 4) == []
    assert completed("penstock fleet simulate p.yaml --scheduler sh", 5) == ["sharded-lrtf", "shortest-first"]
    assert completed("penstock plan train.py:make --method s", 4) == ["swap"]
    assert "planner" in completed("penstock bench pl", 2)
    assert completed("penstock bench st", 2) == ["step", "state_plans", "strange"]
    assert completed("penstock fl", 1) == ["fleet"]
    monkeypatch.setattr(_bench_names, "source_tree", lambda: None)
    assert completed("penstock bench pl", 2) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(monkeypatch, tmp_path, shell):
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    shown = penstock_says("--show-completion")
    assert shown.exit_code == 0
    assert "_PENSTOCK_COMPLETE" in shown.stdout
    installed = penstock_says("--install-completion", HOME=str(tmp_path))
    assert installed.exit_code == 0
    assert any("_PENSTOCK_COMPLETE" in file.read_text() for file in tmp_path.rglob("*penstock*"))
