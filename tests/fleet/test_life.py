"""A job's life: faults stay with their job, and whatever ends a process, resuming gives the same losses."""

import pytest
import torch
from fleet_jobs import batches, gpt_job, train, train_plainly
from torch import nn

from penstock import fleet
from penstock.fleet import JobState


def failing_at(number, error):
    def data():
        yield from batches(number)
        raise error

    return data


def with_nan_at(number):
    def loss(model, batch):
        return model(*batch[:2]) * batch[2]

    def data():
        return [
            (*batch, torch.tensor(float("nan") if index == number else 1.0)) for index, batch in enumerate(batches(8))
        ]

    return {"loss": loss, "data": data}


FAULTS = {
    "the data raises": ({"data": failing_at(3, OSError("the file is gone"))}, "the file is gone", 3),
    "the model raises": ({"model": lambda: 1 / 0}, "division by zero", 0),
    "no model": ({"model": lambda: 3}, "must return an nn.Module", 0),
    "no batches": ({"data": list}, "yields no batch", 0),
    "not a number": (with_nan_at(2), "the loss is nan at step 2", 2),
    "not a scalar": ({"loss": lambda model, batch: model.token(batch[0])}, "scalar", 0),
    "no optimizer": ({"optimizer": lambda parameters: None}, "torch.optim.AdamW", 0),
    "a stranger's parameters": (
        {"optimizer": lambda parameters: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)},
        "the model does not have",
        0,
    ),
    "L-BFGS": ({"optimizer": torch.optim.LBFGS}, "LBFGS needs a closure", 0),
    "a forward that cannot run": (
        {"loss": lambda model, batch: model(*batch, batch)},
        "its loss raises TypeError",
        0,
    ),
    "no loss": ({"loss": lambda model, batch: None}, "must return a tensor, got NoneType", 0),
    "a fleet inside": ({"data": lambda: fleet.run([gpt_job()], progress=None)}, "inside a job of another fleet", 0),
    "a stage that does not follow": ({"stages": lambda model: [model.token, model.token]}, "cannot follow", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stays_with_its_job(fault):
    changes, said, num_steps = FAULTS[fault]
    others = [gpt_job(f"{index}", seed=index, steps=4) for index in range(2)]
    results = train([others[0], gpt_job("hit", **changes), others[1]])
    assert results["hit"].state is JobState.FAILED
    assert said in results["hit"].error
    assert len(results["hit"].losses) == num_steps
    for job in others:
        assert list(results[job.name].losses) == train_plainly(job)[0]
    assert "hit: failed" in repr(results)
