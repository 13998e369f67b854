"""Jobs that failed, that are given more to do, or that are given with other settings, in a folder that has them."""

import threading
import warnings

import pytest
import torch
from fleet_jobs import batches, gpt_job, train, train_plainly

from penstock import fleet
from penstock.errors import JobResumedWarning, JobRetriedWarning
from penstock.fleet import JobState


class Flaky:
    """Data that raise once they have yielded so many batches, as often as asked, like a file on a network."""

    def __init__(self, num_good, times=1):
        self.num_good, self.left = num_good, times

    def __iter__(self):
        for number, batch in enumerate(batches(count=8)):
            if number == self.num_good and self.left:
                self.left -= 1
                raise OSError("the server was away")
            yield batch


def good_job(name="good", **changes):
    return gpt_job(name, data=lambda: batches(count=8), **changes)


def uncut_job(data):
    """A job with an optimizer of nobody's, which runs in its own loop."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    return gpt_job("flaky", data=data, optimizer=lambda parameters: Own(parameters, lr=0.1))


def plain_losses(**changes):
    return tuple(train_plainly(good_job(**changes))[0])


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", JobResumedWarning)
        warnings.simplefilter("error", JobRetriedWarning)
        yield


def test_a_failed_job_is_left_alone_and_that_is_said(tmp_path):
    data = Flaky(5)
    first = train([gpt_job("flaky", data=lambda: data), good_job()], run_dir=tmp_path, checkpoint_every=2)
    assert first["flaky"].state is JobState.FAILED
    with pytest.warns(JobResumedWarning, match=r"1 jobs failed .*flaky.*resume='failed'"):
        again = train([gpt_job("flaky", data=lambda: data), good_job()], run_dir=tmp_path, resume=True)
    assert again["flaky"].state is JobState.FAILED
    assert "the server was away" in again["flaky"].error


@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_failed_job_goes_on_where_that_is_asked_for(tmp_path, quiet, checkpoint_every):
    data = Flaky(5)
    train([gpt_job("flaky", data=lambda: data)], run_dir=tmp_path, checkpoint_every=checkpoint_every)
    again = train([gpt_job("flaky", data=lambda: data)], run_dir=tmp_path, resume="failed")
    assert again["flaky"].state is JobState.DONE
    assert again["flaky"].error is None
    assert again["flaky"].losses == plain_losses()


@pytest.mark.parametrize(
    "make", [lambda data: gpt_job("flaky", data=lambda: data), lambda data: uncut_job(lambda: data)]
)
@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_job_is_tried_again_within_a_run(tmp_path, make, checkpoint_every):
    plain = tuple(train_plainly(make(Flaky(8)))[0])
    data, options = Flaky(5), {"checkpoint_every": checkpoint_every, "run_dir": tmp_path, "budget": "64MB"}
    where = "its checkpoint of step 00000004" if checkpoint_every else "the beginning"
    with pytest.warns(JobRetriedWarning, match=f"the server was away. It goes on from {where}; this is try 2 of 3"):
        results = train([make(data)], retry=2, **options)
    assert results["flaky"].state is JobState.DONE
    assert results["flaky"].losses == plain


def test_a_job_that_fails_too_often_fails_and_others_train_on(tmp_path):
    data = Flaky(5, times=3)
    with pytest.warns(JobRetriedWarning) as warned:
        results = train([gpt_job("flaky", data=lambda: data), good_job()], retry=2, run_dir=tmp_path)
    assert [str(each.message)[-13:] for each in warned] == ["is try 2 of 3", "is try 3 of 3"]
    assert results["flaky"].state is JobState.FAILED
    assert results["good"].losses == plain_losses()
    assert not data.left


def test_a_budget_that_is_too_small_is_not_tried_again(tmp_path, quiet):
    results = train([good_job()], budget="64KB", retry=2, run_dir=tmp_path)
    assert results["good"].state is JobState.FAILED
    assert "`budget` must be at least" in results["good"].error


@pytest.mark.parametrize(
    ("first", "then"), [({"steps": 3}, {"steps": 8}), ({"steps": None, "epochs": 1}, {"steps": None, "epochs": 2})]
)
def test_a_job_that_was_done_goes_on_to_more_epochs_or_steps(tmp_path, quiet, first, then):
    shorter = train([good_job(**first)], run_dir=tmp_path)["good"]
    assert shorter.state is JobState.DONE
    longer = train([good_job(**then)], run_dir=tmp_path, resume=True)["good"]
    assert longer.state is JobState.DONE
    assert len(longer.losses) > len(shorter.losses)
    assert longer.losses == plain_losses(**then)
    same = train([good_job(**then)], run_dir=tmp_path, resume=True)["good"]
    assert same.losses == longer.losses


CHANGES = {
    "lr=0.01 of the checkpoint counts, and not 0.1": {"optimizer": lambda own: torch.optim.AdamW(own, lr=0.1)},
    "weight_decay=0.01 of the checkpoint counts": {
        "optimizer": lambda own: torch.optim.AdamW(own, 1e-2, weight_decay=0)
    },
    "clip_norm=1.0 from now on, None before": {"clip_norm": 1.0},
    "accumulate=2 from now on, 1 before": {"accumulate": 2},
    "seed=7 from now on, 0 before": {"seed": 7},
}


@pytest.mark.parametrize("told", CHANGES)
def test_a_job_that_continues_with_other_settings_is_told_which_count(tmp_path, told):
    train([good_job(steps=3)], run_dir=tmp_path)
    with pytest.warns(JobResumedWarning) as warned:
        train([good_job(steps=5, **CHANGES[told])], run_dir=tmp_path, resume=True)
    assert any(told in str(each.message) for each in warned)


def test_a_schedule_is_no_difference(tmp_path, quiet):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)

    train([good_job(steps=3, lr_scheduler=schedule)], run_dir=tmp_path)
    longer = train([good_job(steps=8, lr_scheduler=schedule)], run_dir=tmp_path, resume=True)["good"]
    assert longer.losses == plain_losses(lr_scheduler=schedule)


def test_what_is_over_since_an_earlier_run_is_named_when_asked_for(tmp_path):
    train([good_job(steps=2)], run_dir=tmp_path)
    told = threading.Event()
    with fleet.Fleet([fleet.Device(name="cpu", threads=1)], "3MB", host="256MiB", run_dir=tmp_path, resume=True) as own:
        own.add(good_job(steps=2))
        for ask in (own.stop, own.pause, own.resume):
            with pytest.raises(ValueError, match="job 'good' is done already, since an earlier run"):
                ask("good")
        with pytest.raises(ValueError, match="there is no job named 'other'; there are good"):
            own.stop("other")
        own.forget("good")
        assert "good" not in own
        told.set()
    assert told.is_set()


def test_other_words_are_refused(tmp_path):
    with pytest.raises((TypeError, ValueError), match="resume"):
        train([good_job()], run_dir=tmp_path, resume="all")


class Numbered:
    """Data whose passes differ by a number of their own."""

    def __init__(self):
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter(batches(count=3, seed=self.num_passes))


class Drawing:
    """Data that draw from a generator of their own while they are read."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(11)

    def __iter__(self):
        for _ in range(3):
            yield tuple(torch.randint(256, (2, 32), generator=self.generator) for _ in range(2))


