"""Damaged and hostile files: a correct read, or a documented error that names the file."""

import gc
import gzip
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from penstock import fleet, remat, report, unified
from penstock.cli._sweep import read_sweep
from penstock.errors import CheckpointError, FeatureFileError, FleetStateError, PenstockError
from penstock.fleet import FleetState, JobState
from penstock.links import DEVICE, DISK, Link
from penstock.native import _build, compile_source, keep_source
from penstock.probe import LaneBandwidth, _bandwidth, bandwidths, ledger
from penstock.relational import read_id_file, read_ntriples
from penstock.remat import _swap
from penstock.tiers import Budget, Gate, waterfall_for

ROOT = Path(__file__).parents[1]


def test_the_campaign_in_short(tmp_path):
    """The same files every time. A process of its own: it forks."""
    file = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "benchmarks.fuzz", "--cases", "12", "--disk", str(tmp_path), "--json", str(file)]
    search = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    content = json.loads(file.read_text())
    assert content["configuration"]["findings"] == []
    assert done.returncode == 0, done.stdout[-3000:]
    rows = {row["metric"]: row["value"] for row in content["rows"] if row["name"] == "fuzz"}
    assert rows["cases"] >= 150


def problem():
    return remat.RematProblem(
        operators=(
            remat.Operator(name="a", target="mm", inputs=(), outputs=(0,), duration_s=1.0),
            remat.Operator(name="b", target="mm", inputs=(0,), outputs=(1,), duration_s=1.0),
        ),
        num_forward=1,
        storages=(
            remat.Storage(name="a", size_bytes=10, producer=0),
            remat.Storage(name="b", size_bytes=10, producer=1, is_output=True),
        ),
    )


def put(value, change, *keys):
    for key in keys[:-1]:
        value = value[key]
    value[keys[-1]] = change


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        (("operators", 1, "inputs"), [7]),
        (("operators", 1, "inputs"), [-1]),
        (("operators", 0, "inputs"), [1]),
        (("operators", 0, "outputs"), [0, 1]),
        (("operators", 0, "outputs"), []),
        (("operators", 0, "duration_s"), float("nan")),
        (("operators", 0, "duration_s"), -1.0),
        (("operators", 0, "name"), 5),
        (("operators", 0, "workspace_bytes"), 2**70),
        (("storages", 0, "size_bytes"), -1),
        (("storages", 0, "size_bytes"), 10.0),
        (("storages", 0, "size_bytes"), 2**60),
        (("storages", 0, "producer"), 2),
        (("num_forward",), 3),
        (("num_forward",), True),
        (("static_bytes",), "1"),
        (("out_bandwidth_bytes_per_s",), float("inf")),
    ],
)
def test_a_problem_that_no_step_can_be(tmp_path, keys, change):
    """Planners, some of them in C, follow these numbers without looking."""
    path = tmp_path / "problem.json"
    problem().save(path)
    assert remat.RematProblem.load(path) == problem()
    content = json.loads(path.read_text())
    put(content, change, *keys)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"problem\.json is not a saved problem"):
        remat.RematProblem.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{key}: &{key} [{', '.join(['*' + last] * 10)}]\n" for last, key in zip("abcdefg", "bcdefgh", strict=True)
        ), "more than 1,000,000 values"),
        ("job: a.py:b\nparameters: {x: [" + "9" * 5000 + "]}", "line 2: a number of 5000 digits"),
        ("a: " + "{b: " * 3000, "nested too deeply"),
        ("job: a.py:b\nparameters:\n" + "".join(f"  p{index}: [1, 2, 3, 4]\n" for index in range(30)),
         "line 2, parameters: 1,152,"),
        ("job: a.py:b\nsearch: random\nnum_jobs: 1000000000000\nparameters: {x: {low: 0, high: 1}}", "num_jobs"),
        ("job: !!python/object/apply:os.system ['false']", "python/object/apply:os.system is not read here"),
    ],
)  # fmt: skip
def test_sweeps_that_would_never_be_read(tmp_path, text, said):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_sweep(path)
    assert str(path) in str(caught.value)


