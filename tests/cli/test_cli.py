"""The command line, as a user calls it."""

import json
import subprocess
import sys
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

import penstock
from penstock.cli import app
from penstock.cli._choices import PlanMethod
from penstock.errors import PenstockError
from penstock.probe import _bandwidth
from penstock.report import _saved, save_asked
from penstock.report._model import Headline, Section, Wear
from penstock.report._part import Part
from penstock.report._parts import parts_of_folder


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_version():
    assert run("--version").output.strip() == f"penstock {penstock.__version__}"


def test_probe_measures_and_prints_json(tmp_path, monkeypatch, empty_cache):
    monkeypatch.setattr(_bandwidth, "_SAMPLE_BYTES", 2**23)
    result = run("probe", "--disk", tmp_path, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["environment"]["penstock"] == penstock.__version__
    assert {place["name"] for place in report["places"]} >= {"device", "disk"}
    assert all(lane["bandwidth_bytes_per_s"] > 0 for lane in report["lanes"])
    assert all(feature["reason"] for feature in report["features"])


def test_probe_prints_tables(tmp_path):
    result = run("probe", "--disk", tmp_path)
    assert result.exit_code == 0
    for words in ("Devices and tiers", "Bandwidths", "Features", "direct I/O"):
        assert words in result.output


def test_an_unknown_directory_is_one_paragraph_and_exit_1(tmp_path):
    result = run("probe", "--disk", tmp_path / "missing")
    assert result.exit_code == 1
    assert "does not exist" in result.output
    assert "Traceback" not in result.output


STEP = """
import torch
from torch import nn

def make_step(batch=64):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    return (lambda x: model(x).square().mean()), [torch.randn(batch, 64)]

def make_fixed():
    return make_step()

def make_model():
    return nn.Linear(2, 2), torch.ones(2, 2)
"""


def test_plan_prints_budgets_and_draws_them(tmp_path):
    (tmp_path / "train.py").write_text(STEP)
    result = run("plan", f"{tmp_path}/train.py:make_step", "--budget", "300KiB", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for words in ("budget", "refused", "recomputed", "The smallest budget that works is"):
        assert words in result.output
    for name in ("pareto.png", "memory.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert penstock.remat.RematProblem.load(tmp_path / "out" / "problem.json").operators
    (part,) = parts_of_folder(tmp_path / "out")
    assert part.section.headline.budget_bytes == 300 * 1024


def test_a_report_counts_the_life_of_a_rated_drive(tmp_path):
    section = Section(
        kind="offload",
        title="Offloaded activations",
        text="",
        headline=Headline(what="a run", wear=Wear(written_bytes=3 * 10**9, duration_s=10.0, capacity_bytes=None)),
    )
    _saved.write(tmp_path / "run", [Part(section=section)])
    assert run("report", tmp_path / "run", "--rated", "300TB", "--out", tmp_path / "run.html").exit_code == 0
    page = (tmp_path / "run.html").read_text()
    assert "a drive rated for 300 TB of writes" in page and "12 days" in page  # 10**6 seconds
    wrong = run("report", tmp_path / "run", "--rated", "much", "--out", tmp_path / "run.html")
    assert wrong.exit_code == 2


def test_a_report_shows_the_plan_that_was_asked_for(tmp_path):
    problem = penstock.remat.RematProblem.load(_saved_problem(tmp_path))
    smallest, most = penstock.remat.smallest_budget_bytes(problem, method="recompute"), 2**40
    save_asked(tmp_path, [smallest + 10_000, most], "recompute")
    (part,) = parts_of_folder(tmp_path)
    assert part.section.headline.budget_bytes == smallest + 10_000
    assert "tightest" not in part.section.headline.what
    (tmp_path / "asked.json").write_text('{"method": "magic"}')
    with pytest.raises(PenstockError, match="method"):
        parts_of_folder(tmp_path)


def _saved_problem(folder):
    model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())])
    planned = penstock.remat.optimize(lambda x: model(x).square().mean(), [torch.randn(64, 32)], None).plan
    planned.problem.save(folder / "problem.json")
    return folder / "problem.json"


def test_plan_prints_json_with_the_largest_batch(tmp_path):
    (tmp_path / "train.py").write_text(STEP)
    result = run("plan", f"{tmp_path}/train.py:make_step", "--budget", "400KiB", "--json", "--method", "recompute")
    report = json.loads(result.stdout)
    rows = {row["budget_bytes"]: row for row in report["plans"]}
    asked = rows[400 * 1024]
    assert asked["peak_bytes"] <= 400 * 1024
    assert asked["max_batch"] > 64
    refused = run("plan", f"{tmp_path}/train.py:make_step", "--budget", "100KiB", "--json", "--method", "recompute")
    rows = {row["budget_bytes"]: row for row in json.loads(refused.stdout)["plans"]}
    assert rows[100 * 1024]["is_refused"]
    assert rows[100 * 1024]["max_batch"] is not None
    assert asked["swapped_bytes"] == 0
    times = [row["extra_s"] for row in report["plans"] if not row["is_refused"]]
    assert times == sorted(times, reverse=True)
    assert report["smallest_bytes"] <= min(row["peak_bytes"] for row in report["plans"] if not row["is_refused"])


def test_plan_says_what_is_wrong_with_a_target(tmp_path):
    (tmp_path / "train.py").write_text(STEP)
    for target, words, exit_code in [
        ("train", "does not say which function", 2),
        (f"{tmp_path}/none.py:make", "there is no file", 1),
        ("no_such_module:make", "there is no module", 1),
        (f"{tmp_path}/train.py:other", "has no function other", 1),
        (f"{tmp_path}/train.py:make_model", "returns a tuple of 2 (Linear, Tensor), not (step, example_inputs)", 1),
    ]:
        result = run("plan", target)
        assert result.exit_code == exit_code
        assert words in " ".join(result.output.split())
        assert "Traceback" not in result.output
    result = run("plan", f"{tmp_path}/train.py:make_fixed", "--method", "magic")
    assert result.exit_code == 2
    assert "'recompute'" in result.output
    assert [method.value for method in PlanMethod] == list(get_args(penstock.remat.Method))


def test_the_first_line_says_what_is_slower_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc")
    monkeypatch.setenv("PENSTOCK_TOLD_OF_COMPILER", "")
    assert "note:" not in run("fleet", "--help").output
    told = run("bench", "--list", "--json")
    assert told.stderr.startswith("note: no C compiler was found (`$CC` names 'no-such-cc', which is not a program)")
    assert told.stderr.count("apt-get install gcc") == 1
    assert json.loads(told.stdout)["benchmarks"]
    code = "from penstock.native import load; assert load('remat') is None"
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stderr  # as a child
