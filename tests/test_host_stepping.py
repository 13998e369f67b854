"""Steps on the host: their order. That they are right is in tests/device."""

import threading

import pytest

from penstock.host_stepping import HostLane, HostStep
from waiting import PATIENCE_S, eventually


class Step(HostStep):
    def __init__(self, name, ran, may_run):
        super().__init__()
        self.name, self.ran, self.may_run = name, ran, may_run

    def compute(self):
        self.may_run.wait(PATIENCE_S)
        self.ran.append(self.name)


@pytest.mark.parametrize(("last_first", "expected"), [(True, "bdca"), (False, "bacd")])
def test_what_is_wanted_comes_first_then_what_forward_wants_first(last_first, expected):
    lane, ran, may_run = HostLane(), [], threading.Event()
    lane.put(Step("-", ran, may_run), is_first=True)
    steps = {name: Step(name, ran, may_run) for name in "abcd"}
    eventually(lambda: not lane._queue)  # the first one has begun, and waits
    for step in steps.values():
        lane.put(step, is_first=last_first)
    lane.hurry(steps["b"])
    may_run.set()
    lane.close()
    assert "".join(ran) == "-" + expected
    assert lane.num_steps == 5
    lane.put(Step("e", ran, may_run), is_first=True)  # it starts again
    lane.close()
    assert ran[-1] == "e"


def test_an_error_is_kept_for_whoever_waits():
    class Fails(HostStep):
        def compute(self):
            raise OSError("no such instruction")

    lane, step = HostLane(), Fails()
    lane.put(step, is_first=True)
    step.wait()
    assert step.is_done and isinstance(step.error, OSError)
    lane.close()
