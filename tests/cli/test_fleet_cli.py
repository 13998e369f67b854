"""`penstock fleet`, as a user calls it."""

import json
import signal
import threading
import warnings
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from penstock.cli import _fleet, app
from penstock.cli._choices import Scheduler
from penstock.cli._document import value_of
from penstock.cli._fault import Misuse
from penstock.cli._sweep import read_sweep
from penstock.cli._sweep_jobs import make_jobs, maker_of
from penstock.errors import PenstockError, PenstockWarning
from penstock.fleet import FleetState, SchedulerName
from penstock.report._parts import parts_of_folder
from waiting import PATIENCE_S, eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTORY = """
import torch
from torch import nn
from penstock.fleet import Job

def make_job(lr, batch=4, steps=3, name="line"):
    def data():
        return [(torch.ones(batch, 4), torch.zeros(batch, 1))] * 64
    return Job(
        name=name,
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        data=data,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        steps=steps,
        tags={"lr": lr},
    )

def make_bad(lr):
    raise KeyError("no such data")

def make_nothing(lr):
    return lr

def make_failing(lr, fails):
    job = make_job(lr)
    def data():
        raise RuntimeError("the data are gone")
    return job.with_changes(data=data) if fails else job
"""
FLEET = "fleet: {devices: [cpu], budget: 4MiB, host: 64MiB}\n"
GRID = "job: jobs.py:make_job\nparameters: {lr: [1e-2, 1e-1]}\n" + FLEET


def works(*arguments):
    result = penstock(*arguments)
    assert result.exit_code == 0, result.output
    return result


def penstock(*arguments):
    return CliRunner().invoke(app, ["fleet", *(str(argument) for argument in arguments)])


def said(result):
    return " ".join(result.output.split())


