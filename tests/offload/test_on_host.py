"""The order in which the host updates parameters. That it updates them right is in tests/device."""

from dataclasses import dataclass, field

import pytest

from penstock.offload._on_host import HostUpdates


@dataclass(eq=False)
class Update:
    name: str
    ran: list = field(repr=False)

    def run(self, optimizer):
        del optimizer
        self.ran.append(self.name)


@pytest.mark.parametrize(("last_first", "expected"), [(True, "bdca"), (False, "bacd")])
def test_what_is_wanted_comes_first_then_what_forward_wants_first(last_first, expected):
    own, ran = HostUpdates(None, None, None, last_first=last_first), []
    updates = {name: Update(name, ran) for name in "abcd"}
    for one in updates.values():
        own._put(one, is_first=last_first)
    own._hurry(updates["b"])
    own._is_ending = True
    own._run()
    assert "".join(ran) == expected
    assert own.num_updates == 4
