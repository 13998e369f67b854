"""Jobs that come while others train."""

import pytest
import torch

from penstock import fleet

OPTIONS = {"budget": "64MiB", "host_budget": "64MiB", "progress": None}


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

    with fleet.Fleet(["cpu", "cpu"], **OPTIONS) as made:

        def more():
            rows = made.rows()
            if all(row.state == "done" for row in rows):
                states.append(len(rows))
                if len(rows) < 4:
                    made.add(job_of(f"job {len(rows)}"))
            return len(states) < 7

        found = made.wait(more)
    assert list(found) == ["job 0", "job 1", "job 2", "job 3"]
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

    with fleet.Fleet(["cpu"], **OPTIONS) as made:
        made.add(job_of("a"))
        with pytest.raises(KeyError, match="a fault"):
            made.wait(more)
    assert len(calls) == at_call
