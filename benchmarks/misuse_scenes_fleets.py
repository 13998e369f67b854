"""Misuses of `fleet` that no signature shows: what two jobs share, odd factories, and fleets out of order."""

from typing import Any

import torch
from torch import nn

from benchmarks.misuse_engine import model, trains
from benchmarks.misuse_fleets import batches, fields, job, net, options, sgd, trained
from benchmarks.misuse_scenes import offloader_of
from benchmarks.misuse_table import Told, require, scene
from benchmarks.soak_case import Case
from penstock import fleet, offload


def run(case: Case, *jobs: fleet.Job, **changes: Any) -> fleet.Results:
    return fleet.run(list(jobs), **(options(case) | changes))


def finished(results: fleet.Results) -> None:
    """Require that all jobs are done, or raise the first failure."""
    for result in results.values():
        if result.state is fleet.JobState.FAILED:
            raise Told(result.error)


@scene("fleet: a device that is not there")
def no_cuda(case: Case) -> None:
    run(case, job(), devices=["cuda:0"])


@scene("fleet: two jobs whose factory returns one model")
def one_model(case: Case) -> None:
    shared = net()
    finished(run(case, job(name="a", model=lambda: shared), job(name="b", model=lambda: shared)))


@scene("fleet: two jobs whose models share a parameter")
def one_parameter(case: Case) -> None:
    shared = nn.Parameter(torch.ones(16, 8))

    def make() -> nn.Module:
        module = net()
        module[0].weight = shared  # type: ignore[index]
        return module

    finished(run(case, job(name="a", model=make), job(name="b", model=make)))


@scene("fleet: two jobs whose models share a storage")
def one_storage(case: Case) -> None:
    shared = torch.ones(16, 8)

    def make() -> nn.Module:
        module = net()
        module[0].weight = nn.Parameter(shared[:])  # type: ignore[index]
        return module

    finished(run(case, job(name="a", model=make), job(name="b", model=make)))


@scene("fleet: two jobs whose data is one iterator")
def one_iterator(case: Case) -> None:
    shared = iter(batches())
    finished(run(case, job(name="a", data=lambda: shared), job(name="b", data=lambda: shared)))


@scene("fleet: two jobs with one optimizer")
def one_optimizer(case: Case) -> None:
    shared = sgd(net().parameters())
    finished(run(case, job(name="a", optimizer=lambda _: shared), job(name="b", optimizer=lambda _: shared)))


@scene("fleet: two jobs of one name")
def one_name(case: Case) -> None:
    run(case, job(), job())


@scene("fleet: one job object twice")
def one_job(case: Case) -> None:
    new_job = job()
    run(case, new_job, new_job)


@scene("fleet: no jobs")
def no_jobs(case: Case) -> None:
    require(len(run(case)) == 0, "no results")


@scene("fleet: no devices")
def no_devices(case: Case) -> None:
    run(case, job(), devices=[])


@scene("fleet: one device twice")
def device_twice(case: Case) -> None:
    trained(run(case, job(), devices=["cpu", "cpu"]), {})


@scene("fleet: a run_dir that has another's run")
def used_run_dir(case: Case) -> None:
    run(case, job())
    run(case, job())


@scene("fleet: two fleets at once in one run_dir")
def shared_run_dir(case: Case) -> None:
    arguments = options(case)
    with fleet.Fleet(**arguments) as first:
        first.add(job())
        with fleet.Fleet(**arguments) as second:
            second.add(job())
            second.wait()
        first.wait()


@scene("fleet: a job in two fleets")
def two_fleets(case: Case) -> None:
    new_job = job()
    for name in ("first", "second"):
        trained(run(case, new_job, run_dir=case.folder / "out" / name), {})


@scene("fleet: used before it is entered")
def fleet_unentered(case: Case) -> None:
    running = fleet.Fleet(**options(case))
    running.add(job())
    running.wait()


