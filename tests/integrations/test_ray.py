"""A fleet over two Ray nodes in one machine: losses are those of plain PyTorch, whatever happens to the nodes."""

import json
import sys
import threading
import time
import warnings

import pytest
import torch

from penstock import errors, fleet
from penstock.integrations import run_on_ray
from penstock.integrations._ray_plan import Move
from penstock.testing import GPT

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
OPTIONS = {
    "devices_per_node": [fleet.Device(name="cpu", threads=1)],
    "budget": "32MiB",
    "host": "64MiB",
    "checkpoint_every": 2,
    "progress": None,
}


def make_job(name, *, steps=8, gate=None, slow_until=None, batch_s=0.0, fails=False, validates=False):
    """Its fifth batch comes when the file ``gate`` is there, so that a test decides what happens before.

    No other job's batch comes meanwhile, since jobs share the process's generators. Those of a job that is
    ``slow_until`` a file is there do.
    """

    def batches():
        generator = torch.Generator().manual_seed(len(name))
        for index in range(steps):
            while gate is not None and index >= 4 and not gate.exists():
                time.sleep(0.01)
            if slow_until is not None and not slow_until.exists():
                time.sleep(0.1)
            time.sleep(batch_s)
            yield torch.randint(0, 64, (2, 9), generator=generator)

    def loss(model, tokens):
        if fails:
            raise RuntimeError("no such thing")
        return model(tokens[:, :-1], tokens[:, 1:])

    return fleet.Job(
        name=name,
        model=lambda: GPT(num_layers=1, width=32, num_heads=2, context=8, vocabulary=64),
        data=lambda: Batches(batches),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3 * len(name)),
        steps=steps,
        seed=len(name),
        validation=(lambda: [torch.ones(2, 9, dtype=torch.int64)]) if validates else None,
        evaluate_every=2 if validates else None,
    )


class Batches:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self.batches()


def plain(job):
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    losses = []
    for batch in job.data():
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


@pytest.fixture(scope="module")
def ray_module():
    """Functions of this file travel by value: workers cannot import it."""
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield ray
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def add_node(cluster):
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)


@pytest.fixture(scope="module")
def cluster(ray_module):
    """Two nodes of one core, beside a head that computes nothing."""
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": 80_000_000,
                "include_dashboard": False,
                "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 3},
            },
        )
        for _ in range(2):
            add_node(nodes)
        ray_module.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray_module.shutdown()
        nodes.shutdown()


class Watcher:
    """A tracker that does something once, when a condition is met; it looks for that also while nothing is logged."""

    def __init__(self, condition, action):
        self.condition, self.action, self.done = condition, action, None
        self.steps, self.ends = [], {}
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self):
        while not self.is_closed.wait(0.02):
            if target := self.condition():
                self.done = target
                self.action(target)
                return

    def log(self, job, step, metrics):
        self.steps.append((job.name, step))
        if self.thread.ident is None:
            self.thread.start()

    def end(self, job, state):
        self.ends[job.name] = state

    def close(self):
        self.is_closed.set()
        if self.thread.ident is not None:
            self.thread.join()


def metrics_of(run_dir, name):
    return [json.loads(line) for line in (run_dir / "jobs" / name / "metrics.jsonl").read_text().splitlines()]


def test_losses_on_two_nodes_are_those_of_plain_pytorch(tmp_path, cluster, one_thread):
    jobs = [make_job("j" * number) for number in range(1, 7)]
    bad, stopped = make_job("bad", fails=True), make_job("stopped", steps=40, validates=True)
    ended = make_job("ended", steps=200, batch_s=0.02)
    everything = [*jobs, bad, stopped, ended]
    asked, numbers = [], {}
    state = fleet.FleetState(tmp_path)

    def ask(_):
        for verb in ("stop", "clone"):
            numbers[verb] = state.ask(verb, "ended")

    def stopper(job, step, metrics):
        asked.append((job.name, step, set(metrics)))
        return step >= 4

    tracker = Watcher(lambda: ("ended", 4) in tracker.steps, ask)
    results = run_on_ray(everything, run_dir=tmp_path, trackers=[tracker], stopper=stopper, **OPTIONS)
    for job in jobs:
        assert results[job.name].state is fleet.JobState.DONE
        assert results[job.name].losses == plain(job)
        assert [row["loss"] for row in metrics_of(tmp_path, job.name)] == list(plain(job))
        assert [step for name, step in tracker.steps if name == job.name] == list(range(1, 9))
    assert results["bad"].state is fleet.JobState.FAILED
    assert "no such thing" in results["bad"].error
    assert results["stopped"].state is fleet.JobState.STOPPED
    assert results["stopped"].losses == plain(stopped)[:4]
    assert asked == [("stopped", 2, {"loss"}), ("stopped", 4, {"loss"})]
    assert results["ended"].state is fleet.JobState.STOPPED
    assert 4 <= len(results["ended"].losses) < 200
    assert results["ended"].losses == plain(make_job("ended", steps=200))[: len(results["ended"].losses)]
    assert state.answer_to(numbers["stop"], 1.0) == ""
    assert "not clone" in state.answer_to(numbers["clone"], 1.0)
    assert list(results) == [job.name for job in everything]
    assert tracker.ends == {name: result.state for name, result in results.items()}
    assert tracker.is_closed.is_set()
    assert len(results.devices) == len({device.name for device in results.devices}) == 2
    assert all(device.num_units > 0 and 0 < device.peak_bytes <= 32 * 2**20 for device in results.devices)
    rows = fleet.FleetState(tmp_path).jobs()
    assert {row.name: row.state for row in rows} == {name: result.state.value for name, result in results.items()}
    assert len({row.device for row in rows}) == 2
    assert list((tmp_path / "nodes").glob("*.lease")) == []

    with pytest.raises(ValueError, match="resume=True"):
        run_on_ray(everything, run_dir=tmp_path, **OPTIONS)
    again = run_on_ray(everything, run_dir=tmp_path, resume=True, **OPTIONS)
    assert again.devices == ()  # nothing is run again
    assert all(again[name].state is result.state for name, result in results.items())
    assert all(again[name].losses == result.losses for name, result in results.items())


