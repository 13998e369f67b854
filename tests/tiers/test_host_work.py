"""What a stream is given is held back by the host's work, and stays in order."""

import threading

import pytest

from penstock.host_stepping import HostStep
from penstock.tiers._host_work import StreamQueue


class Work(HostStep):
    def compute(self):
        """Do nothing: only its end matters."""


def test_what_comes_after_something_held_back_waits_too():
    queue, given, first, second = StreamQueue(), [], Work(), Work()
    queue.put(lambda: given.append(1))
    queue.put(lambda: given.append(2), first)
    queue.put(lambda: given.append(3))
    queue.put(lambda: given.append(4), second)
    queue.put(lambda: given.append(5), first)
    assert given == [1]
    second.run()
    assert given == [1]
    first.run()
    assert given == [1, 2, 3, 4, 5]
    queue.put(lambda: given.append(6), first)
    assert given == [1, 2, 3, 4, 5, 6]


def test_an_error_goes_to_who_asked_for_it_and_the_rest_is_given():
    queue, given, work, errors = StreamQueue(), [], Work(), []

    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        queue.put(fail, None, errors.append)  # at once, so the caller gets it
    queue.put(fail, work, errors.append)
    queue.put(lambda: given.append(1))
    work.run()
    assert given == [1] and [str(error) for error in errors] == ["no memory"]


def test_draining_waits_for_the_work():
    queue, given, work = StreamQueue(), [], Work()
    queue.put(lambda: given.append(1), work)
    thread = threading.Timer(0.05, work.run)
    thread.start()
    queue.drain()
    assert given == [1]
    thread.join()


def test_work_that_ends_meanwhile_calls_at_once():
    work, called = Work(), []
    work.when_done(lambda: called.append(1))
    work.run()
    work.when_done(lambda: called.append(2))
    assert called == [1, 2]