@scene("fleet: used after it is left")
def fleet_left(case: Case) -> None:
    with fleet.Fleet(**options(case)) as running:
        running.add(job())
        running.wait()
    running.add(job(name="b"))
    running.wait()


@scene("fleet: in another thread")
def fleet_thread(case: Case) -> None:
    from benchmarks.misuse_case import in_thread

    in_thread(lambda: trained(run(case, job()), {}))


@scene("fleet: in a forked child")
def fleet_forked(case: Case) -> None:
    from benchmarks.misuse_case import in_child

    in_child(lambda: trained(run(case, job()), {}))


@scene("fleet: inside of a job of a fleet")
def fleet_inside(case: Case) -> None:
    def data() -> list[torch.Tensor]:
        trained(run(case, job(), run_dir=case.folder / "out" / "inner"), {})
        return batches()

    trained(run(case, job(data=data)), {})


@scene("fleet: a job that nobody knows")
def unknown_job(case: Case) -> None:
    with fleet.Fleet(**options(case)) as running:
        running.add(job())
        try:
            running.pause("12 potatoes")
        finally:
            running.wait()


@scene("fleet: inside of an offloader")
def fleet_in_offloader(case: Case) -> None:
    offloader = offloader_of(case, model())
    try:
        with offloader:
            trained(run(case, job()), {})
    finally:
        offloader.close()


for _label, _changes in {
    "data that is empty": {"data": list}, "data that is no iterable": {"data": lambda: 12},
    "a model that is None": {"model": lambda: None}, "a model without parameters": {"model": nn.Tanh},
    "a loss that is None": {"loss": lambda model, batch: None},
    "a loss that is a number": {"loss": lambda model, batch: 0.5},
    "a loss of many numbers": {"loss": lambda model, batch: model(batch)},
    "a loss without gradients": {"loss": lambda model, batch: model(batch).square().mean().detach()},
    "a loss that does not use the model": {"loss": lambda model, batch: batch.sum()},
    "a loss that raises": {"loss": lambda model, batch: {}["potatoes"]},
    "an optimizer that is None": {"optimizer": lambda parameters: None},
    "an optimizer of other parameters": {"optimizer": lambda _: sgd(net().parameters())},
    "batches that fit nothing": {"data": lambda: [torch.ones(4, 5)] * 2},
    "a metric that is no number": {"metric": lambda model, batch: "12 potatoes"},
    "stages that are none": {"stages": lambda model: []},
    "stages of another model": {"stages": lambda model: list(net())},  # type: ignore[call-overload]
    "a scheduler that is None": {"lr_scheduler": lambda optimizer: None},
}.items():  # fmt: skip

    @scene(f"fleet: a job with {_label}")
    def odd_job(case: Case, changes: Any = _changes) -> None:
        finished(run(case, fleet.Job(**fields(**changes))))


@scene("fleet: a tracker that raises")
def raising_tracker(case: Case) -> None:
    class Tracker:
        def log(self, *_: Any) -> None:
            raise KeyError("potatoes")

        end = close = log

    trained(run(case, job(), trackers=[Tracker()]), {})


@scene("fleet: a stopper that returns text")
def odd_stopper(case: Case) -> None:
    finished(run(case, job(steps=4, evaluate_every=1), stopper=lambda *_: "12 potatoes"))


@scene("fleet: a scheduler that returns text")
def odd_scheduler(case: Case) -> None:
    finished(run(case, job(), job(name="b"), scheduler=lambda _: "12 potatoes"))


@scene("fleet: a budget below the smallest unit")
def fleet_small(case: Case) -> None:
    finished(run(case, job(), budget=100))


@scene("fleet: a Budget shared with offloading")
def fleet_budget(case: Case) -> None:
    budget = case.budget(device="64MiB", host="64MiB", disk=case.disk())
    module = model()
    offloader = offload.activations(module, budget=budget, min_size=0)
    trained(run(case, job(), budget=budget, host=None, disk=None), {})
    trains(offloader, module)
    offloader.close()
