"""Fleets: jobs that come while others train, and how a fleet begins and ends."""

import sys
from unittest import mock

import pytest
import torch
from fleet_jobs import gpt_job

from penstock import fleet
from penstock.tiers import Budget

OPTIONS = {"budget": "64MiB", "host": "64MiB", "progress": None}


def job_of(name):
    return fleet.Job(
        name=name,
        model=lambda: torch.nn.Linear(2, 1),
        data=lambda: [torch.ones(4, 2)],
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=3,
    )


@pytest.mark.usefixtures("one_thread")
def test_a_fleet_waits_while_more_jobs_may_come():
    """Every job is over before the next is there, and no device has gone home."""
    states = []

    with fleet.Fleet(["cpu", "cpu"], **OPTIONS) as running:

        def more():
            rows = running.rows()
            if all(row.state == "done" for row in rows):
                states.append(len(rows))
                if len(rows) < 4:
                    running.add(job_of(f"job {len(rows)}"))
            return len(states) < 7

        results = running.wait(more)
    assert list(results) == ["job 0", "job 1", "job 2", "job 3"]
    assert states[:6] == [0, 1, 2, 3, 4, 4] and set(states[6:]) == {4}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("at_call", [1, 3])
def test_what_more_raises_ends_the_fleet(at_call):
    calls = []

    def more():
        calls.append(1)
        if len(calls) == at_call:
            raise KeyError("a fault of the caller's")
        return True

    with fleet.Fleet(["cpu"], **OPTIONS) as running:
        running.add(job_of("a"))
        with pytest.raises(KeyError, match="a fault"):
            running.wait(more)
    assert len(calls) == at_call


def test_a_fleet_that_cannot_begin_takes_nothing(tmp_path, monkeypatch):
    account, interval_s = Budget(device="64MiB", host="64MiB"), sys.getswitchinterval()
    monkeypatch.setattr(fleet.FleetState, "create", mock.Mock(side_effect=KeyboardInterrupt))
    running = fleet.Fleet([fleet.Device(name="cpu", threads=1)], account, progress=None)
    with pytest.raises(KeyboardInterrupt), running:
        pass
    assert not any(use.held_bytes for use in account.uses())
    assert sys.getswitchinterval() == interval_s


def test_a_fleet_is_used_while_it_is_entered_and_once():
    running = fleet.Fleet(["cpu"], "8MiB", host="64MiB", progress=None)
    for misuse in (lambda: running.add(gpt_job("early")), running.wait):
        with pytest.raises(ValueError, match="must be entered before"):
            misuse()
    with running:
        running.add(gpt_job("one", steps=1))
        assert running.wait()["one"].error is None
        with pytest.raises(ValueError, match=r"wait\(\) was already called"):
            running.wait()
    with pytest.raises(ValueError, match="must be entered before"):
        running.add(gpt_job("late"))
    with pytest.raises(ValueError, match="entered only once"), running:
        pass


@pytest.mark.usefixtures("one_thread")
def test_the_limit_of_host_memory_is_still_known_by_its_earlier_name():
    with pytest.warns(DeprecationWarning, match="`host_budget` is now called `host`") as caught:
        fleet.run([job_of("a")], ["cpu"], "64MiB", host_budget="64MiB", progress=None)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="`host_budget`"):
        assert fleet.Fleet(["cpu"], "64MiB", host_budget="32MiB").host_bytes == 32 * 2**20
