"""Training loops as people write them, through the doors, by the functions of `benchmarks.loops`."""

import json

import numpy as np
import pytest
import torch
from benchmarks import loops, loops_case, loops_door

from penstock.errors import BudgetError, InternalError

NAMES = [
    "accumulation_with_clipping",
    "averaged_by_step_hook",
    "byol",
    "direct_preferences",
    "first_order_maml",
    "forward_without_backward",
    "freeze_and_unfreeze",
    "gan_as_one_model",
    "gradient_cache",
    "gradients_through_numpy",
    "growing_net",
    "hypergradient",
    "interrupted_before_step",
    "layer_reset",
    "momentum_contrast",
    "proximal_policy",
    "regions_named",
    "sam_by_hand",
    "tied_weights",
    "truncated_backward",
]
"""One of every theme at least, and nothing that takes seconds."""


@pytest.fixture(autouse=True)
def _quick(one_thread, collected):
    pass


@pytest.mark.filterwarnings("default")  # of PyTorch, about what these loops do
@pytest.mark.parametrize("door", ["activations", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_loops_train_through_a_door_as_plainly(name, door, tmp_path):
    row = loops_case.case(loops.load()[name], door, tmp_path, budgets=("tight",))
    assert row["verdict"] in ("equal", "told", "refused"), row["message"]
    assert [part["budget"] for part in row["parts"]] == ["tight"]


def test_what_differs_is_named():
    expected = {"note 0": np.float32([1.0]), "random state": np.uint8([1])}
    assert loops_case.difference(expected, dict(expected)) is None
    assert loops_case.difference(expected, {**expected, "random state": np.uint8([2])}) == ("random state", 1.0)
    both = {"note 0": np.float32([1.5]), "random state": np.uint8([2])}
    assert loops_case.difference(expected, both) == ("note 0", 1.0)
    name, apart = loops_case.difference(expected, {"note 0": np.float32([1.0])})
    assert name.startswith("random state is missing") and apart == float("inf")


def test_every_number_of_an_optimizer_is_compared():
    class Keeps:
        def __init__(self):
            self.matrix = torch.ones(2)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.state[model.weight] |= {"factors": [torch.zeros(1), {"scale": 3}], "projector": Keeps()}
    found = loops_door.as_arrays(optimizer)
    values = {path: array.tolist() for path, array in found.items() if path.startswith(".state")}
    assert values == {
        ".state.0.factors.0": [0.0],
        ".state.0.factors.1.scale": 3,
        ".state.0.projector.matrix": [1.0, 1.0],
    }
    assert found[".param_groups.0.lr"] == 0.5


def test_verdicts_on_errors():
    assert loops_case.failed(BudgetError("the budget is too small"))["verdict"] == "refused"
    assert loops_case.failed(InternalError("a bug"))["verdict"] == "RAW"
    assert loops_case.failed(ValueError("not enough values to unpack"))["verdict"] == "RAW"
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="budget") as caught:
        loops_door.WholeTraining(0)._take([model], torch.optim.SGD(model.parameters(), lr=0.1))
    assert loops_case.failed(caught.value)["verdict"] == "refused"


def test_cases_run_in_processes_and_are_found_again(tmp_path, capsys):
    file = tmp_path / "loops.json"
    asked = ["--loop", "momentum", "--door", "training", "--disk", str(tmp_path), "--json", str(file)]
    (row,) = loops.main(asked)
    assert row["verdict"] == "equal"
    content = json.loads(file.read_text())
    assert content["cases"] == [row]
    assert {line["metric"]: line["value"] for line in content["rows"]}["equal"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["loops.json"]
    if tight := row["parts"][1]["peak_bytes"]:  # there is a compiler for the meter
        assert row["standing_bytes"] < row["plain_peak_bytes"]
        assert tight < row["plain_peak_bytes"]
    capsys.readouterr()
    assert loops.main(asked) == [row]
    assert "1/1" not in capsys.readouterr().out


def test_a_crash_and_a_hang_are_rows(tmp_path, monkeypatch):
    (row,) = loops.main(["--loop", "momentum", "--door", "activations", "--disk", str(tmp_path), "--limit", "0.01"])
    assert row["verdict"] in ("PLAIN", "TIMEOUT")
