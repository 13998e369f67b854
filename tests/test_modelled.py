"""Plans for machines that are not here: our defaults beside the best under the same model, and the command line's."""

import itertools
import json

import pytest
import torch
from benchmarks import modelled
from torch import nn

from penstock import fleet, native, offload
from penstock.cli._choices import MachineName
from penstock.machines import MACHINES
from penstock.offload._problem import in_flight_bytes
from penstock.testing import GPT


@pytest.mark.parametrize("setting", modelled.SSDTRAIN, ids=lambda setting: setting.name)
@pytest.mark.parametrize(
    "machine, to_disk", [("a100-40gb-optane", True), ("h200", False), ("rtx4090", False), ("gh200", False)]
)
def test_defaults_reach_the_best_schedule_of_ssdtrains_settings(setting, machine, to_disk):
    problem = setting.problem(MACHINES[machine], to_disk=to_disk)
    ours, best = offload.plan(problem), modelled.best_schedule(problem)
    assert not ours.declined
    assert ours.stall_s <= 0.01 * problem.step_s
    saved, most = (plan.keep_all_peak_bytes - plan.peak_bytes for plan in (ours, best))
    assert saved >= 0.95 * most
    few = offload.plan(setting.problem(MACHINES[machine], to_disk=to_disk, max_in_flight_bytes=128 * 2**20))
    assert few.keep_all_peak_bytes - few.peak_bytes < 0.2 * most  # a bound of that size would lose it
    offload.verify(problem, ours)


@pytest.mark.parametrize("training", modelled.HYDRA, ids=lambda training: training.name)
@pytest.mark.parametrize("machine", ["a100", "rtx4090"])
def test_the_default_scheduler_is_near_the_best_of_all(machine, training):
    problem = modelled.hydra_problem(MACHINES[machine], training)
    taken_s = [fleet.simulate(problem, scheduler, records=False).makespan_s for scheduler in modelled._SCHEDULERS]
    assert taken_s[0] <= min(taken_s) / 0.95


@pytest.mark.parametrize("setting", modelled.HECTOR[1:3], ids=lambda setting: setting.name)
def test_all_passes_are_near_the_best_choice_of_them(setting):
    """On AIFB, whose steps take microseconds, more kernels cost RGAT 7%."""
    graph = setting.graph()
    layers = modelled.relational_layers(setting.num_nodes, setting.num_edges, setting.num_types)
    for layer, tensors in layers.values():
        taken_s = []
        for chosen in itertools.product((True, False), repeat=3):
            alternative = layer.with_options(**dict(zip(modelled._PASSES, chosen, strict=True)))
            taken_s.append(modelled.relational_step_s(alternative, graph, tensors, MACHINES["h200"]))
        assert taken_s[0] <= min(taken_s) / 0.95
        assert taken_s[0] < taken_s[-1] / 2.5


def test_costs_of_a_layer_need_no_bytes():
    """A forward product and two backward ones, of distinct pairs of source and type."""
    graph = modelled.HECTOR[0].graph()
    layer, tensors = modelled.relational_layers(graph.num_nodes, graph.num_edges, graph.num_edge_types)["RGCN"]
    num_pairs = len((graph.edge_index[0] * graph.num_edge_types + graph.edge_type).unique())
    assert sum(cost.flops == 2 * 64 * 64 * num_pairs for cost in layer.costs(graph, *tensors)) == 3
    if native.can_compile():  # and what the layer runs by is left alone
        inputs = [torch.zeros(tensor.shape, requires_grad=tensor.requires_grad) for tensor in tensors]
        assert "operation by operation" not in layer.explain(graph, *inputs)


def test_a_modelled_cycle_saves_what_a_real_one_does(tmp_path):
    def make():
        return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())))

    with torch.device("meta"):
        model, batch = make(), torch.empty(1024, 256)
    problem = offload.modelled_cycle(model, lambda: model(batch).sum().backward(), MACHINES["h200"])
    real, real_inputs = make(), torch.randn(1024, 256)
    with offload.activations(real, disk=tmp_path, min_saving=0, max_stall=1) as offloader:
        real(real_inputs).sum().backward()
    (lesson,) = offloader._learner._lessons.values()
    offloader.close()
    assert [(storage.size_bytes, storage.label) for storage in problem.storages] == list(lesson.signature)
    assert problem.num_events == lesson.problem.num_events
    assert list(problem.event_times_s) == sorted(problem.event_times_s)
    assert problem.step_s >= problem.event_times_s[-1] > 0