def test_triples_that_are_cut_or_no_text(tmp_path):
    whole = gzip.compress(b"<a> <r> <b> .\n" * 500)
    for name, raw in {
        "cut.nt.gz": whole[: len(whole) // 2],
        "no.nt.gz": b"<a> <r> <b> .\n",
        "damaged.nt.gz": whole[:20] + bytes(20) + whole[40:],
        "latin.nt": b'<a> <r> "\xe9" .\n',
        "long.nt": b"<" * (2**24 + 1),
    }.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(ValueError, match=name) as caught:
            read_ntriples(tmp_path / name)
        assert type(caught.value) is ValueError
    for text in ("\u00b2\n0 1 0\n", "9" * 5000 + "\n", "2\n"):
        (tmp_path / "ids.txt").write_text(text)
        with pytest.raises(ValueError, match=r"ids\.txt"):
            read_id_file(tmp_path / "ids.txt")


def test_headers_of_features_that_say_nothing(tmp_path):
    path = tmp_path / "x.npy"
    for header in ("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 2**70)}", "[" * 5000, "-" * 60_000 + "1"):
        raw = header.replace("2**70", str(2**70)).encode()
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw)
        with pytest.raises(FeatureFileError, match=r"x\.npy is damaged"):
            unified.from_file(path)
    path = tmp_path / "x.safetensors"
    for header in (
        b"[" * 3000,
        b"9" * 5000,
        b"17",
        b'{"x": {"dtype": "F32", "shape": [0, 4611686018427387904], "data_offsets": [0, 0]}}',
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(FeatureFileError, match=r"x\.safetensors is damaged"):
            unified.from_file(path)


def job(steps=4):
    return fleet.Job(
        name="job", model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)),
        data=lambda: [torch.ones(2, 4)] * 3, loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1), steps=steps,
    )  # fmt: skip


def train(run_dir, steps=4):
    device = fleet.Device(name="cpu", threads=1)
    options = {"host": "64MB", "run_dir": run_dir, "resume": True, "checkpoint_every": 2, "progress": None}
    return fleet.run([job(steps)], [device], "64MB", **options)["job"]


def half_way(run_dir):
    train(run_dir)
    with sqlite3.connect(run_dir / "fleet.db") as database:
        database.execute("UPDATE jobs SET state = 'running'")
    database.close()
    (checkpoint,) = (run_dir / "jobs" / "job" / "checkpoints").iterdir()
    return checkpoint


@pytest.mark.parametrize(
    "name", ["tensors-00000.safetensors", "optimizer-00000.safetensors", "state.json", "checksums.json"]
)
def test_a_changed_bit_or_a_missing_file_of_a_checkpoint_is_told(tmp_path, name):
    """Training never goes on from other numbers."""
    checkpoint = half_way(tmp_path / "run")
    file = checkpoint / name
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    result = train(tmp_path / "run", 8)
    assert result.state is JobState.FAILED
    assert result.error.startswith("penstock.errors.CheckpointError") and str(checkpoint) in result.error
    if name.startswith("tensors"):
        with pytest.raises(CheckpointError, match="differs from what was written"):
            result.model()
    if name.startswith(("tensors", "optimizer")):
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        (tmp_path / "again" / file.relative_to(tmp_path / "run")).unlink()
        with sqlite3.connect(tmp_path / "again" / "fleet.db") as database:
            database.execute("UPDATE jobs SET state = 'running'")
        database.close()
        assert "some of its files are missing" in train(tmp_path / "again", 8).error


def test_checkpoints_of_before_without_checksums_are_read(tmp_path):
    undisturbed = train(tmp_path / "whole", 8)
    (half_way(tmp_path / "run") / "checksums.json").unlink()
    assert train(tmp_path / "run", 8).losses == undisturbed.losses


