"""Lanes: order, bounds, failures and forks, with pieces that wait for the test."""

import gc
import os
import threading
import weakref

import pytest

from penstock.errors import ForkedProcessError
from penstock.tiers._lane import Lane
from waiting import eventually

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


class Gate:
    """A piece that says when it was begun, and ends when it is let through."""

    def __init__(self):
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        self.opened.wait()


@pytest.fixture
def make():
    """Makes lanes; opens the gates that are still shut and closes the lanes at the end."""
    lanes, gates = [], []

    def make(*, num_threads=1, max_in_flight_bytes=10):
        lanes.append(Lane("there", num_threads=num_threads, max_in_flight_bytes=max_in_flight_bytes))
        return lanes[-1]

    def gate():
        gates.append(Gate())
        return gates[-1]

    make.gate = gate
    yield make
    for gate in gates:
        gate.opened.set()
    for lane in lanes:
        lane.close()


def submit(lane, pieces, *, size_bytes=1, label="", done=None):
    """Queues ``pieces``; the finished jobs are appended to ``done``."""
    return lane.submit(pieces, size_bytes=size_bytes, label=label, on_done=[].append if done is None else done.append)


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def waiters(lane):
    return len(lane._condition._waiters)


def test_a_job_is_done_when_all_its_pieces_are(make):
    lane, done, seen = make(num_threads=3), [], []
    job = submit(lane, [lambda number=number: seen.append(number) for number in range(20)], label="a", done=done)
    job.wait()
    assert job.is_finished
    assert job.wait() == 0.0
    assert sorted(seen) == list(range(20))
    assert done == [job]
    assert (job.label, job.error) == ("a", None)
    assert job.start_s > 0


def test_on_done_comes_before_the_end(make):
    """Whoever waited for a job finds all that its end changes."""
    lane, gate = make(), make.gate()
    job = lane.submit([lambda: None], size_bytes=1, label="", on_done=lambda _: gate())
    gate.begun.wait()
    assert not job.is_finished
    gate.opened.set()
    job.wait()
    assert job.is_finished


@pytest.mark.parametrize("num_threads", [1, 4])
def test_pieces_start_in_the_order_of_their_jobs(make, num_threads):
    """Every thread takes the next piece under one lock, so the order in which they are taken is that of submission."""
    lane, taken, gate = make(num_threads=num_threads), [], make.gate()
    real = lane._next_piece

    def next_piece():
        item = real()
        if item is not None:
            taken.append(item[0].label)
        return item

    lane._next_piece = next_piece
    submit(lane, [gate] * num_threads)
    gate.begun.wait()
    jobs = [submit(lane, [lambda: None] * (1 + number % 3), label=number) for number in range(30)]
    gate.opened.set()
    for job in jobs:
        job.wait()
    assert taken[num_threads:] == [number for number in range(30) for _ in range(1 + number % 3)]


def test_one_thread_runs_jobs_one_after_another(make):
    lane, seen = make(), []
    jobs = [submit(lane, [lambda number=number: seen.append(number)] * 2) for number in range(20)]
    for job in jobs:
        job.wait()
    assert seen == [number for number in range(20) for _ in range(2)]


def test_pieces_of_a_job_run_side_by_side(make):
    lane, barrier = make(num_threads=3), threading.Barrier(3)
    job = submit(lane, [lambda: barrier.wait(600)] * 3)
    job.wait()
    assert job.error is None


def test_waiting_for_room(make):
    lane, first, second, order = make(), make.gate(), make.gate(), []
    assert lane.wait_for_room(6) == 0.0
    submit(lane, [first], size_bytes=6)
    assert lane.wait_for_room(4) == 0.0
    submit(lane, [second], size_bytes=4)
    waits = []

    def ask():
        waits.append(lane.wait_for_room(5))
        order.append("room")

    thread = in_thread(ask)
    eventually(lambda: waiters(lane) == 1)  # the lane's only thread is busy, so this is the one that asks
    order.append("opened")
    first.opened.set()
    thread.join()
    assert order == ["opened", "room"]
    assert waits[0] > 0
    assert lane.in_flight_bytes == 4


def test_bytes_in_flight_stay_bounded(make):
    lane, largest = make(num_threads=2, max_in_flight_bytes=10), []

    def look():
        largest.append(lane.in_flight_bytes)

    for size_bytes in [3, 7, 5, 5, 1, 9, 10, 2, 8, 4] * 5:
        lane.wait_for_room(size_bytes)
        submit(lane, [look, look], size_bytes=size_bytes)
    lane.drain()
    assert max(largest) <= lane.in_flight.peak_bytes <= 10
    assert lane.in_flight_bytes == 0
    assert lane.in_flight.finished_bytes == 54 * 5


