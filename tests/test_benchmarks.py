"""Benchmarks and campaigns run in their short form, so that they cannot rot."""

import json

import pytest
from benchmarks import (
    fleet,
    fleet_faults,
    fleet_table,
    fleet_training,
    offload,
    planner,
    planning,
    real_models,
    relational,
    relational_stream,
    remat,
    shapes,
    soak_tiers,
    state_plans,
    unified,
    unified_faults,
    unified_graph,
    unified_infer,
    unified_peers,
    unified_ranks,
)


def test_offload_benchmark(tmp_path):
    file = tmp_path / "offload.json"
    offload.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    content = json.loads(file.read_text())
    rows = {(row["name"], row["metric"]): row for row in content["rows"]}
    assert rows["gradients and losses equal to plain", "steps"]["value"] == 4
    assert 0 < rows["Penstock to disk", "activation peak"]["ratio"] < 1.05  # a slow disk hides few copies, or none
    assert rows["Penstock to disk", "moved out a step"]["value"] >= 0
    assert rows["checkpoint", "activation peak"]["ratio"] < 1
    assert content["machine"]["torch"]
    assert (tmp_path / "offload.png").stat().st_size > 0


def test_soak_campaign(tmp_path):
    figures = soak_tiers.main(["--cycles", "60", "--disk", str(tmp_path)])
    assert figures["num_cycles"] >= 60
    assert figures["num_wrong"] == 0


def test_fleet_benchmark(tmp_path):
    file = tmp_path / "fleet.json"
    fleet.main(["--quick", "--json", str(file)])
    rows = {(row["name"], row["metric"]): row for row in json.loads(file.read_text())["rows"]}
    where = "a link of 8 GB/s"
    assert rows["lower bound", f"makespan, {where}"]["ratio"] <= 1 + 1e-9
    assert rows["model parallelism", f"makespan, {where}"]["ratio"] > 4
    assert rows["2,000 jobs on 256 devices", "over the lower bound"]["value"] < 1.05
    assert (tmp_path / "fleet.png").stat().st_size > 0


