"""What a stranger types by mistake: one sentence that names the argument, what was given and what works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_examples import write_files
from rich.console import Console
from typer.testing import CliRunner

import penstock
from penstock.advisor import Advice, Option
from penstock.cli import _demo, _fleet, app
from penstock.cli._fault import explain
from penstock.cli._target import misfit_of
from penstock.errors import BudgetError
from penstock.files import read_text
from penstock.fleet import Job, JobResult, JobState, Results
from penstock.report import gantt


def penstock_says(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="penstock")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with what commands read; nothing in it may be begun."""
    write_files(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))

    def begun(*_, **__):
        raise AssertionError("the command began")

    for module, name in [
        (_demo, "child"), (_fleet, "Fleet"), (penstock.advisor, "advise"), (penstock.remat, "optimize"),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, begun)
    return tmp_path


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["fleet", "run", "nope.yaml"], "SWEEP must be a file, got nope.yaml: there is no such file"),
        (["fleet", "run", "folder"], "SWEEP must be a file, got the folder folder"),
        (["fleet", "run", "empty.yaml"], "the file is empty; the keys are job (required), fleet, search, parameters"),
        (["fleet", "run", "list.yaml"], "must hold keys with values, got a list"),
        (["fleet", "simulate", "nope.yaml"], "PROBLEM must be a file, got nope.yaml"),
        (["fleet", "simulate", "empty.yaml"], "the keys are jobs (required), devices (required)"),
        (["fleet", "simulate", "problem.yaml", "--gantt", "/proc/x.png"], "--gantt must be a file that can be written"),
        (["fleet", "run", "sweep.yaml", "--run-dir", "/proc/x"], "--run-dir must be a folder that can be written"),
        (["fleet", "run", "sweep.yaml", "--run-dir", "train.py"], "got train.py: train.py is a file"),
        (["fleet", "run", "sweep.yaml", "--disk", "nowhere"], "--disk: the spill directory nowhere does not exist"),
        (["fleet", "draw", "folder", "--to", "train.py"], "--to must be a folder that can be written, got train.py"),
        (["fleet", "ps", "train.py"], "RUN_DIR must be the folder of a fleet, got the file train.py"),
        (["probe", "--disk", "/proc"], "--disk: no file can be made in the spill directory /proc (No such file"),
        (["demo", "--disk", "nowhere"], "--disk: the spill directory nowhere does not exist"),
        (["demo", "--out", "train.py"], "--out must be a folder that can be written, got train.py"),
        (["plan", "train.py:make_step", "--disk", "train.py"], "--disk: train.py is a file"),
        (["plan", "train.py:make_step", "--out", "/proc/x"], "no file can be made in /proc (No such file"),
        (["advise", "train.py:make", "--budget", "1GiB", "--disk", "nowhere"], "--disk: the spill directory nowhere"),
        (["bench", "--disk", "nowhere"], "--disk: the spill directory nowhere"),
        (["bench", "--out", "/proc/x"], "--out must be a folder that can be written, got /proc/x"),
        (["report", "folder", "--out", "/proc/x.html"], "--out must be a file that can be written, got /proc/x.html"),
        (["report", "folder", "--out", "folder"], "got folder: it is a folder"),
    ],
)
def test_a_path_is_tried_before_anything_begins(workplace, arguments, words):
    result = penstock_says(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert words in result.stderr
    assert "Errno" not in result.stderr and "Traceback" not in result.stderr


def test_a_place_in_a_sweep_is_named_with_its_key(workplace):
    (workplace / "own.yaml").write_text(
        "job: jobs.py:make_job\nparameters: {lr: [1e-2], batch: [4]}\nfleet: {run_dir: /proc/x, disk: nowhere}\n"
    )
    assert "own.yaml, fleet.run_dir must be a folder" in penstock_says("fleet", "run", "own.yaml").stderr
    (workplace / "runs").mkdir()
    told = penstock_says("fleet", "run", "own.yaml", "--run-dir", "runs/1").stderr
    assert "own.yaml, fleet.disk: the spill directory nowhere does not exist" in told


@pytest.mark.parametrize("path, words", [("folder", "is a directory"), ("nope", "no such file or directory")])
def test_the_systems_errors_are_told_without_numbers(workplace, path, words):
    with pytest.raises(OSError, match="Errno") as caught:
        read_text(Path(path))
    error = caught.value.with_traceback(caught.tb.tb_next)  # as if the command had called it
    assert explain(error, "penstock plan").startswith(f"penstock plan: {path} cannot be used: {words}.")


def test_the_package_runs_as_the_command(tmp_path):
    def told(*arguments):
        command = [sys.executable, "-m", "penstock", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert told("--version").stdout.strip() == f"penstock {penstock.__version__}"
    missing = told("fleet", "run", "nope.yaml")
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: penstock fleet run: SWEEP must be a file")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["shown", "json"])
def test_a_reader_that_has_read_enough_is_no_error(tmp_path, options):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "penstock", "bench", "--list", *options]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    os.close(write)
    assert result.stderr == ""


def test_advice_that_refuses_all_says_why_in_full():
    why = f"the budget of 1.0 KiB cannot be met: {'this step needs more, ' * 8}. Give budget=215056 or a smaller batch."
    options = tuple(
        Option(
            name=name, rooms=(), is_refused=True, reason=reason, peak_bytes=None, ratio=None, is_measured=False, code=""
        )
        for name, reason in {"plain": "its peak is above the budget", "remat": why, "remat + swap": why}.items()
    )  # fmt: skip
    text = Advice(
        options=options, budget_bytes=1024, plain_peak_bytes=None, plain_is_measured=True, smallest_bytes=215056,
        notes=(), best_name=None,
    ).explain()  # fmt: skip
    assert f"remat, remat + swap refused: {why}\n" in text
    assert text.endswith(
        "No option trains this step within 1.0 KiB. The smallest budget that a plan keeps is 215056 bytes (210.0 KiB)."
    )


def results_of(errors, tmp_path):
    def job(name):
        return Job(name=name, model=list, data=list, loss=max, optimizer=list, steps=1)

    found = [
        JobResult(
            job=job(f"job {index}"), state=JobState.FAILED if error else JobState.DONE, losses=(), validations=(),
            error=error, seconds_per_step=0.0, checkpoint=None,
        )
        for index, error in enumerate(errors)
    ]  # fmt: skip
    return Results(found, [], tmp_path, None)


def test_jobs_that_failed_alike_are_told_once_over_the_whole_width(tmp_path):
    why = "blocks.1 alone needs 384.0 KiB, above the budget of 1.0 KiB; a budget of 393216 has room for it"
    results = results_of([f"penstock.errors.BudgetError: {why}"] * 5 + [None, "KeyError: 'x'"], tmp_path)
    console = Console(record=True, width=80)
    _fleet.show_trained(_fleet.Trained(results=results, parameters={}, run_dir=None), console)
    text = console.export_text()
    assert text.count("alone needs") == 1
    assert f"5 jobs (job 0, job 1, job 2, job 3, ...): {why}\n" in text
    assert "job 6: KeyError: 'x'\n" in text


def test_keys_that_a_function_takes_are_named():
    def make(lr, batch=4, *, steps=3):
        return lr, batch, steps

    assert misfit_of(make, {"lr": 1, "rate": 2}) == ("rate", "takes lr, batch, steps, not rate")
    assert misfit_of(make, {"batch": 1}) == (None, "cannot be called: missing a required argument: 'lr'")
    assert misfit_of(make, {"lr": 1}) == misfit_of(dict, {"anything": 1}) == (None, "")


def test_a_picture_of_no_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a picture is a \.png, \.svg or \.pdf, got .*x\.foo"):
        gantt(tmp_path / "x.foo", {"cpu": [(0.0, 1.0, "job")]})


def test_a_budget_below_the_optimizers_state_is_named_as_it_was_given():
    from penstock.advisor._ways import Limits
    from penstock.tiers import Budget

    limits = Limits(budget=Budget(device="1KiB"), spelled="", reserve_bytes=0, unaccounted_bytes=0, extra_bytes=0)
    with pytest.raises(BudgetError, match=r"the budget of 1\.0 KiB cannot be met"):
        limits.alone(-2048)
