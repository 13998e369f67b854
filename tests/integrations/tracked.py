"""Jobs for the tests of trackers."""

import torch

from penstock import fleet

OPTIONS = {"budget": "64MiB", "host": "64MiB", "progress": None}


X = torch.linspace(-1, 1, 16).reshape(8, 2)


Y = X @ torch.tensor([[2.0], [-1.0]])


def job_of(name, **changes):
    return fleet.Job(
        name=name,
        model=lambda: torch.nn.Linear(2, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **{
            "data": lambda: [(X, Y)],
            "loss": lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
            "steps": 10,
            "validation": lambda: [(X, Y)],
            "evaluate_every": 5,
            "tags": {"lr": 0.1, "a|b": "c\nd"},
            **changes,
        },
    )


def data_that_breaks():
    yield X, Y
    yield X, Y
    raise OSError("the disk is gone")


def jobs():
    """One that ends, one that is stopped, one that fails in training, and one that fails before it."""
    return [
        job_of("done"),
        job_of("stopped"),
        job_of("failed", data=data_that_breaks),
        job_of("never begun", data=lambda: 1 / 0, tags={}),
    ]


def run(tracker):
    return fleet.run(
        jobs(), ["cpu", "cpu"], stopper=lambda job, *_: job.name == "stopped", trackers=[tracker], **OPTIONS
    )
