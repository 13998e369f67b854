"""Architectures of transformers through the doors, by the functions of `benchmarks.coverage`."""

import json

import numpy as np
import pytest
import torch
from benchmarks import coverage, coverage_case, zoo

from penstock.errors import BudgetError, InternalError

CASES = [
    ("albert", "offload"),
    ("bert", "optimize"),
    ("convnext", "offload"),
    ("distilbert", "offload"),
    ("electra", "string"),
    ("gpt2", "fleet"),
    ("gpt_neox", "optimize"),
    ("mobilenet_v2", "offload"),
    ("opt", "fleet"),
    ("resnet", "compile"),
    ("t5", "offload"),
    ("vit", "optimize"),
]
"""Each through one door: what a case takes is tracing, mostly."""
STEPS = coverage_case.schedule(2, sizes=(4, 3))


@pytest.fixture(autouse=True)
def _quick(one_thread, collected):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")  # libraries have their own
@pytest.mark.parametrize(("name", "door"), CASES)
def test_architectures_train_through_a_door_as_plainly(name, door, tmp_path):
    row = coverage_case.case(zoo.all_architectures()[name], door, tmp_path, share=0.8, steps=STEPS)
    assert row["control"] is None
    assert row["is_finite"]
    assert (row["verdict"], row["message"]) == ("equal", "")
    assert 0 < row["standing_bytes"] < row["peak_bytes"]
    if not row["said"]:
        assert row["is_held"], f"{row['peak_bytes']} of {row['budget_bytes']}"


def test_what_differs_is_told_from_what_is_close():
    trained = coverage_case.Training(losses=[np.float32(2.0)], gradients=[[np.ones(3)]], state={"a": np.zeros(2)})
    same = coverage_case.Training(losses=[np.float32(2.0)], gradients=[[np.ones(3)]], state={"a": np.zeros(2)})
    assert coverage_case.difference(trained, same) is None
    same.state["a"] = -np.zeros(2)  # equal numbers, other bits
    assert coverage_case.difference(trained, same) == 0.0
    same.gradients[0][0] = np.array([1.0, 1.0, 1.5])
    assert coverage_case.difference(trained, same) == 0.5
    same.state["b"] = np.zeros(2)
    assert coverage_case.difference(trained, same) == float("inf")


def test_verdicts_on_errors():
    refused = coverage_case.failed(BudgetError("the budget cannot be met: at least 123 bytes.\nmore"))
    assert (refused["verdict"], refused["message"]) == (
        "refused",
        "BudgetError: the budget cannot be met: at least 123 bytes.",
    )
    assert coverage_case.named_bytes(refused["text"]) == 123
    assert coverage_case.failed(InternalError("a bug"))["verdict"] == "failed"
    assert coverage_case.failed(RuntimeError("x"))["message"] == "RuntimeError: x"
    of_fleet = coverage_case.FleetFailure("penstock.errors.BudgetError: a budget of 7 has room for it")
    assert coverage_case.failed(of_fleet)["verdict"] == "refused"
    assert coverage_case.named_bytes("Give budget=5,000 or less; it takes 1.5 KiB") == 5000
    assert coverage_case.named_bytes("needs at least 1.5 MiB") is None


def test_cases_run_in_processes_and_are_found_again(tmp_path, capsys):
    file = tmp_path / "coverage.json"
    asked = [
        "--model",
        "bert",
        "--door",
        "offload",
        "--steps",
        "2",
        "--share",
        "0.8",
        "--disk",
        str(tmp_path),
        "--json",
        str(file),
    ]
    (row,) = coverage.main(asked)
    assert row["verdict"] == "equal"
    content = json.loads(file.read_text())
    assert content["cases"] == [row]
    counts = {row["metric"]: row["value"] for row in content["rows"]}
    assert (counts["equal"], counts["not equal"], counts["budgets tried"]) == (1, 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["coverage.json"]
    capsys.readouterr()
    assert coverage.main(asked) == [row]
    assert "1/1" not in capsys.readouterr().out


def test_a_hang_is_a_row(tmp_path):
    asked = ["--model", "bert", "--door", "offload", "--disk", str(tmp_path)]
    (row,) = coverage.main([*asked, "--limit", "0.01"])
    assert row["verdict"] == "hung"
