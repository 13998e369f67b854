"""Measured steps: until one keeps the budget, each in its thread, and none that keeps a model alive."""

import gc
import threading
import weakref

import torch
from breaking import batch, make
from torch import nn

from penstock import probe, remat


def test_an_eager_rest_is_measured_until_it_keeps_the_budget():
    x = batch(64)
    model = make("disabled", num_blocks=2)
    step = remat.compile(model, budget="512MiB")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(12):
        step(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    session = step._step.door.session
    assert session.beside.rest_bytes > 4 * x.nbytes
    assert set(session.planner.measured._nums.values()) == {0}
    assert not session.wants_to_be_measured
    assert not probe.ledger._recordings


def test_a_step_is_measured_in_its_thread():
    model, x = make("disabled", num_blocks=2), batch(64)
    step = remat.compile(model, budget="64MiB")
    for _ in range(2):
        step(x).backward()  # the second one is measured, and no optimizer ends it
    unrelated = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(unrelated.parameters(), lr=0.1)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert step._step.door._meter._open is not None
    with torch.no_grad():
        step(x)  # ends it, and is none
    assert step._step.door._meter._open is None


def test_a_step_that_is_being_measured_goes_with_its_model():
    model, x = make("disabled", num_blocks=2), batch(64)
    step = remat.compile(model, budget="64MiB")
    for _ in range(2):
        step(x).backward()
    assert len(probe.ledger._recordings) == 1
    held = weakref.ref(model)
    del step, model
    gc.collect()
    assert held() is None
    assert not probe.ledger._recordings