def test_a_job_above_the_bound_goes_in_alone(make):
    lane, gate = make(max_in_flight_bytes=10), make.gate()
    submit(lane, [gate], size_bytes=1)
    order = []

    def ask():
        lane.wait_for_room(11)
        order.append("room")

    thread = in_thread(ask)
    eventually(lambda: waiters(lane) == 1)
    order.append("opened")
    gate.opened.set()
    thread.join()
    assert order == ["opened", "room"]
    job = submit(lane, [lambda: None], size_bytes=11)
    job.wait()
    assert lane.in_flight.peak_bytes == 11


def test_closing_ends_a_wait_for_room(make):
    lane, gate = make(), make.gate()
    submit(lane, [gate], size_bytes=10)
    thread = in_thread(lambda: lane.wait_for_room(1))
    eventually(lambda: waiters(lane) == 1)
    closer = in_thread(lane.close)
    thread.join()
    gate.opened.set()
    closer.join()


def test_cancelling_what_has_not_begun(make):
    lane, gate, done, seen = make(), make.gate(), [], []
    running = submit(lane, [gate], size_bytes=1, done=done)
    gate.begun.wait()
    cancelled = submit(lane, [lambda: seen.append("cancelled")], size_bytes=2, done=done)
    kept = submit(lane, [lambda: seen.append("kept")], size_bytes=4, done=done)
    assert lane.in_flight_bytes == 7
    assert lane.cancel(cancelled)
    assert cancelled.is_finished
    assert lane.in_flight_bytes == 5
    assert not lane.cancel(cancelled)
    assert not lane.cancel(running)
    gate.opened.set()
    kept.wait()
    assert seen == ["kept"]
    assert done == [running, kept]
    assert not lane.cancel(kept)
    assert lane.in_flight.finished_bytes == 5


def test_cancelling_makes_room(make):
    lane, gate = make(), make.gate()
    submit(lane, [gate], size_bytes=4)
    gate.begun.wait()
    job = submit(lane, [lambda: None], size_bytes=6)
    thread = in_thread(lambda: lane.wait_for_room(5))
    eventually(lambda: waiters(lane) == 1)
    assert lane.cancel(job)
    thread.join()


def test_a_job_with_a_piece_begun_is_not_cancelled(make):
    lane, gate, seen = make(), make.gate(), []
    job = submit(lane, [gate, lambda: seen.append(1)])
    gate.begun.wait()
    assert not lane.cancel(job)
    gate.opened.set()
    job.wait()
    assert seen == [1]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_drops_the_rest_of_its_job_alone(make, num_threads):
    lane, done, seen, gate = make(num_threads=num_threads), [], [], make.gate()

    def fail():
        raise OSError("broken")

    blockers = [submit(lane, [gate]) for _ in range(num_threads - 1)]
    for _ in blockers:
        gate.begun.wait()
    failing = submit(lane, [fail, lambda: seen.append("dropped"), lambda: seen.append("dropped")], done=done)
    after = submit(lane, [lambda: seen.append("after")], done=done)
    gate.opened.set()
    lane.drain()
    assert str(failing.error) == "broken"
    assert after.error is None
    assert "after" in seen
    assert num_threads > 1 or seen == ["after"]
    assert sorted(done, key=id) == sorted([failing, after], key=id)
    assert lane.in_flight_bytes == 0


def test_a_job_with_several_errors_ends_once_with_the_first(make):
    lane, done, barrier = make(num_threads=3), [], threading.Barrier(3)

    def fail():
        barrier.wait(600)
        raise OSError("broken")

    job = submit(lane, [fail] * 3 + [lambda: None] * 5, done=done)
    job.wait()
    lane.drain()
    assert done == [job]
    assert str(job.error) == "broken"


def test_drain_waits_for_all(make):
    lane, gate, seen = make(num_threads=2), make.gate(), []
    submit(lane, [gate, gate])
    submit(lane, [lambda: seen.append("ran")])
    thread = in_thread(lambda: (lane.drain(), seen.append("drained")))
    gate.begun.wait()
    eventually(lambda: waiters(lane) >= 1)
    gate.opened.set()
    thread.join()
    assert seen == ["ran", "drained"]


def test_draining_an_idle_lane_returns(make):
    make().drain()


def test_closing_finishes_what_is_queued(make):
    lane, seen = make(), []
    jobs = [submit(lane, [lambda number=number: seen.append(number)]) for number in range(10)]
    lane.close()
    lane.close()
    assert seen == list(range(10))
    assert all(job.is_finished for job in jobs)
    with pytest.raises(ValueError, match="'there' is closed"):
        submit(lane, [lambda: None])
    with pytest.raises(ValueError, match="'there' is closed"):
        lane.wait_for_room(1)


