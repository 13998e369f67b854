"""Fleets beside other fleets, profilers and processes."""

import contextlib
import itertools
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.fleet._state import FleetState

HERE = Path(__file__).parent
_SETUP = """
import threading
import torch
from fleet_jobs import gpt_job, train, train_plainly
from penstock import fleet
from test_uncut import Foreign, hooked, Words, sparse_job

torch.set_num_threads(1)

def check(job, result):
    assert result.error is None, result.error
    assert list(result.losses) == train_plainly(job)[0]
"""
_TWO_FLEETS = """
jobs = {number: [gpt_job(f"a{number}", seed=number), gpt_job(f"b{number}", optimizer=Foreign), sparse_job("functional")]
        for number in range(2)}
results = {}

def run(number):
    results[number] = train(jobs[number], budget="8MB")

threads = [threading.Thread(target=run, args=(number,)) for number in jobs]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for number in jobs:
    for job in jobs[number]:
        check(job, results[number][job.name])
"""
_PROFILERS = {
    "profiler": "torch.profiler.profile(profile_memory=True)",
    "autograd's": "torch.autograd.profiler.profile()",
    "record_function": "torch.autograd.profiler.record_function('mine')",
}
_INSIDE_PROFILER = """
jobs = [gpt_job("a"), gpt_job("b", optimizer=hooked), sparse_job("functional")]
with {profiler} as profile:
    results = train(jobs, budget="8MB")
for job in jobs:
    check(job, results[job.name])
with {profiler}:
    torch.ones(3).sum()
"""
_PROFILER_IN_A_LOSS = """
def loss(model, batch):
    with torch.autograd.profiler.record_function("mine"):
        return model(*batch)

def watched(model, batch):
    with torch.profiler.profile():
        return model(*batch)

several = [gpt_job("a", loss=loss), gpt_job("b", loss=loss, optimizer=hooked)]
for jobs in (several, [gpt_job("c", loss=watched, optimizer=hooked)]):
    results = train(jobs, budget="8MB")
    for job in jobs:
        check(job, results[job.name])
"""


def run_alone(code):
    """Run code in a process of its own, which may crash."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_SETUP) + code],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


def test_two_fleets_train_in_two_threads():
    run_alone(_TWO_FLEETS)


@pytest.mark.parametrize("profiler", _PROFILERS.values(), ids=_PROFILERS)
def test_a_fleet_trains_inside_of_a_profiler(profiler):
    run_alone(_INSIDE_PROFILER.format(profiler=profiler))


def test_a_loss_may_have_a_profiler_of_its_own():
    run_alone(_PROFILER_IN_A_LOSS)


def test_of_two_processes_that_start_together_one_trains(tmp_path):
    """Both find the folder empty before either enters its fleet."""
    code = _SETUP + textwrap.dedent(
        f"""
        from pathlib import Path
        import sys, time
        me, other = sys.argv[1:]
        running = fleet.Fleet(["cpu"], "8MB", host="64MiB", run_dir={str(tmp_path / "run")!r}, progress=None)
        folder = Path({str(tmp_path)!r})
        (folder / me).touch()
        while not (folder / other).exists():
            time.sleep(0.001)
        try:
            with running:
                (folder / f"{{me}} in").touch()
                while not (folder / f"{{other}} in").exists() and not (folder / f"{{other}} out").exists():
                    time.sleep(0.001)
        except ValueError as error:
            (folder / f"{{me}} out").touch()
            print(error)
        """
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, *names], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for names in (("a", "b"), ("b", "a"))
    ]
    outputs = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    said = sorted(output for output, _ in outputs)
    assert said[0] == ""
    assert "already holds a fleet" in said[1] or "a process is running the fleet" in said[1]


def test_another_process_at_the_wrong_moment_is_waited_for(tmp_path, monkeypatch):
    """SQLite refuses at once, without waiting, to change how a file is kept while another may write to it."""
    state, opened, num_opened = FleetState(tmp_path), FleetState._open, itertools.count(1)
    other = sqlite3.connect(tmp_path / "fleet.db", isolation_level=None)

    @contextlib.contextmanager
    def watched(self):
        number = next(num_opened)
        if number == 2:  # the folder is claimed, and its file not yet changed
            other.execute("BEGIN IMMEDIATE")
        if number == 3:
            other.rollback()
        with opened(self) as database:
            yield database

    monkeypatch.setattr(FleetState, "_open", watched)
    with contextlib.closing(other):
        state.create()
        assert next(num_opened) > 3  # it was refused once
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