def test_attention_is_a_fused_kernels():
    with torch.device("meta"):
        model = GPT(num_layers=1, width=256, num_heads=4, context=1024)
        tokens = torch.zeros(8, 1024, dtype=torch.int64)
    problem = offload.modelled_cycle(
        model, lambda: model(tokens, tokens).backward(), MACHINES["h200"], min_size_bytes=1
    )
    assert max(storage.size_bytes for storage in problem.storages) < 8 * 4 * 1024 * 1024 * 4  # no matrix of all pairs


def test_a_model_with_bytes_is_refused():
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"with torch.device\('meta'\): model = Model\(\)"):
        offload.modelled_cycle(model, lambda: None, MACHINES["h200"])


def test_bytes_in_flight_suit_the_link_and_the_storages():
    assert in_flight_bytes(1e9, 2**20) == 128 * 2**20
    assert in_flight_bytes(50e9, 2**20) == 5 * 10**9
    assert in_flight_bytes(1e9, 2**30) == 4 * 2**30


def test_the_command_line_knows_every_machine():
    assert [name.value for name in MachineName] == list(MACHINES)


STEP = """
import torch
from penstock.testing import GPT

def make():
    model = GPT(num_layers=3, width=256, num_heads=4, context=256)
    tokens = torch.randint(256, (16, 256))
    return {"model": model, "batch": (tokens, tokens), "optimizer": torch.optim.AdamW(model.parameters())}

def make_step():
    one = make()
    return one["model"], list(one["batch"]), one["optimizer"]
"""


@pytest.fixture
def file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STEP)
    return script


def test_a_plan_for_a_machine_that_is_not_here(file):
    from typer.testing import CliRunner

    from penstock.cli import app

    fast, slow = (
        json.loads(
            CliRunner().invoke(app, ["plan", f"{file}:make_step", "--machine", name, "--host", "8GiB", "--json"]).stdout
        )
        for name in ("h200", "a100")
    )
    assert (fast["machine"], slow["machine"]) == ("h200", "a100")
    assert fast["smallest_bytes"] == pytest.approx(slow["smallest_bytes"], rel=0.2)
    assert fast["plans"][-1]["step_s"] < slow["plans"][-1]["step_s"]


def test_advice_for_a_machine_that_is_not_here(file):
    from typer.testing import CliRunner

    from penstock.cli import app

    def advise(*options):
        return CliRunner().invoke(app, ["advise", f"{file}:make", "--machine", "rtx4090", *options])

    said = json.loads(advise("--host", "8GiB", "--json").stdout)
    assert said["is_modelled"]
    assert (said["best"], said["budget_bytes"]) == ("plain", MACHINES["rtx4090"].memory_bytes)
    tight = json.loads(advise("--host", "8GiB", "--budget", str(int(0.7 * said["plain_peak_bytes"])), "--json").stdout)
    assert {option["name"]: option["is_refused"] for option in tight["options"]} == {
        "plain": True, "remat (recompute)": False, "remat (hybrid)": False, "offload": False,
    }  # fmt: skip
    assert all(option["ratio"] >= 1 for option in tight["options"] if not option["is_refused"])
    again = ["--machine", "rtx4090", "--method", "recompute", "--budget", str(tight["budget_bytes"]), "--json"]
    plans = json.loads(CliRunner().invoke(app, ["plan", f"{file}:make_step", *again]).stdout)["plans"]
    plan = next(plan for plan in plans if plan["budget_bytes"] == tight["budget_bytes"])
    ratio = next(option["ratio"] for option in tight["options"] if option["name"] == "remat (recompute)")
    assert ratio == pytest.approx(1 + plan["extra_s"] / plan["step_s"])
    shown = " ".join(advise("--host", "8GiB").stdout.split())
    assert "By the data sheet of NVIDIA GeForce RTX 4090" in shown
    assert "nothing was measured" in shown
    result = advise("--budget", "1MiB")
    assert result.exit_code == 3
    missing = CliRunner().invoke(app, ["advise", f"{file}:make"])
    assert missing.exit_code == 2
    assert "needed without --machine" in " ".join(missing.stderr.split())