def test_threads_begin_with_the_first_job_and_end_with_the_lane(make):
    lane = make(num_threads=3)
    assert lane._threads == []
    submit(lane, [lambda: None]).wait()
    threads = list(lane._threads)
    assert len(threads) == 3
    lane.close()
    assert not any(thread.is_alive() for thread in threads)


def test_the_rate_is_that_of_the_busy_time(make, monkeypatch):
    """By a clock that ticks only when told to."""
    now = [100.0]
    monkeypatch.setattr("penstock.tiers._lane.time.perf_counter", lambda: now[0])
    lane = make()
    assert lane.rate_bytes_per_s() is None
    for size_bytes, busy_s in ((6, 2.0), (9, 3.0)):
        gate = make.gate()
        job = submit(lane, [gate], size_bytes=size_bytes)
        gate.begun.wait()
        now[0] += busy_s
        gate.opened.set()
        job.wait()
        now[0] += 50.0  # idle
    assert lane.rate_bytes_per_s() == pytest.approx(3.0)


def child_of(function):
    """Exit status of a forked child that runs ``function``: 0 if it returned ``True``."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if function() is True else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refuses(lane):
    for call in (lambda: submit(lane, [lambda: None]), lambda: lane.wait_for_room(1)):
        try:
            call()
        except ForkedProcessError as error:
            if "parent process" not in str(error):
                return False
        else:
            return False
    lane.drain()
    lane.close()
    return True


def test_a_forked_child_refuses_and_the_parent_goes_on(make):
    lane, seen = make(num_threads=2), []
    submit(lane, [lambda: seen.append(1)]).wait()
    assert child_of(lambda: refuses(lane)) == 0
    submit(lane, [lambda: seen.append(2)]).wait()
    assert seen == [1, 2]


def test_a_child_may_have_lanes_of_its_own(make):
    submit(make(), [lambda: None]).wait()

    def works():
        lane, seen = Lane("own", num_threads=2, max_in_flight_bytes=10), []
        submit(lane, [lambda: seen.append(1)]).wait()
        lane.close()
        return seen == [1]

    assert child_of(works) == 0


def test_lanes_drain_before_a_fork(make):
    """No child ever inherits half a copy."""
    busy, idle, gate, seen = make(), make(), make.gate(), []
    submit(busy, [gate])
    submit(busy, [lambda: seen.append("queued")])
    gate.begun.wait()

    def open_when_the_fork_waits():
        eventually(lambda: waiters(busy) == 1)  # its only thread is in the gate, so this is the fork
        gate.opened.set()

    thread = in_thread(open_when_the_fork_waits)
    assert child_of(lambda: seen == ["queued"] and not busy.in_flight_bytes) == 0
    thread.join()
    assert refuses_nothing(busy)
    assert refuses_nothing(idle)


def refuses_nothing(lane):
    job = submit(lane, [lambda: None])
    job.wait()
    return job.is_finished


def test_threads_without_work_end_and_come_back(monkeypatch):
    """A lane that nobody closes leaves no thread behind, and dies."""
    monkeypatch.setattr("penstock.tiers._lane._IDLE_S", 0.05)
    lane, done = Lane("there", num_threads=2, max_in_flight_bytes=10), []
    for count in (1, 2):
        job = lane.submit([lambda: done.append(1)], size_bytes=1, label="", on_done=lambda _: None)
        job.wait()
        for thread in list(lane._threads):
            thread.join()
        assert lane._threads == []
        assert len(done) == count
    weak = weakref.ref(lane)
    del lane, job
    gc.collect()
    assert weak() is None


class Held:
    """Something that a job refers to."""

    def run(self):
        pass

    def end(self, job):
        pass


def test_a_job_that_has_ended_holds_nothing(make, monkeypatch):
    monkeypatch.setattr("penstock.tiers._lane._IDLE_S", 10_000)  # the thread does not let go by ending
    held = Held()
    weak = weakref.ref(held)
    lane = make()
    job = lane.submit([held.run], size_bytes=1, label="", on_done=held.end)
    del held
    job.wait()
    lane.drain()
    assert job.is_finished
    eventually(lambda: weak() is None)  # the thread is on its way to wait for the next


def test_stacks_of_other_threads_keep_their_size(make, monkeypatch):
    """The size is the process's: two lanes that set and reset it at once would leave it small."""
    sizes = []
    monkeypatch.setattr(threading, "stack_size", lambda *size: sizes.append(size))
    submit(make(), [lambda: None]).wait()
    assert not sizes