def test_metrics_that_were_damaged_do_not_end_a_job(tmp_path):
    half_way(tmp_path / "run")
    metrics = tmp_path / "run" / "jobs" / "job" / "metrics.jsonl"
    metrics.write_bytes(b"\xff\xfe\n[1]\n" + b"[" * 100_000 + b"\n" + metrics.read_bytes())
    result = train(tmp_path / "run", 8)
    assert result.state is JobState.DONE
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 9))


def test_an_ended_job_with_a_damaged_checkpoint_says_so(tmp_path):
    train(tmp_path / "run")
    (checkpoint,) = (tmp_path / "run" / "jobs" / "job" / "checkpoints").iterdir()
    (checkpoint / "state.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=str(checkpoint)):
        train(tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    ["jobs SET state = 'bogus'", "jobs SET validation = '[['", "jobs SET place = 'x'", "jobs SET tags = '[]'",
     "jobs SET seconds_per_step = 'long'", "jobs SET validation = '{\"loss\": null}'"],
)  # fmt: skip
def test_a_state_that_cannot_be_read(tmp_path, change):
    train(tmp_path)
    state = FleetState(tmp_path)
    with sqlite3.connect(state.path) as database:
        database.execute(f"UPDATE {change}")
    database.close()
    with pytest.raises(FleetStateError, match=r"fleet\.db"):
        state.jobs()


def test_commands_that_cannot_be_read_are_answered(tmp_path):
    state = FleetState(tmp_path)
    state.create()
    bad, good = state.ask("pause", "a"), state.ask("pause", "b")
    with sqlite3.connect(state.path) as database:
        database.execute("UPDATE commands SET arguments = '[1' WHERE id = ?", (bad,))
        database.execute("UPDATE fleet SET value = 'soon' WHERE key = 'alive_s'")
    database.close()
    assert [command.id for command in state.commands()] == [good]
    assert "cannot be read" in state.answer_to(bad, 0.0)
    assert not state.is_alive
    with pytest.raises(FleetStateError, match="no longer has command 99"):
        state.answer_to(99, 0.0)


def test_pictures_leave_damaged_lines_out(tmp_path):
    unit = {"device": 0, "job": "a", "shard": 0, "kind": "forward", "start_s": 1.0, "end_s": 2.0, "stall_s": 0.0}
    odd = [17, [], {}, {**unit, "end_s": float("nan")}, {**unit, "start_s": "x"}, {**unit, "device": None}]
    lines = [json.dumps(value).encode() for value in odd]
    (tmp_path / "units.jsonl").write_bytes(b"\n".join([*lines, b"\xff\xfe", b"[" * 100_000]))
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    metrics = [
        json.dumps(metrics) for metrics in (17, {"loss": None}, {"loss": float("inf")}, {"loss": 1.0}, {"loss": 0.5})
    ]
    (tmp_path / "jobs" / "a" / "metrics.jsonl").write_text("\n".join(metrics))
    with pytest.raises(PenstockError, match="no units"):
        report.draw_fleet(tmp_path)
    (tmp_path / "units.jsonl").write_bytes(b"\n".join([*lines, json.dumps(unit).encode()]))
    trace = json.loads(report.draw_fleet(tmp_path)[2].read_text())
    assert sum(event.get("ph") == "X" for event in trace["traceEvents"]) == 1


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0, -1.0, 10])
def test_rates_that_no_disk_has_are_measured_again(tmp_path, monkeypatch, rate):
    lanes = tuple(
        LaneBandwidth(lane=lane, bandwidth_bytes_per_s=1e9, is_direct=True, measured_s=9e9)
        for lane in ("device->disk", "disk->device")
    )
    monkeypatch.setattr(_bandwidth, "_disk_lanes", lambda *_: lanes)
    monkeypatch.setattr(_bandwidth, "_links_of_disk", lambda: {Link(DEVICE, DISK), Link(DISK, DEVICE)})
    first = bandwidths(tmp_path)
    file = _bandwidth.cache_folder() / "bandwidths.json"
    content = json.loads(file.read_text())
    next(iter(content.values()))[0]["bandwidth_bytes_per_s"] = rate
    for text in (json.dumps(content), "[" * 100_000, json.dumps({key: value[:1] for key, value in content.items()})):
        file.write_text(text)
        assert bandwidths(tmp_path)[:2] == first[:2]


