"""Steps of threads and models that are kept apart, and failed ones that are forgotten."""

import gc
import threading

import pytest
import torch
from breaking import batch, make
from torch import nn

from penstock import remat


def test_a_step_that_fails_is_forgotten():
    table = nn.Embedding(8, 16)
    step = remat.compile(lambda tokens: table(tokens).square().mean(), budget="1MiB")
    with pytest.raises(IndexError):
        step(torch.tensor([9]))
    for _ in range(2):
        step(torch.tensor([3])).backward()
    session = step.door.session
    assert not session._waiting
    assert len(session._step.calls) == 1


def test_two_models_of_one_class_have_a_session_each():
    options = {"budget": "64MiB"}
    x, steps = batch(), []
    for _ in range(2):
        model = make("plain", num_blocks=1)
        steps.append(torch.compile(model, backend="penstock", options=options))
        steps[-1](x).backward()
    del steps[0], model
    gc.collect()
    steps[0](x).backward()


def test_threads_that_share_a_step_each_have_their_own():
    model, x = make("plain", num_blocks=1), batch(8)
    step = remat.compile(model, budget="256MiB")
    step(x).backward()
    failed = []

    def run():
        try:
            for _ in range(5):
                torch.autograd.grad(step(x), model.head.weight)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert max(plan.num_graphs for plan in step.plans) == 1
