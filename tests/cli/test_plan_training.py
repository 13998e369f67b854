"""`penstock plan --training`: models whose state exceeds a device, planned for a machine that is not there."""

import json

import pytest
from typer.testing import CliRunner

from penstock.cli import app

SCRIPT = """
import torch
from penstock.testing import GPT

def make():
    model = GPT(num_layers=4, width=256, num_heads=4, context=128, checkpointed=True)
    tokens = torch.zeros(4, 128, dtype=torch.int64)
    return {"model": model, "batch": tokens, "loss": lambda model, batch: model(batch, batch)}

def make_looking():
    return torch.nn.Linear(4, 1), torch.ones(2, 4), 3

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(1024, 1024).requires_grad_(False)
        self.head = torch.nn.Linear(1024, 64)

    def forward(self, x, *, scale):
        return self.head(self.frozen(x)).square().mean() * scale

def make_mapping():
    return Scaled(), {"x": torch.ones(16, 1024), "scale": 2.0}

def make_item():
    model = torch.nn.Linear(64, 64)
    return {"model": model, "batch": torch.ones(2, 64), "loss": lambda model, batch: model(batch).mean().item()}
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def says(script, *words, function="make"):
    return CliRunner().invoke(app, ["plan", f"{script}:{function}", "--training", *words], prog_name="penstock")


def test_smaller_budgets_move_more_and_take_longer(script):
    result = says(script, "--machine", "h200", "--budget", "200MiB", "--budget", "40MiB", "--budget", "25MiB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["is_modelled"]
    small, middle, whole = found["plans"]
    assert whole["ratio"] == pytest.approx(1.0, rel=1e-3)
    assert whole["in_bytes"] == whole["out_bytes"] == 0
    assert small["in_bytes"] > middle["in_bytes"] > 0
    rounded = 1 - 1e-9  # seconds of operators are added up in pieces, which differ
    assert small["step_s"] >= middle["step_s"] * rounded
    assert middle["step_s"] >= whole["step_s"] * rounded
    assert all(plan["is_exact"] and plan["host_share"] == 0 for plan in found["plans"])


def test_the_host_may_update_too_and_several_micro_batches_hide_more(script):
    words = ["--machine", "h200", "--budget", "25MiB", "--host-rate", "200GB", "--json"]
    device, split = json.loads(says(script, *words).stdout)["plans"]
    assert device["is_exact"]
    assert not split["is_exact"]
    assert split["step_s"] <= device["step_s"]
    accumulated, _ = json.loads(says(script, *words, "--micro-batches", "4").stdout)["plans"]
    assert accumulated["ratio"] < device["ratio"]


def test_a_budget_that_is_too_small_says_which_works(script):
    words = ["--machine", "h200", "--host-rate", "200GB", "--budget"]
    refused = says(script, *words, "1MiB")
    assert refused.exit_code == 3
    assert "refused" in refused.stdout
    least = (
        json.loads(says(script, *words, "1MiB", "--json").stdout)["plans"][0]["refusal"]
        .split("at least ")[1]
        .split()[0]
    )
    assert says(script, *words, least).exit_code == 0


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "needed with --training"),
        (["--machine", "h200", "--disk", "/tmp"], "not with --training"),
        (["--machine", "h200", "--micro-batches", "0"], "--micro-batches"),
    ],
)
def test_what_does_not_fit_together_is_refused(script, words, said):
    result = says(script, *words)
    assert result.exit_code == 2
    assert said in result.output
    assert CliRunner().invoke(app, ["plan", f"{script}:make", "--micro-batches", "2"]).exit_code == 2


def test_what_the_function_returns_is_checked(script):
    result = says(script, "--machine", "h200", function="make_looking")
    assert result.exit_code == 1
    assert "not a model with a batch" in " ".join(result.stderr.split())


def test_a_batch_may_hold_keywords_and_a_frozen_weight_moves_one_way(script):
    result = says(script, "--machine", "h200", "--budget", "6500KiB", "--json", function="make_mapping")
    assert result.exit_code == 0, result.output
    (plan,) = json.loads(result.stdout)["plans"]
    assert 0 < plan["in_bytes"] < 16 * 2**20
    assert plan["out_bytes"] < 4 * 2**20  # the frozen weight's: its copy below stays valid


def test_a_loss_that_looks_at_numbers_is_told(script):
    result = says(script, "--machine", "h200", function="make_item")
    assert result.exit_code == 1
    assert "numbers" in " ".join(result.stderr.split())
