"""Steps on the host: their order. That they are right is in tests/device."""

import threading
from dataclasses import dataclass, field

import pytest

from penstock.host_stepping import HostLane


@dataclass(eq=False)
class Step:
    name: str
    ran: list = field(repr=False)
    may_run: threading.Event = field(repr=False)

    def run(self):
        self.may_run.wait(60)
        self.ran.append(self.name)


@pytest.mark.parametrize(("last_first", "expected"), [(True, "bdca"), (False, "bacd")])
def test_what_is_wanted_comes_first_then_what_forward_wants_first(last_first, expected):
    lane, ran, may_run = HostLane(), [], threading.Event()
    lane.put(Step("-", ran, may_run), is_first=True)
    steps = {name: Step(name, ran, may_run) for name in "abcd"}
    while lane._queue:  # until the first one has begun, and waits
        may_run.wait(0.01)
    for one in steps.values():
        lane.put(one, is_first=last_first)
    lane.hurry(steps["b"])
    may_run.set()
    lane.close()
    assert "".join(ran) == "-" + expected
    assert lane.num_steps == 5
    lane.put(Step("e", ran, may_run), is_first=True)  # it starts again
    lane.close()
    assert ran[-1] == "e"