def test_fleet_training_benchmark(tmp_path):
    file = tmp_path / "training.json"
    fleet_training.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {(row["name"], row["metric"]): row for row in json.loads(file.read_text())["rows"]}
    assert rows["fleet", "losses equal to plain training"]["value"] is True
    assert 0 < rows["fleet", "measured peak over budget"]["value"] <= 1
    assert 0 < rows["fleet", "peak"]["value"] <= rows["fleet", "budget"]["value"]
    assert rows["fleet", "throughput over a peer's"]["value"] > 0
    assert rows["no double buffer", "throughput"]["value"] > 0
    for name in ("training.units.png", "training.losses.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_table_of_a_fleets_time(tmp_path):
    file = tmp_path / "table.json"
    fleet_table.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    content = json.loads(file.read_text())
    rows = {(row["name"], row["metric"]): row["value"] for row in content["rows"]}
    shares = [rows["fleet", name] for name in (*fleet_table.INSIDE, *fleet_table.BETWEEN) if name != "units compute"]
    units = sum(value for (name, _), value in rows.items() if name == "units" and value <= 1)
    assert all(share >= 0 for share in shares)
    assert 0.9 < units + sum(shares) <= 1.001
    assert content["configuration"]["devices"] == 2


def test_campaign_of_faults(tmp_path):
    rows = fleet_faults.main(["--quick", "--disk", str(tmp_path)])
    assert sum(row.value for row in rows if row.metric == "faults") >= 4
    assert all(row.value == 0 for row in rows if row.metric == "trials with something wrong")


def test_state_plans_benchmark():
    rows = {row.metric: row for row in state_plans.main(["--quick"])}
    assert rows["step"].ratio <= rows["aim"].value == 1.8
    assert 8 < rows["in"].value < 12


def test_planner_benchmark(tmp_path):
    file = tmp_path / "planner.json"
    planner.main(["--quick", "--json", str(file)])
    rows = {(row["name"], row["metric"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    assert 1 <= rows["recompute", "step over the optimum's, mean"] < 1.05
    for method in ("recompute", "hybrid"):
        assert rows[method, "budgets not proven optimal"] == 0
    assert 1 <= rows["hybrid, 20 budgets", "step over the bound's, worst"] < 1.2
    assert 0.15 < rows["checkpoint per block", "extra time"] < 0.3
    assert rows["hybrid, 20 budgets", "planning"] > 0


def test_planning_benchmark(tmp_path):
    pytest.importorskip("transformers")
    rows = {(row.name, row.metric): row.value for row in planning.main(["--quick"])}
    assert rows["architectures", "planned"] == 1
    assert 0 < rows["architectures", "median planning"] == rows["architectures", "longest planning"]


def test_remat_benchmark(tmp_path):
    file = tmp_path / "remat.json"
    rows = remat.main(["--quick", "--model", "BERT", "--part", "budgets", "--disk", str(tmp_path), "--json", str(file)])
    equal = [row for row in rows if row.metric.startswith("gradients and loss equal")]
    assert equal
    assert all(row.value for row in equal)
    kept = [row.value for row in rows if row.metric.startswith("measured over budget")]
    assert all(0 < ratio <= 1.01 for ratio in kept)
    assert json.loads(file.read_text())["rows"]


def test_shapes_benchmark(tmp_path):
    file = tmp_path / "shapes.json"
    shapes.main(["--quick", "--json", str(file)])
    rows = {(row["name"], row["metric"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    assert 0.95 < rows["GPT-2", "peak"] <= 1.01
    assert rows["median", "later_s"] > 0


def test_relational_benchmark(tmp_path):
    file = tmp_path / "relational.json"
    layers = ["--layer", "RGCN", "--layer", "HGT"]
    relational.main(
        ["--quick", *layers, "--part", "peers", "--part", "blocks", "--part", "variants", "--json", str(file)]
    )
    rows = {(row["name"], row["peer"], row["metric"]): row for row in json.loads(file.read_text())["rows"]}
    fewest, ours, at_one_end = (
        rows["variants small", "", metric]["value"]
        for metric in ("fewest products", "products of the cover", "products at the better end")
    )
    assert fewest <= ours <= at_one_end
    assert rows["RGCN small 16", "penstock", "training peak"]["value"] > 0
    for name, peer in (
        ("RGCN", "segments and index_add"),
        ("RGCN", "FastRGCNConv"),
        ("HGT", "HGTConv"),
    ):
        assert rows[f"{name} small 16", peer, "training peak"]["ratio"] > 1
        assert rows[f"{name} small 16", peer, "training"]["value"] > 0


def test_unified_benchmark(tmp_path):
    file = tmp_path / "unified.json"
    unified.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {(row["name"], row["metric"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    assert rows["1024 B x 2,000, uniform", "rate from memory"] > 0
    assert rows["1024 B, cold cache", "rows a second, penstock"] > 0
    assert (
        1
        <= rows["1024 B, cold cache", "read amplification, aligned"]
        < rows["64 B, cold cache", "read amplification, aligned"]
    )
    assert rows["16 open, threads", "processor time a row"] > 0
    name = "1/8 of the bytes"
    assert 0.1 < rows[name, "hit rate, measured"] < 0.9
    assert (
        abs(rows[name, "hit rate, measured"] - rows[name, "hit rate, planned"]) < 0.1
    )  # of a single mini-batch or two
    assert 0 < rows[name, "bytes held over budget"] < 4  # mini-batches of a small graph are most of it
    assert list(tmp_path.iterdir()) == [file]


def test_real_models_benchmark(tmp_path):
    file = tmp_path / "real.json"
    real_models.main(
        ["--quick", "--model", "gpt2", "--model", "llama-1b", "--disk", str(tmp_path), "--json", str(file)]
    )
    rows = {(row["name"], row["metric"]): row for row in json.loads(file.read_text())["rows"]}
    assert not [row for row in rows.values() if row["metric"] == "failed"]
    for way in (
        "activations: checkpoint",
        "activations: remat, checkpoint's peak",
        "training: training, 0.5 of plain's peak",
    ):
        assert rows[f"gpt2, {way}", "losses equal to plain's"]["value"] == 1
        assert rows[f"gpt2, {way}", "peak"]["ratio"] < 0.95
    assert rows["gpt2, training: training, 0.5 of plain's peak", "in"]["value"] > 0
    assert 0 < rows["llama-1b", "peak"]["value"] <= 1.1 * rows["llama-1b", "budget"]["value"]


def test_benchmark_of_ranks_that_share_a_table(tmp_path):
    file = tmp_path / "ranks.json"
    unified_ranks.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {(row["name"], row["metric"], row["peer"]): row for row in json.loads(file.read_text())["rows"]}
    assert rows["2 ranks together", "memory of all ranks", "1 process"]["ratio"] < 1.2
    assert rows["2 ranks apart", "memory of all ranks", "1 process"]["ratio"] > 1.8
    assert [name.name for name in tmp_path.iterdir()] == ["ranks.json"]


def test_benchmark_of_machines_that_hold_a_table_together(tmp_path):
    file = tmp_path / "peers.json"
    unified_peers.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {(row["name"], row["metric"], row["peer"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    name = "2 machines, planned"
    here = rows[name, "share of memory here, measured", ""]
    assert here == pytest.approx(rows[name, "share of memory here, planned", ""], abs=0.05)
    assert rows["2 machines, own", "share of memory there, measured", ""] == 0
    assert rows["2 machines, split", "rows in memory that all hold", ""] < 0.5
    assert [name.name for name in tmp_path.iterdir()] == ["peers.json"]


def test_model_of_many_machines(tmp_path):
    file = tmp_path / "model.json"
    unified_peers.main(["--quick", "--model", "--json", str(file)])
    rows = [row for row in json.loads(file.read_text())["rows"] if row["metric"] == "rows read by a machine"]
    assert len(rows) == 16 * 5
    assert all(row["ratio"] >= 0.999 for row in rows if row["ratio"] is not None), "nothing is faster than the plan"


def test_campaign_of_faults_of_ranks(tmp_path):
    file = tmp_path / "faults.json"
    unified_faults.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {(row["name"], row["metric"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    assert rows["all", "trials"] == 10 <= rows["all", "faults"] + 3 and rows["all", "trials with something wrong"] == 0


def test_benchmark_of_a_graph_in_a_file(tmp_path):
    file = tmp_path / "graph.json"
    unified_graph.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {(row["name"], row["metric"]): row for row in json.loads(file.read_text())["rows"]}
    assert rows["write", "file"]["value"] > 8e6 and rows["cold", "nodes of a mini-batch"]["value"] > 1000
    assert rows["warm", "time of a mini-batch"]["ratio"] > 0


def test_benchmark_of_streams(tmp_path):
    file = tmp_path / "stream.json"
    relational_stream.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {(row["name"], row["metric"]): row for row in json.loads(file.read_text())["rows"]}
    assert rows["RGCN, 1 layer", "memory"]["value"] < rows["cap", "bytes"]["value"] < 2**26
    assert rows["RGCN, 1 layer", "difference of losses"]["value"] < 1e-5
    assert rows["RGCN, 1 layer", "predicted step"]["ratio"] > 0


def test_benchmark_of_inference(tmp_path):
    pytest.importorskip("torch_geometric")
    file = tmp_path / "infer.json"
    unified_infer.main(["--quick", "--disk", str(tmp_path), "--json", str(file)])
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["loader"]["ratio"] > 0 and rows["both"]["value"] < 1e-4