@pytest.fixture
def written(tmp_path):
    """Writes a sweep beside the functions that it names."""
    (tmp_path / "jobs.py").write_text(FACTORY)

    def write(text, name="sweep.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# Reading


def test_numbers_come_out_as_numbers():
    texts = ["1e-4", "1E5", "-2.5e+3", ".5", "7", "1_000", "010", ".inf", "no", "true", "null", "'1'", "[1e-3, a]", ""]
    values = [1e-4, 1e5, -2500.0, 0.5, 7, 1000, 10, float("inf"), "no", True, None, "1", [1e-3, "a"], None]
    found = [value_of(text) for text in texts]
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


def test_a_grid_is_all_combinations_in_order(written):
    file = read_sweep(written("job: jobs.py:make_job\nparameters: {lr: [1e-4, 3e-4], batch: [4, 8]}\n"))
    assert file.points == [
        {"lr": 1e-4, "batch": 4}, {"lr": 1e-4, "batch": 8}, {"lr": 3e-4, "batch": 4}, {"lr": 3e-4, "batch": 8},
    ]  # fmt: skip


def test_json_is_read_too(written):
    text = json.dumps({"job": "jobs.py:make_job", "parameters": {"lr": [1e-5]}}, indent="\t")
    assert read_sweep(written(text, "sweep.json")).points == [{"lr": 1e-5}]


RANDOM = """
job: jobs.py:make_job
search: random
num_jobs: 20
seed: {seed}
parameters:
  lr: {{low: 1e-5, high: 1e-3, log: true}}
  width: {{low: 1, high: 9, integer: true}}
  batch: {{choices: [4, 8]}}
"""


def test_a_random_search_repeats_with_its_seed(written):
    points = read_sweep(written(RANDOM.format(seed=0))).points
    assert points == read_sweep(written(RANDOM.format(seed=0))).points
    assert points != read_sweep(written(RANDOM.format(seed=1))).points
    assert len({json.dumps(point) for point in points}) == 20
    assert all(1e-5 <= point["lr"] <= 1e-3 and point["batch"] in (4, 8) for point in points)
    assert all(isinstance(point["width"], int) and 1 <= point["width"] <= 9 for point in points)
    assert sum(point["lr"] < 1e-4 for point in points) > 3


def test_a_list_is_as_it_stands_there(written):
    file = read_sweep(written("job: jobs.py:make_job\nsearch: list\njobs:\n- {lr: 1e-3}\n- {lr: 1, batch: 2}\n"))
    assert file.points == [{"lr": 1e-3}, {"lr": 1, "batch": 2}]


@pytest.mark.parametrize(
    "text, words",
    [
        ("job: a:b\nparameters: {lr: [1]}\nfleet:\n  budget: 200Mob\n", "line 4, fleet.budget: '200Mob' is not a size"),
        ("job: a:b\nfleet:\n  budgets: 1\n", "line 3, fleet.budgets: there is no such key; there are devices, budget"),
        ("job: a:b\nfleet:\n  devices:\n  - cpu\n  - tpu\n", "line 5, fleet.devices[1]: a device is cpu or cuda:0"),
        ("job: a:b\nfleet:\n  devices: [{name: cpu, thread: 1}]\n", "fleet.devices[0].thread: there is no such key"),
        ("job: a:b\nfleet:\n  disk: {/nvme: lots}\n", "line 3, fleet.disk./nvme: 'lots' is not a size"),
        ("job: a:b\nfleet:\n  disk: 3\n", "line 3, fleet.disk: input should be a valid dictionary, not 3"),
        ("job: a:b\nfleet:\n  scheduler: best\n", "line 3, fleet.scheduler: input should be 'fair'"),
        ("job: a:b\nfleet:\n  checkpoint_every: 0\n", "line 3, fleet.checkpoint_every: input should be greater"),
        ("parameters:\n  lr: [1]\n", "line 1: job is missing"),
        ("job: a:b\nparameters:\n  lr: 1\n", "line 3, parameters.lr: input should be a valid list, not 1"),
        ("job: a:b\nparameters:\n  lr: [1, 1]\n", "line 3, parameters.lr: 1 stands there 2 times"),
        ("job: a:b\nparameters:\n  lr: [1]\n  lr: [2]\n", "line 4: lr stands there twice"),
        ("job: a:b\nparameters:\n  1: [1]\n", "line 3: a key is text"),
        ("job: a:b\nsearch: magic\n", "line 2, search: a search is grid, random or list, not 'magic'"),
        ("job: a:b\nnum_jobs: 3\n", "line 2, num_jobs: there is no such key"),
        ("job: a:b\nsearch: random\nnum_jobs: 3\nparameters:\n  lr: {low: 1}\n", "line 5, parameters.lr: give low and"),
        ("job: a:b\nsearch: random\nnum_jobs: 1\nparameters:\n  lr: {low: 2, high: 1}\n", "low is below high"),
        ("job: a:b\nsearch: random\nnum_jobs: 1\nparameters:\n  lr: {low: 0, high: 1, log: true}\n", "above 0"),
        ("job: a:b\nsearch: random\nnum_jobs: 1\nparameters:\n  lr: {low: 0, high: 1, choices: [1]}\n", "give low and"),
        ("job: a:b\nsearch: random\nnum_jobs: 3\nparameters:\n  lr: {choices: [1, 2]}\n", "line 3, num_jobs: only 2"),
        ("job: a:b\nsearch: list\njobs: []\n", "line 3, jobs: list should have at least 1 item"),
        ("job: a:b\n  c: d\n", "line 2: mapping values are not allowed here"),
        ("job: !!python/name:os.system x\n", "line 1: tag:yaml.org,2002:python/name:os.system is not read here"),
        ("job: &a [*a]\n", "line 1: this stands inside of itself"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_line_and_key(written, text, words):
    path = written(text)
    with pytest.raises(ValueError, match="sweep.yaml, line") as error:
        read_sweep(path)
    assert f"{path}, " in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(("text", "words"), [("- a\n", "got a list"), ("", "the file is empty")])
def test_a_file_without_keys_is_told_which_there_are(written, text, words):
    with pytest.raises(ValueError, match="the keys are job .required., fleet, search, parameters") as error:
        read_sweep(written(text))
    assert words in str(error.value)


def test_all_faults_are_told_at_once(written):
    with pytest.raises(ValueError, match="line") as error:
        read_sweep(written("jobb: a:b\nfleet:\n  keep: 0\n  budget: -1\n"))
    places = {line.partition("yaml, ")[2].partition(":")[0] for line in str(error.value).splitlines()}
    assert places == {"line 1", "line 1, jobb", "line 3, fleet.keep", "line 4, fleet.budget"}


def test_options_come_before_the_file(written):
    fleet = read_sweep(
        written("job: a:b\nfleet: {devices: [{name: cpu, budget: 1MiB}], disk: [/a, /b], run_dir: runs/1}\n")
    ).sweep.fleet
    assert fleet.disk == {"/a": None, "/b": None}
    changed = fleet.overridden(budget="2MiB", disk=["/c"], host=None)
    assert (changed.budget, changed.devices[0].budget, changed.disk) == (2 * 2**20, None, {"/c": None})
    assert changed.run_dir == "runs/1"
    assert [device.name for device in fleet.overridden(devices=["cpu", "cuda:1"]).devices] == ["cpu", "cuda:1"]
    with pytest.raises(Misuse, match="--host: 'much' is not a size"):
        fleet.overridden(host="much")


def test_the_limit_of_host_memory_is_still_known_by_its_earlier_name(written):
    with pytest.warns(DeprecationWarning, match="`host_budget` is now called `host`"):
        document = read_sweep(written("job: a:b\nfleet: {host_budget: 1MiB}\n"))
    assert document.sweep.fleet.host == 2**20
    with pytest.warns(DeprecationWarning, match="`--host-budget` is now called `--host`"):
        penstock("run", written("job: a:b\n"), "--host-budget", "1MiB")


# Making jobs


def jobs_of(path):
    file = read_sweep(path)
    return make_jobs(file, maker_of(file))


def test_jobs_get_names_of_their_own(written):
    text = "job: jobs.py:make_job\nsearch: list\njobs:\n"
    jobs = jobs_of(written(text + "- {lr: 1e-4, batch: 4}\n- {lr: 1, name: other}\n- {lr: 1, name: 'line'}\n"))
    assert [job.name for job, _ in jobs] == ["line lr=0.0001,batch=4", "other", "line lr=1,name=line"]
    path, parameters = jobs[0][1].path, jobs[0][1].parameters
    assert path.endswith("/jobs.py:make_job") and Path(path).is_absolute()
    assert parameters == {"lr": 1e-4, "batch": 4}
    assert jobs[0][1].make(lr=1, steps=7).steps == 7


def test_names_stay_folders_and_different(tmp_path):
    (tmp_path / "odd.py").write_text(FACTORY + "\ndef make_odd(lr, what): return make_job(lr)\n")
    (tmp_path / "odd.yaml").write_text(
        "job: odd.py:make_odd\nparameters: {lr: [1], what: ['a/b', 'a:b', [1, {c: d}]]}\n"
    )
    names = [job.name for job, _ in jobs_of(tmp_path / "odd.yaml")]
    assert names == ["line lr=1,what=a-b", "line lr=1,what=a-b 2", "line lr=1,what=-1, -c- -d-"]


def test_a_job_alone_keeps_its_name(written):
    assert [job.name for job, _ in jobs_of(written("job: jobs.py:make_job\nparameters: {lr: [1]}\n"))] == ["line"]


def test_a_module_is_found_in_the_current_directory(written, tmp_path, monkeypatch):
    (tmp_path / "my_sweep_jobs.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    ((_, source),) = jobs_of(written("job: my_sweep_jobs:make_job\nparameters: {lr: [1]}\n"))
    assert source.path == "my_sweep_jobs:make_job"


@pytest.mark.parametrize(
    "text, words",
    [
        ("job: jobs.py\nparameters: {lr: [1]}\n", "line 1, job: 'jobs.py' does not say which function makes jobs"),
        ("job: none.py:make\nparameters: {lr: [1]}\n", "line 1, job: there is no file"),
        ("job: no_such_module:make\nparameters: {lr: [1]}\n", "line 1, job: there is no module no_such_module"),
        ("job: jobs.py:other\nparameters: {lr: [1]}\n", "line 1, job: jobs.py has no function other"),
        ("job: jobs.py:make_job\nparameters:\n  lr: [1]\n  rl: [1]\n", "line 4, parameters.rl: jobs.py:make_job takes"),
        ("job: jobs.py:make_job\nparameters:\n  batch: [1]\n", "line 2, parameters: jobs.py:make_job cannot be called"),
        ("job: jobs.py:make_job\nsearch: list\njobs:\n- lr: 1\n- lr: 2\n  x: 1\n", "line 6, jobs[1].x: jobs.py:make"),
        ("job: jobs.py:make_bad\nparameters: {lr: [1]}\n", "make_bad(lr=1) failed: KeyError: 'no such data'"),
        ("job: jobs.py:make_nothing\nparameters: {lr: [1]}\n", "returns a penstock.fleet.Job, not int"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_function_is_told(written, text, words):
    result = penstock("run", written(text))
    assert result.exit_code == 1
    assert words in said(result)
    assert "Traceback" not in result.output


# Running


def test_a_sweep_runs_and_goes_on(written, tmp_path):
    sweep, run_dir = written(GRID), tmp_path / "run"
    result = penstock("run", sweep, "--run-dir", run_dir)
    assert result.exit_code == 0, result.output
    assert "line lr=0.01" in result.stdout and "done" in result.stdout
    again = penstock("run", sweep, "--run-dir", run_dir)
    assert again.exit_code == 1
    assert "--resume goes on with it" in said(again)

    report = json.loads(penstock("run", sweep, "--run-dir", run_dir, "--resume", "--json").stdout)
    assert [job["state"] for job in report["jobs"]] == ["done", "done"]
    assert [job["parameters"] for job in report["jobs"]] == [{"lr": 0.01}, {"lr": 0.1}]
    assert all(job["num_steps"] == 3 and Path(job["checkpoint"]).is_dir() for job in report["jobs"])
    assert report["devices"][0]["budget_bytes"] == 4 * 2**20
    (part,) = parts_of_folder(run_dir)
    assert part.section.headline.budget_bytes == 4 * 2**20
    assert any("written to disk" in table.columns for table in part.section.tables)

    shown = penstock("ps", run_dir)
    assert shown.exit_code == 0
    assert "No process runs this fleet now." in said(shown)
    known = json.loads(penstock("ps", run_dir, "--json").stdout)
    assert not known["is_running"]
    assert [(row["name"], row["step"], row["tags"]) for row in known["jobs"]] == [
        ("line lr=0.01", 3, {"lr": 0.01}),
        ("line lr=0.1", 3, {"lr": 0.1}),
    ]
    refused = penstock("pause", run_dir, "line lr=0.1")
    assert refused.exit_code == 1
    assert "no process runs the fleet in" in said(refused)

    with (run_dir / "units.jsonl").open("a") as file:
        file.write('{"job": "torn')  # a process that was killed in mid-line
    drawn = penstock("draw", run_dir, "--to", tmp_path / "pictures")
    assert drawn.exit_code == 0, drawn.output
    trace = json.loads((tmp_path / "pictures" / "units.trace.json").read_text())["traceEvents"]
    units = [event for event in trace if event["ph"] == "X" and event["cat"] != "stall"]
    assert len(units) == len((run_dir / "units.jsonl").read_text().splitlines()) - 1
    assert all((tmp_path / "pictures" / name).stat().st_size > 5000 for name in ("units.png", "losses.png"))
    nothing = penstock("draw", tmp_path)
    assert nothing.exit_code == 1
    assert "holds no units of a fleet" in said(nothing)

    other = "job: jobs.py:make_job\nsearch: list\njobs: [{lr: 1, name: line lr=0.1}]\n"
    changed = penstock("run", written(other + FLEET), "--run-dir", run_dir, "--resume")
    assert changed.exit_code == 1
    assert "was begun with {'lr': 0.1} and is now to have {'lr': 1, 'name': 'line lr=0.1'}" in said(changed)


def test_a_job_that_fails_is_exit_code_1_and_the_others_go_on(written):
    text = GRID.replace("make_job", "make_failing").replace("1e-1]", "1e-1], fails: [true, false]")
    result = penstock("run", written(text.replace("1e-2, ", "")), "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [job["state"] for job in report["jobs"]] == ["failed", "done"]
    assert "the data are gone" in report["jobs"][0]["error"]
    assert report["run_dir"] is None and report["jobs"][1]["checkpoint"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(written, tmp_path, monkeypatch, number):
    def interrupted(*_, **__):
        signal.raise_signal(number)

    monkeypatch.setattr(_fleet, "train", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        kept = penstock("run", written(GRID), "--run-dir", tmp_path / "run")
        lost = penstock("run", written(GRID), "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert kept.exit_code == lost.exit_code == 130
    assert "--resume goes on" in said(kept)
    assert "nothing was kept" in json.loads(lost.stdout)["error"]["message"]


@pytest.mark.parametrize(
    "options, words, exit_code",
    [
        (["--budget", "much"], "--budget: 'much' is not a size", 2),
        (["--devices", "cpu,tpu"], "--devices: a device is cpu or cuda:0, not 'tpu'", 2),
        (["--resume"], "say which: --run-dir runs/1", 2),
        (["--disk", "/no/such/directory"], "/no/such/directory", 1),
    ],
)
def test_options_that_cannot_work_are_one_paragraph(written, options, words, exit_code):
    result = penstock("run", written(GRID), *options)
    assert result.exit_code == exit_code
    assert words in said(result)
    assert "Traceback" not in result.output


# Commands to a fleet that runs elsewhere


class Elsewhere:
    """A fleet whose jobs only end when told to; it runs on another thread, and speaks through the database only."""

    def __init__(self, file, settings):
        self.run_dir, self.found = Path(settings.run_dir), []
        self.thread = threading.Thread(target=self._train, args=(file, settings), daemon=True)
        self.thread.start()
        eventually(lambda: FleetState(self.run_dir).exists and {"line lr=0.1", "line lr=0.01"} <= set(self.rows()))

    def _train(self, file, settings):
        self.found.append(_fleet.train(file, settings, progress=None))

    def rows(self):
        result = penstock("ps", self.run_dir, "--json")
        jobs = json.loads(result.stdout)["jobs"] if result.exit_code == 0 else []  # it may just be making its tables
        return {row["name"]: row for row in jobs}

    def wait_for(self, name, state, step=0):
        def is_so():
            row = self.rows().get(name)
            return row is not None and row["state"] == state and row["step"] >= step

        eventually(is_so)

    def end(self):
        """Whatever a test left running would compute beside those after it."""
        if self.thread.is_alive():
            for name in self.rows():
                penstock("stop", self.run_dir, name)
            self.thread.join(PATIENCE_S)


@pytest.fixture
def elsewhere():
    fleets = []

    def start(*arguments):
        fleets.append(Elsewhere(*arguments))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.end()


def test_commands_reach_a_fleet_that_runs(written, tmp_path, elsewhere):
    text = GRID.replace("1e-1]", "1e-1], steps: [1000000]")
    # by measured times, the longest first, a job that was fast when it was measured might not begin for minutes
    text = text.replace("64MiB}", "64MiB, checkpoint_every: 20, scheduler: random}")
    text = text.replace("make_job", "make_named")
    with (tmp_path / "jobs.py").open("a") as factory:
        factory.write("\ndef make_named(lr, steps): return make_job(lr, 4, steps, f'line lr={lr}')\n")
    file = read_sweep(written(text))
    run_dir = tmp_path / "run"
    fleet = elsewhere(file, file.sweep.fleet.overridden(run_dir=str(run_dir)))
    fleet.wait_for("line lr=0.01", "running", 21)

    told = json.loads(works("pause", run_dir, "line lr=0.01", "--json").stdout)
    assert told == {"run_dir": str(run_dir), "verb": "pause", "job": "line lr=0.01"}
    fleet.wait_for("line lr=0.01", "paused")
    works("resume", run_dir, "line lr=0.01")
    fleet.wait_for("line lr=0.01", "running")
    result = works("clone", run_dir, "line lr=0.01", "clone", "--set", "lr=3e-2", "--warm")
    assert "clone was added" in result.output
    fleet.wait_for("clone", "running", 1)
    assert fleet.rows()["clone"]["source"]["parameters"] == {"lr": 0.03, "steps": 1000000}

    for arguments, words in [
        (("clone", run_dir, "clone", "line lr=0.1"), "there is a job named"),
        (("clone", run_dir, "clone", "other", "--set", "rate=1"), "make_named takes lr, steps, not rate"),
        (("stop", run_dir, "nobody"), "there is no job named 'nobody'"),
        (("run", file.document.path, "--run-dir", run_dir, "--resume"), "a process is running the fleet"),
    ]:
        refused = penstock(*arguments)
        assert refused.exit_code == 1
        assert words in said(refused)

    misuse = penstock("clone", run_dir, "clone", "other", "--set", "lr")
    assert misuse.exit_code == 2
    assert "--set lr: give a parameter and its value" in said(misuse)

    for name in ("line lr=0.1", "line lr=0.01", "clone"):
        works("stop", run_dir, name)
    fleet.thread.join(PATIENCE_S)
    assert [result.state.value for result in fleet.found[0].results.values()] == ["stopped"] * 3
    assert not fleet.found[0].has_failed

    report = json.loads(penstock("run", file.document.path, "--run-dir", run_dir, "--resume", "--json").stdout)
    assert {job["name"]: job["state"] for job in report["jobs"]}["clone"] == "stopped"
    assert all(job["num_steps"] > 0 for job in report["jobs"])


def running_state(run_dir):
    run_dir.mkdir()
    state = FleetState(run_dir)
    state.create()
    return state


def test_a_command_without_an_answer_is_taken_back(tmp_path):
    state = running_state(tmp_path / "run")
    with pytest.raises(PenstockError, match="no answer after"):
        _fleet.ask(tmp_path / "run", "pause", "a", timeout_s=0.1)
    assert state.commands() == []


def test_a_fleet_that_ends_meanwhile_is_not_waited_for(tmp_path, monkeypatch):
    state = running_state(tmp_path / "run")

    def ends(self, number, timeout_s):
        state.say_ended()

    monkeypatch.setattr(FleetState, "answer_to", ends)
    with pytest.raises(PenstockError, match="the fleet ended before it could answer"):
        _fleet.ask(tmp_path / "run", "pause", "a")
    assert state.commands() == []


def test_a_folder_without_a_fleet_is_said_and_left_alone(tmp_path):
    for arguments in (("ps", tmp_path), ("stop", tmp_path, "a"), ("clone", tmp_path, "a", "b")):
        result = penstock(*arguments)
        assert result.exit_code == 1
        assert "no fleet was ever run in" in said(result)
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_another_function_are_left_as_they_are(written, tmp_path):
    run_dir = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert penstock("run", written(GRID), "--run-dir", run_dir).exit_code == 0
    with pytest.warns(PenstockWarning, match=r"was not made by .*make_failing"):
        other = GRID.replace("make_job", "make_failing").replace("[1e-2, 1e-1]", "[1], fails: [false]")
        assert penstock("run", written(other), "--run-dir", run_dir, "--resume").exit_code == 0


# Simulating

PROBLEM = """
jobs:
- name: gpt
  copies: 3
  num_steps: 4
  shards:
  - {copies: 2, forward_s: 0.1, backward_s: 2e-1, parameter_bytes: 400MB, boundary_bytes: 8e6}
- {name: small, num_steps: 2, arrival_s: 1, shards: [{forward_s: 0.1, backward_s: 0.1, recomputes: true}]}
devices:
- {name: cuda, copies: 2, budget_bytes: 2GiB, in_bandwidth_bytes_per_s: 8GB/s}
"""


def test_simulate_compares_schedulers(written, tmp_path):
    path = written(PROBLEM, "problem.yaml")
    result = penstock("simulate", path, "--gantt", tmp_path / "gantt.png")
    assert result.exit_code == 0, result.output
    for words in ("sharded-lrtf", "random", "lower bound", "4 jobs of 38 units in all, 2 devices"):
        assert words in said(result)
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")

    report = json.loads(penstock("simulate", path, "--json").stdout)
    assert set(report["schedulers"]) == set(get_args(SchedulerName))
    for scheduler in report["schedulers"].values():
        assert scheduler["makespan_s"] >= report["lower_bound_s"] > 0
        assert 0 < scheduler["busy_share"] <= 1
        assert set(scheduler["devices"]) == {"cuda:0", "cuda:1"}
        assert set(scheduler["job_end_s"]) == {"gpt 0", "gpt 1", "gpt 2", "small"}
    assert report["model_parallel_s"] == pytest.approx(3 * 4 * 2 * 0.3 + 2 * 0.2)


@pytest.mark.parametrize(
    "old, new, words, exit_code",
    [
        ("400MB", "lots", "line 7, jobs[0].shards[0].parameter_bytes: 'lots' is not a size", 1),
        ("8GB/s", "0", "line 10, devices[0].in_bandwidth_bytes_per_s: input should be greater than 0", 1),
        ("forward_s: 0.1, b", "b", "line 7, jobs[0].shards[0]: forward_s is missing", 1),
        ("num_steps: 4", "steps: 4", "there are name, copies, num_steps", 1),
        ("name: small", "name: gpt", "two are called 'gpt'", 1),
        ("2GiB", "2MiB", "jobs: no device is large enough for job 'gpt 0'", 3),
    ],
)
def test_simulate_names_what_is_wrong(written, old, new, words, exit_code):
    result = penstock("simulate", written(PROBLEM.replace(old, new), "problem.yaml"))
    assert result.exit_code == exit_code
    assert words in said(result)
    assert "Traceback" not in result.output


def test_simulate_knows_its_schedulers(written):
    result = penstock("simulate", written(PROBLEM, "problem.yaml"), "--scheduler", "best")
    assert result.exit_code == 2
    assert "'sharded-lrtf'" in said(result)
    assert [scheduler.value for scheduler in Scheduler] == list(get_args(SchedulerName))


def test_the_example_runs():
    result = penstock("run", EXAMPLES / "sweep.yaml", "--json")
    assert result.exit_code == 0, result.output
    assert [job["state"] for job in json.loads(result.stdout)["jobs"]] == ["done"] * 4