def loader(**options):
    return torch.utils.data.DataLoader([batch[0] for batch in batches(count=12, batch=1)], 4, shuffle=True, **options)


def looped(data):
    """A job whose batches are single tensors, of which the targets are made."""
    return {"data": data, "loss": lambda model, batch: model(batch.flatten(0, -2), batch.flatten(0, -2))}


STATES = {
    "a generator of the loader": looped(lambda: loader(generator=torch.Generator().manual_seed(5))),
    "PyTorch's generator": looped(loader),
    "passes that are counted": {"data": Numbered},
    "draws while it is read": {"data": Drawing},
}


@pytest.mark.parametrize("steps", [4, 5, 8, {"epochs": 2}])
@pytest.mark.parametrize("name", STATES)
def test_data_with_a_state_of_their_own_go_on(tmp_path, quiet, name, steps):
    settings = STATES[name]
    first = steps if isinstance(steps, dict) else {"steps": steps}
    then = {"epochs": 4} if isinstance(steps, dict) else {"steps": 11}
    train([gpt_job(**{"steps": None, **settings, **first})], run_dir=tmp_path)
    longer = train([gpt_job(**{"steps": None, **settings, **then})], run_dir=tmp_path, resume=True)["job"]
    assert longer.losses == tuple(train_plainly(gpt_job(**{"steps": None, **settings, **then}))[0])


def test_data_that_cannot_be_brought_back_are_said(tmp_path):
    others = iter(range(100))

    def data():
        return batches(count=3, seed=next(others))

    train([gpt_job(data=data, steps=5)], run_dir=tmp_path)
    with pytest.warns(JobResumedWarning, match="continues with other batches"):
        train([gpt_job(data=data, steps=8)], run_dir=tmp_path, resume=True)
