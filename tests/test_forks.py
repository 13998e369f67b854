"""What is renewed in a forked child, and in which order."""

import gc
import os
import weakref

import pytest

from penstock.forks import renewed_in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Log:
    """An object that says in a file that it was renewed."""

    def __init__(self, name, descriptor):
        self.name, self.descriptor = name, descriptor

    def renew(self):
        os.write(self.descriptor, self.name.encode())


def fork():
    """A child that ends at once."""
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_renews_what_is_alive_in_the_order_of_the_sets():
    reading, writing = os.pipe()
    first, second = renewed_in_child(Log.renew), renewed_in_child(Log.renew)
    logs = [Log(name, writing) for name in "abc"]
    second.add(logs[0])
    first.add(logs[1])
    first.add(logs[2])
    gone = weakref.ref(logs.pop())
    gc.collect()
    assert gone() is None  # the set keeps nothing alive
    fork()
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"ba"  # in the child alone, and the first set first
    logs.clear()
