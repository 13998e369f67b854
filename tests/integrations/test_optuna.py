"""Optuna beside a fleet: what its pruner stops, what its sampler asks for, and what it is told."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock import fleet
from penstock.integrations import OptunaStopper, search

optuna = pytest.importorskip("optuna")
TrialState = optuna.trial.TrialState
OPTIONS = {"budget": "64MiB", "host": "64MiB", "progress": None}
X = torch.linspace(-1, 1, 16).reshape(8, 2)
Y = X @ torch.tensor([[2.0], [-1.0]])

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def squared_error(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def job_of(name, lr, steps=12, **changes):
    return fleet.Job(
        name=name,
        model=lambda: torch.nn.Linear(2, 1),
        data=lambda: [(X, Y)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        **{"loss": squared_error, "steps": steps, "validation": lambda: [(X, Y)], "evaluate_every": 4, **changes},
    )


def fails(model, batch):
    raise RuntimeError("a fault of the loss")


def three_jobs():
    return [job_of("good", 0.2), job_of("better", 0.4), job_of("bad", 1e-6)]


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_the_stopper_ends_what_the_pruner_gives_up_and_leaves_the_others_alone(devices):
    plain = fleet.run(three_jobs(), devices, **OPTIONS)
    worst = plain["bad"].losses[-1]
    assert worst > 2 * plain["good"].validations[0]["loss"]
    stopper = OptunaStopper(optuna.pruners.ThresholdPruner(upper=worst * 0.9))
    stopped = fleet.run(three_jobs(), devices, stopper=stopper, **OPTIONS)
    assert stopped["bad"].state is fleet.JobState.STOPPED
    assert stopped["bad"].losses == plain["bad"].losses[:4]
    for name in ("good", "better"):
        assert stopped[name].state is fleet.JobState.DONE
        assert stopped[name].losses == plain[name].losses
        assert stopped[name].validations == plain[name].validations


def test_as_a_tracker_it_compares_with_jobs_that_are_done():
    for is_tracker, state in ((True, fleet.JobState.STOPPED), (False, fleet.JobState.DONE)):
        stopper = OptunaStopper(optuna.pruners.MedianPruner(n_startup_trials=2))
        trackers = [stopper] if is_tracker else []
        results = fleet.run(three_jobs(), ["cpu"], stopper=stopper, trackers=trackers, scheduler="fifo", **OPTIONS)
        assert results["bad"].state is state
        assert results["good"].state is results["better"].state is fleet.JobState.DONE


def test_the_stopper_compares_with_jobs_that_run_still():
    stopper = OptunaStopper(optuna.pruners.SuccessiveHalvingPruner(min_resource=4, reduction_factor=3))
    losses = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 9.0}
    answers = [stopper(job_of(name, 0.1), 4, {"loss": value}) for name, value in losses.items()]
    assert answers == [False, True, False, True]


def test_the_stopper_knows_which_way_is_better():
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    stopper = OptunaStopper(pruner, metric="accuracy", direction="maximize")
    assert not stopper(job_of("a", 0.1), 4, {"accuracy": 0.9})
    stopper.end(job_of("a", 0.1), fleet.JobState.DONE)
    assert stopper(job_of("b", 0.1), 4, {"accuracy": 0.1})
    assert not stopper(job_of("c", 0.1), 4, {"accuracy": 0.95})
    stopper.close()


def test_the_stopper_takes_calls_from_many_threads():
    stopper = OptunaStopper(optuna.pruners.ThresholdPruner(upper=1.0))
    jobs = [job_of(str(number), 0.1) for number in range(16)]

    def validations(number):
        return [stopper(jobs[number], step, {"loss": 0.1 * number}) for step in range(5)]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(validations, range(16)))
    assert answers == [[0.1 * number > 1.0] * 5 for number in range(16)]


def test_a_metric_that_a_job_has_not_fails_the_job_by_name():
    stopper = OptunaStopper(optuna.pruners.NopPruner(), metric="accuracy")
    results = fleet.run([job_of("a", 0.1)], ["cpu"], stopper=stopper, **OPTIONS)
    assert results["a"].state is fleet.JobState.FAILED
    assert "`metric` must be one that job 'a' reports (loss), got 'accuracy'" in results["a"].error


@pytest.mark.parametrize(("devices", "at_once"), [(["cpu"], 1), (["cpu"], 3), (["cpu", "cpu"], 3), (["cpu"] * 3, 2)])
def test_a_search_tells_every_trial_and_finds_the_best(devices, at_once):
    alive, most = set(), []

    class Watch:
        def log(self, job, step, metrics):
            most.append(len(alive))

        def end(self, job, state):
            alive.remove(job.name)

        def close(self):
            most.append("closed")

    def make_job(trial):
        lr = trial.suggest_float("lr", 1e-4, 0.5, log=True)
        alive.add(f"lr={lr:.4g}")
        return job_of(f"lr={lr:.4g}", lr, tags={"kind": "linear"})

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=4), pruner=optuna.pruners.NopPruner()
    )
    results = search(study, make_job, num_trials=8, at_once=at_once, devices=devices, trackers=[Watch()], **OPTIONS)
    assert len(results) == len(study.trials) == 8
    assert max(most[:-1]) <= at_once and most[-1] == "closed"
    for trial in study.trials:
        result = results[trial.user_attrs["job"]]
        assert trial.state is TrialState.COMPLETE and result.state is fleet.JobState.DONE
        assert trial.value == result.value("loss") == result.validations[-1]["loss"]
        assert trial.intermediate_values == {
            validation["step"]: validation["loss"] for validation in result.validations
        }
        assert result.job.tags == {"lr": trial.params["lr"], "kind": "linear"}
    assert results[study.best_trial.user_attrs["job"]] is results.best()
    assert study.best_value == results.best().value("loss")


def test_a_search_prunes_by_the_study_and_leaves_good_jobs_as_they_are():
    rates = [0.2, 0.4, 1e-6, 0.3, 1e-5]

    def make_job(trial):
        lr = trial.suggest_categorical("lr", rates)
        return job_of(f"lr={lr}", lr)

    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
    )
    for lr in rates:
        study.enqueue_trial({"lr": lr})
    results = search(study, make_job, num_trials=5, at_once=1, devices=["cpu"], **OPTIONS)
    plain = fleet.run([job_of(f"lr={lr}", lr) for lr in rates], ["cpu"], **OPTIONS)
    for trial in study.trials:
        searched, alone = results[trial.user_attrs["job"]], plain[trial.user_attrs["job"]]
        if trial.params["lr"] < 0.1:
            assert trial.state is TrialState.PRUNED and searched.state is fleet.JobState.STOPPED
            assert searched.losses == alone.losses[:4] and trial.value == searched.value("loss")
        else:
            assert searched.losses == alone.losses
    assert results["lr=0.4"].state is fleet.JobState.DONE


def test_a_search_tells_failed_stopped_and_skipped_trials():
    def make_job(trial):
        trial.suggest_int("width", 1, 1)
        if trial.number == 2:
            raise optuna.TrialPruned
        return job_of("a", 0.1, loss=fails if trial.number == 1 else squared_error)

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    results = search(study, make_job, num_trials=4, at_once=2, devices=["cpu"], **OPTIONS)
    assert [trial.state for trial in study.trials] == [
        TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED, TrialState.COMPLETE
    ]  # fmt: skip
    assert list(results) == ["a", "a-1", "a-3"]
    assert "a fault of the loss" in results["a-1"].error


def test_jobs_without_validation_are_searched_by_their_last_loss():
    study = optuna.create_study()
    results = search(
        study,
        lambda trial: job_of("a", 0.1, validation=None, evaluate_every=None),
        num_trials=2,
        at_once=1,
        devices=["cpu"],
        **OPTIONS,
    )
    assert [trial.value for trial in study.trials] == [result.losses[-1] for result in results.values()]


def test_a_search_that_ends_early_leaves_no_trial_running():
    def make_job(trial):
        if trial.number == 2:
            raise OSError("no such data")
        return job_of(f"{trial.number}", 0.1, steps=10**9 if trial.number else 2, evaluate_every=1000)

    study = optuna.create_study()
    with pytest.raises(OSError, match="no such data"):
        search(study, make_job, num_trials=5, at_once=2, devices=["cpu"], **OPTIONS)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL]


@pytest.mark.parametrize("validates", [True, False])
def test_a_search_by_a_metric_that_jobs_have_not_says_so(validates):
    changes = {} if validates else {"validation": None, "evaluate_every": None}
    study = optuna.create_study()
    with pytest.raises(ValueError, match="'accuracy'"):
        search(
            study,
            lambda trial: job_of("a", 0.1, **changes),
            num_trials=3,
            at_once=1,
            metric="accuracy",
            devices=["cpu"],
            **OPTIONS,
        )
    assert [trial.state.is_finished() for trial in study.trials] == [True]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_trials": 0}, "at least 1"),
        ({"at_once": 0}, "at least 1"),
        ({"stopper": lambda *_: False}, "the study's pruner"),
        ({"resume": True}, "search again"),
    ],
)
def test_a_search_refuses_what_cannot_work(settings, match):
    with pytest.raises((ValueError, TypeError), match=match):
        search(optuna.create_study(), job_of, **{"num_trials": 1, "at_once": 1, **settings})


def test_a_search_refuses_several_directions_and_what_is_no_job():
    both = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(ValueError, match="must have one direction, got 2"):
        search(both, job_of, num_trials=1, at_once=1)
    study = optuna.create_study()
    with pytest.raises(TypeError, match="got int"):
        search(study, lambda trial: 3, num_trials=1, at_once=1, devices=["cpu"], **OPTIONS)
    assert study.trials[0].state is TrialState.FAIL


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"penstock\[fleet\]"):
        OptunaStopper(None)


def test_a_search_that_was_killed_says_one_way_to_go_on_that_works(tmp_path):
    study = optuna.create_study()
    options = {**OPTIONS, "at_once": 1, "devices": ["cpu"]}
    search(study, lambda trial: job_of("a", 0.1), num_trials=1, run_dir=tmp_path / "1", **options)
    with pytest.raises(ValueError, match="search again with another run_dir") as refused:
        search(study, lambda trial: job_of("a", 0.1), num_trials=1, run_dir=tmp_path / "1", **options)
    assert "resume" not in str(refused.value)
    search(study, lambda trial: job_of("a", 0.1), num_trials=1, run_dir=tmp_path / "2", **options)
    assert len(study.trials) == 2
