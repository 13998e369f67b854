"""What device threads of a node on Ray leave for the driver, without Ray."""

import threading

import pytest

from penstock import fleet
from penstock.fleet import JobState
from penstock.integrations._ray_outbox import Ending, Outbox


@pytest.fixture
def job():
    return fleet.Job(name="a", model=int, data=list, loss=lambda *_: None, optimizer=lambda _: None, steps=9)


def result_of(job, state):
    return fleet.JobResult(
        job=job, state=state, losses=(1.0, 0.5), validations=(), error=None, seconds_per_step=0.1, checkpoint=None
    )


def test_news_is_taken_once(job):
    outbox = Outbox()
    outbox.log(job, 1, {"loss": 1.0})
    outbox.fail("b", "ValueError: no such class")
    outbox.wait({}, timeout_s=60.0)  # returns at once, since there is news
    assert outbox.take_logged() == ((("a", 1, {"loss": 1.0}),), ())
    assert outbox.take_endings() == (Ending(name="b", state=JobState.FAILED, error="ValueError: no such class"),)
    assert outbox.take_logged() == ((), ())
    assert outbox.take_endings() == ()


def test_a_job_that_stops_was_released_unless_the_user_stopped_it(job):
    outbox = Outbox()
    outbox.release("a")
    outbox.note_ending("a", result_of(job, JobState.STOPPED))
    outbox.release("a")
    outbox.keep("a")
    outbox.note_ending("a", result_of(job, JobState.STOPPED))
    outbox.release("a")
    outbox.note_ending("a", result_of(job, JobState.DONE))  # it was over before it could leave
    outbox.note_ending("a", result_of(job, JobState.STOPPED))  # nobody has released it since
    endings = outbox.take_endings()
    assert [ending.state for ending in endings] == [None, JobState.STOPPED, JobState.DONE, JobState.STOPPED]
    assert endings[0].losses == (1.0, 0.5)


@pytest.mark.parametrize("verdict", [True, False, "KeyError: 'loss'"])
def test_a_device_thread_waits_for_the_verdict(job, verdict):
    outbox, verdicts = Outbox(), []

    def ask():
        try:
            verdicts.append(outbox.stops(job, 2, {"loss": 0.5}))
        except RuntimeError as error:
            verdicts.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    outbox.wait({}, timeout_s=60.0)
    assert outbox.take_logged() == ((), (("a", 2, {"loss": 0.5}),))
    outbox.wait({("a", 2): verdict}, timeout_s=0.0)
    thread.join()
    assert verdicts == [verdict if isinstance(verdict, bool) else f"the stopper failed: {verdict}"]


def test_a_node_that_closes_lets_nobody_wait(job):
    outbox, verdicts = Outbox(), []
    thread = threading.Thread(target=lambda: verdicts.append(outbox.stops(job, 2, {"loss": 0.5})))
    thread.start()
    outbox.close_down()
    thread.join()
    outbox.wait({}, timeout_s=60.0)
    outbox.wait({}, timeout_s=60.0)
    assert verdicts == [False]
