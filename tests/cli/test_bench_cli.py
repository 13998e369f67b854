"""`penstock bench`: the benchmark of the package, and those of the source tree."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import _bench, _bench_names, app

METHODS = ["plain", "checkpoint", "offload", "remat"]


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def rows_of(document):
    return {(row["name"], row["metric"]): row for row in document["rows"]}


def test_step_measures_four_methods(tmp_path):
    result = bench("--quick", "--rounds", 3, "--layers", 4, "--disk", tmp_path, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)["benchmarks"]["step"]
    assert document == json.loads((tmp_path / "out" / "step.json").read_text())
    assert document["configuration"] == {
        "num_layers": 4, "width": 128, "length": 128, "batch": 4, "rounds": 3, "device": "cpu",
    }  # fmt: skip
    assert document["machine"]["torch"]
    rows = rows_of(document)
    for name in METHODS:
        assert rows[name, "losses equal to plain's"]["value"] == 3
        assert rows[name, "step time"]["value"] > 0
        low, middle, high = (
            rows[name, metric]["value"]
            for metric in ("step time ratio, 95% low", "step time ratio", "step time ratio, 95% high")
        )
        assert low <= middle <= high
    peaks = {name: rows[name, "activation peak"]["value"] for name in METHODS}
    assert peaks["checkpoint"] < peaks["plain"]
    assert peaks["remat"] <= 1.02 * peaks["checkpoint"]
    assert rows["plain", "step time ratio"]["value"] == 1
    assert set(rows["offload", "moved out a step"]) == {"name", "metric", "value", "unit", "peer", "ratio"}


def test_a_width_has_eight_heads(tmp_path):
    result = bench("--quick", "--width", 100, "--disk", tmp_path)
    assert result.exit_code == 2
    assert "a width of 100 does not divide into 8 heads" in result.stderr


def test_the_tree_is_run_in_a_process_of_its_own(tmp_path, monkeypatch):
    seen = []

    def run(command, *, cwd, env, stdout, **_):
        seen.append((command, cwd, env))
        stdout.write("round 1 of 1\n")
        row = {"name": "plain", "metric": "step time", "value": 2.0, "unit": "s", "peer": "", "ratio": None}
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"machine": {}, "rows": [row]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(_bench.subprocess, "run", run)
    result = bench("planner", "offload", "--quick", "--disk", tmp_path, "--json", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["benchmarks"]) == ["planner", "offload"]
    assert "round 1 of 1" in result.stderr
    assert [command[1:3] for command, _, _ in seen] == [["-m", "benchmarks.planner"], ["-m", "benchmarks.offload"]]
    assert all("--quick" in command and (cwd / "benchmarks").is_dir() for command, cwd, _ in seen)
    assert json.loads((tmp_path / "planner.json").read_text())["rows"][0]["value"] == 2.0
    assert "step time" in bench("planner", "--disk", tmp_path).stdout


def test_a_benchmark_that_fails_says_its_last_words(tmp_path, monkeypatch):
    def run(command, *, stdout, **_):
        stdout.write("Traceback\nValueError: no such graph\n")
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(_bench.subprocess, "run", run)
    result = bench("planner", "--disk", tmp_path, "--json")
    assert result.exit_code == 1
    assert "ended with 1" in json.loads(result.stdout)["error"]["message"]
    assert "ValueError: no such graph" in json.loads(result.stdout)["error"]["message"]


def test_all_benchmarks_of_the_tree_are_found():
    names = [row["name"] for row in json.loads(bench("--list", "--json").stdout)["benchmarks"]]
    assert names[0] == "step"
    assert {"fleet", "fleet_training", "offload", "planner", "relational", "remat", "unified"} <= set(names)
    assert "common" not in names and "models" not in names
    assert all(benchmark.what for benchmark in _bench_names.benchmarks())


def test_without_the_tree_it_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(_bench_names, "_TREE", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert json.loads(bench("--list", "--json").stdout)["benchmarks"][0]["name"] == "step"
    assert "need the source tree" in " ".join(bench("--list").stdout.split())
    result = bench("offload")
    assert result.exit_code == 2
    assert "there is no benchmark 'offload' here; there are step" in result.stderr
    assert "need the source tree" in result.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_step_on_a_gpu(tmp_path):
    document = json.loads(bench("--quick", "--device", "cuda", "--disk", tmp_path, "--json").stdout)
    rows = rows_of(document["benchmarks"]["step"])
    assert rows["offload", "losses equal to plain's"]["value"] == 4


def test_a_missing_gpu_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.cli._bench_step.kinds", lambda: ("cpu",))
    result = bench("--device", "cuda", "--disk", tmp_path)
    assert result.exit_code == 1
    assert "PyTorch finds no cuda device here; --device cpu" in result.stderr