def test_a_job_moves_to_an_idle_node(tmp_path, cluster, one_thread, monkeypatch):
    """When to move is the planner's; this is how."""
    job = make_job("moved", steps=40, batch_s=0.05)
    moves = []

    def once(nodes, least_gain_s):
        has_checkpoint = any((tmp_path / "jobs" / "moved" / "checkpoints").glob("step-*"))
        for node in nodes:
            if not moves and len(nodes) == 2 and node.jobs and has_checkpoint:
                (target,) = [other.name for other in nodes if other is not node]
                moves.append(Move(job="moved", source=node.name, target=target))
                return moves[0]
        return None

    monkeypatch.setattr("penstock.integrations._ray_driver.move", once)
    results = run_on_ray([job], run_dir=tmp_path, **OPTIONS)
    assert results["moved"].losses == plain(make_job("moved", steps=40))
    assert [row["step"] for row in metrics_of(tmp_path, "moved")] == list(range(1, 41))
    units = [file.read_text() for file in (tmp_path / "nodes").glob("*.units.jsonl")]
    assert len(units) == 2
    assert all("moved" in text for text in units)


def node_with_checkpoint(run_dir, cluster):
    """A node with a job that has a checkpoint, and that job."""

    def look():
        for row in fleet.FleetState(run_dir).jobs():
            if row.device and any((run_dir / "jobs" / row.name / "checkpoints").glob("step-*")):
                short = row.device.split()[0].partition("/")[2]
                nodes = [node for node in cluster.worker_nodes if node.node_id.startswith(short)]
                return (nodes[0], row.name) if nodes else None
        return None

    return look


def test_jobs_of_a_lost_node_go_on_elsewhere(tmp_path, cluster, one_thread):
    run_dir, gate = tmp_path / "run", tmp_path / "go"
    jobs = [make_job("k" * number, steps=10, gate=gate) for number in range(1, 5)]
    killed = []

    def kill(target):
        killed.append(time.time())
        cluster.remove_node(target[0], allow_graceful=False)
        while any((run_dir / "nodes").glob(f"{target[0].node_id[:12]}-*.lease")):  # its process may live on for a while
            time.sleep(0.02)
        gate.touch()

    watcher = Watcher(node_with_checkpoint(run_dir, cluster), kill)
    with pytest.warns(errors.NodeLostWarning, match="continue elsewhere"):
        results = run_on_ray(jobs, run_dir=run_dir, trackers=[watcher], **OPTIONS)
    for job in jobs:
        assert results[job.name].state is fleet.JobState.DONE
        assert results[job.name].losses == plain(job)
        assert [row["step"] for row in metrics_of(run_dir, job.name)] == list(range(1, 11))
        assert [step for name, step in watcher.steps if name == job.name] == list(range(1, 11))
    resumed = metrics_of(run_dir, watcher.done[1])
    # from the checkpoint, not from the beginning
    assert resumed[0]["time_s"] < killed[0] < resumed[-1]["time_s"]


def test_without_nodes_it_says_how_to_go_on(tmp_path, cluster, one_thread):
    for node in list(cluster.worker_nodes)[1:]:
        cluster.remove_node(node)
    run_dir, go = tmp_path / "run", tmp_path / "go"
    jobs = [make_job("over", steps=4), make_job("begun", steps=150, slow_until=go)]

    def condition():
        states = {row.name: row.state for row in fleet.FleetState(run_dir).jobs()}
        return states["over"] == "done" and any((run_dir / "jobs" / "begun" / "checkpoints").glob("step-*"))

    def kill(_):
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)

    watcher = Watcher(condition, kill)
    with (
        pytest.warns(errors.NodeLostWarning),
        pytest.raises(errors.NodeLostError, match=r"1 of 2 jobs are over.*resume=True"),
    ):
        run_on_ray(jobs, run_dir=run_dir, trackers=[watcher], **OPTIONS)
    add_node(cluster)
    go.touch()
    watcher = Watcher(lambda: False, None)
    results = run_on_ray(jobs, run_dir=run_dir, resume=True, trackers=[watcher], **OPTIONS)
    assert {job.name: results[job.name].losses for job in jobs} == {job.name: plain(job) for job in jobs}
    assert {name for name, _ in watcher.steps} == {"begun"}
    assert watcher.steps[0][1] > 1


def test_settings_of_no_use_are_refused(tmp_path, cluster):
    job = make_job("x")
    with pytest.raises(TypeError, match="devices_per_node"):
        run_on_ray([job], run_dir=tmp_path, devices=["cpu"])
    with pytest.raises(TypeError, match="sides"):
        run_on_ray([job], run_dir=tmp_path, sides=2, **OPTIONS)
    with pytest.raises(ValueError, match="two jobs"):
        run_on_ray([job, job], run_dir=tmp_path, **OPTIONS)
    with pytest.raises(TypeError, match="cannot be sent"):
        run_on_ray([job.with_changes(tags={"lock": threading.Lock()})], run_dir=tmp_path, **OPTIONS)
    with pytest.raises(errors.NodeLostError, match="devices_per_node"):
        run_on_ray([job], run_dir=tmp_path, devices_per_node={"elsewhere": ["cpu"]})


def test_without_ray_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"penstock\[ray\]"):
        run_on_ray([], run_dir=tmp_path)