def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = "int answer(void) { return 42; }\n"
    if compile_source(source, "answer") is None:
        pytest.skip("no C compiler")
    (file,) = (tmp_path / "penstock" / "native").glob("answer-*.so")
    whole = file.read_bytes()
    for raw in (
        whole[:100],
        b"",
        whole[:-40] + bytes(8) + whole[-32:],
        bytes([*whole[:5000], whole[5000] ^ 4, *whole[5001:]]),
    ):
        file.unlink()
        file.write_bytes(raw)
        _build._loaded.cache_clear()
        assert compile_source(source, "answer").answer() == 42
        assert file.stat().st_size == len(whole)
    kept = keep_source("X = 1\n", "kept.py")
    kept.write_text("X = 2\n")
    assert keep_source("X = 1\n", "kept.py").read_text() == "X = 1\n"


def test_a_fleet_whose_folder_goes_puts_the_process_back(tmp_path):
    before = sys.getswitchinterval(), torch.get_num_threads()
    running = fleet.Fleet(
        [fleet.Device(name="cpu", threads=1)], "64MB", host="64MB", run_dir=tmp_path / "run", progress=None
    )
    running.__enter__()
    torch.set_num_threads(before[1] + 1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FleetStateError):
        running.__exit__(None, None, None)
    assert (sys.getswitchinterval(), torch.get_num_threads()) == before


def test_the_budget_that_a_refusal_names_has_room():
    """Whole bytes: text such as 1.0 MiB is rounded."""
    device = fleet.Device(name="cpu", threads=1)
    refused = fleet.run([job()], [device], 100, host="64MB", progress=None)["job"]
    assert refused.state is JobState.FAILED
    size = int(re.search(r"`budget` must be at least (\d+)", refused.error)[1])
    for _ in range(3):  # a pilot run may find more than parameters take
        result = fleet.run([job()], [device], size, host="64MB", progress=None)["job"]
        if result.state is JobState.DONE:
            return
        size = int(re.search(r"`budget` must be at least (\d+)", result.error)[1])
    pytest.fail(result.error)


def test_a_handle_that_outlives_its_tiers_gives_back_what_it_holds(tmp_path):
    held = ledger.held_bytes
    waterfall = waterfall_for("cpu", Budget(disk=tmp_path))
    handle = waterfall.park(torch.ones(100_000)[3:].clone().untyped_storage())
    waterfall.drain()
    waterfall.close()
    del handle
    gc.collect()
    assert ledger.held_bytes == held
    assert waterfall.statistics().num_live_handles == 0


def test_swaps_of_a_step_that_is_gone_end_their_lanes(tmp_path):
    torch._dynamo.reset()
    before, held, budget = set(threading.enumerate()), ledger.held_bytes, Budget(disk=tmp_path)
    tiers = _swap.Tiers(torch.device("cpu"), budget, verify=False)
    ticket = _swap.park(torch.ones(200_000), tiers.number)
    _swap.finish(ticket)
    lanes = set(threading.enumerate()) - before
    assert lanes
    del tiers
    gc.collect()
    assert torch.equal(_swap.fetch(ticket), torch.ones(200_000))  # a ticket keeps them
    del ticket
    gc.collect()
    for thread in {*lanes, *(thread for thread in threading.enumerate() if thread.name == "penstock closes swaps")}:
        thread.join(600)
        assert not thread.is_alive()
    assert (ledger.held_bytes, budget.held_bytes(str(tmp_path))) == (held, 0)


def test_whoever_is_inside_the_gate_goes_through_again():
    """A planned step is traced beside a fleet, or inside of what a fleet computes."""
    passed, gate = [], Gate()
    with gate.computing(), gate.tracing(), gate.computing():
        pass
    with gate.tracing(), gate.tracing():
        other = threading.Thread(target=lambda: [passed.append(1) for _ in [gate.computing().__enter__()]])
        other.start()
        assert not passed
    other.join(600)
    assert passed
