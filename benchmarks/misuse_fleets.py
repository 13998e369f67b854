"""Working calls of `fleet`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.misuse_table import RECORDS, UNCALLED, USES, Arguments, Told, Use, require
from benchmarks.soak_case import Case
from penstock import fleet


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches() -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 32).view(4, 8) + step for step in range(2)]


def loss(model: Callable[..., Any], batch: Any) -> Any:
    return model(batch).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def fields(**changes: Any) -> Arguments:
    arguments: Arguments = {
        "name": "a", "model": net, "data": batches, "loss": loss, "optimizer": sgd, "epochs": None, "steps": 2,
        "validation": batches, "evaluate_every": None, "metric": None, "lr_scheduler": None, "accumulate": 1,
        "clip_norm": None, "precision": "float32", "stages": None, "seed": 0, "tags": {},
    }  # fmt: skip
    return arguments | changes


def job(**changes: Any) -> fleet.Job:
    return fleet.Job(**fields(**changes))


def plain_losses(arguments: Arguments) -> list[float]:
    """Return the losses of the plain loop that a job stands for."""
    torch.manual_seed(arguments["seed"])
    module = arguments["model"]()
    optimizer = arguments["optimizer"](module.parameters())
    result = []
    while len(result) < arguments["steps"]:
        for example in arguments["data"]():
            value = arguments["loss"](module, example)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(float(value))
    return result[: arguments["steps"]]


def options(case: Case) -> Arguments:
    return {
        "devices": ["cpu"], "budget": "64MiB", "host": "64MiB", "disk": None, "run_dir": case.folder / "run",
        "resume": False, "scheduler": "sharded-lrtf", "stopper": None, "checkpoint_every": None, "keep": 1,
        "trackers": (), "progress": None, "verify": False, "ablation": None,
    }  # fmt: skip


def trained(results: Any, _: Arguments) -> None:
    """Require that jobs are done, with plain training's losses."""
    require(len(results), "a result per job")
    for result in results.values():
        if result.state is fleet.JobState.FAILED:
            raise Told(result.error)
        require(list(result.losses) == plain_losses(fields()), "losses differ from plain training's")


def running(
    jobs: Any, devices: Any, budget: Any, host: Any, disk: Any, run_dir: Any, resume: Any, scheduler: Any,
    stopper: Any, checkpoint_every: Any, keep: Any, trackers: Any, progress: Any, verify: Any, ablation: Any,
    **potatoes: Any,
) -> Any:  # fmt: skip
    """Call `fleet.run` with its options as parameters, from which misuses are derived."""
    arguments = {name: value for name, value in locals().items() if name != "potatoes"}
    return fleet.run(**arguments, **potatoes)


running.__annotations__ = {**fleet.Fleet.__init__.__annotations__, "jobs": fleet.run.__annotations__["jobs"]}
running.__annotations__.pop("jobs_dir", None)


def fleet_waits(subject: Any, _: Arguments) -> None:
    with subject:
        subject.add(job())
        trained(subject.wait(), {})


def ran(case: Case) -> fleet.Results:
    return fleet.run([job()], **options(case))


def job_runs(subject: Any, arguments: Arguments) -> None:
    results = fleet.run([subject], ["cpu"], "64MiB", host="64MiB", run_dir=Path("../out/run").resolve(), progress=None)
    if results[subject.name].state is fleet.JobState.FAILED:
        raise Told(results[subject.name].error)


def shard(**changes: Any) -> Arguments:
    arguments: Arguments = {
        "forward_s": 1.0, "backward_s": 2.0, "step_s": 0.1, "parameter_bytes": 10, "state_bytes": 10,
        "boundary_bytes": 1, "activation_bytes": 5, "recomputes": False,
    }  # fmt: skip
    return arguments | changes


def cost(**changes: Any) -> Arguments:
    arguments: Arguments = {
        "name": "a", "shards": (fleet.ShardCost(**shard()),) * 2, "num_steps": 3, "accumulate": 1, "clips": False,
        "arrival_s": 0.0,
    }  # fmt: skip
    return arguments | changes


def device(**changes: Any) -> Arguments:
    arguments: Arguments = {
        "name": "cpu", "speed": 1.0, "budget_bytes": 1000, "in_bandwidth_bytes_per_s": 10.0,
        "out_bandwidth_bytes_per_s": 10.0,
    }  # fmt: skip
    return arguments | changes


def problem(**changes: Any) -> fleet.FleetProblem:
    arguments = {"jobs": (fleet.JobCost(**cost()),), "devices": (fleet.DeviceCost(**device()),)}
    return fleet.FleetProblem(**(arguments | changes))


def schedule() -> fleet.Schedule:
    return fleet.simulate(problem())


def simulated(subject: Any, _: Arguments) -> None:
    fleet.verify(subject, fleet.simulate(subject))
    require(
        fleet.lower_bound_s(subject) <= fleet.simulate(subject).makespan_s * (1 + 1e-9), "no schedule beats the bound"
    )


def state(case: Case) -> fleet.FleetState:
    result = fleet.FleetState(case.folder / "run")
    result.create()
    return result


def row() -> fleet.JobRow:
    return fleet.JobRow(
        name="a", place=0, state="done", step=0, num_steps=1, epoch=0, loss=None, validation={}, device="cpu",
        seconds_per_step=0.0, error=None, tags={}, source=None, updated_s=0.0,
    )  # fmt: skip


def stored(case: Case) -> Arguments:
    results = ran(case)
    return {
        "job": job(), "folder": results.run_dir / "jobs" / "a", "state": fleet.JobState.DONE, "error": None,
        "seconds_per_step": 0.0,
    }  # fmt: skip


def _with_job(subject: Any) -> Arguments:
    subject.add(job())
    return {"name": "a"}


USES |= {
    "fleet.run": Use(call=running, good=lambda case: {"jobs": [job()], **options(case)}, check=trained),
    "fleet.Fleet": Use(
        call=fleet.Fleet, good=lambda case: {**options(case), "jobs_dir": None}, check=fleet_waits,
        methods={
            "add": lambda _: {"job": job()}, "pause": _with_job, "resume": _with_job, "stop": _with_job,
            "forget": _with_job, "clone": lambda subject: {**_with_job(subject), "new_name": "b"},
        },
    ),
    "fleet.Job": Use(
        call=fleet.Job, good=lambda _: fields(), check=job_runs,
        methods={"make_optimizer": lambda _: {"named": list(net().named_parameters())}},
    ),
    "fleet.Device": Use(
        call=fleet.Device, good=lambda _: {"name": "cpu", "budget": "64MiB", "threads": 1},
        check=lambda result, _: fleet.measure([job()], result, "64MiB", host="64MiB"),
    ),
    "fleet.Ablation": Use(
        call=fleet.Ablation, good=lambda _: {"double_buffer": True, "sharp": True, "recompute": None},
        check=lambda result, _: trained(
            fleet.run([job()], ["cpu"], "64MiB", host="64MiB", progress=None, ablation=result), {}
        ),
    ),
    "fleet.JobSource": Use(
        call=fleet.JobSource, good=lambda _: {"make": job, "path": "jobs:job", "parameters": {}},
    ),
    "fleet.measure": Use(
        call=fleet.measure,
        good=lambda _: {"jobs": [job()], "device": "cpu", "budget": "64MiB", "host": "64MiB"},
        check=lambda costs, _: require(all(job_cost.num_steps == 2 for job_cost in costs), "costs"),
    ),
    "fleet.stored_result": Use(call=fleet.stored_result, good=stored, check=lambda result, _: result.model()),
    "fleet.Results": Use(
        call=ran, good=lambda case: {"case": case}, made_by="fleet.run",
        methods={"__getitem__": lambda _: {"name": "a"}, "best": lambda _: {"metric": "loss", "mode": "min"}},
    ),
    "fleet.jobs_table": Use(call=fleet.jobs_table, good=lambda _: {"rows": [row()]}),
    "fleet.FleetState": Use(
        call=state, good=lambda case: {"case": case}, made_by="a fleet, and commands in other processes",
        methods={
            "answer": lambda _: {"number": 1, "text": ""}, "answer_to": lambda _: {"number": 1, "timeout_s": 0.0},
            "ask": lambda _: {"verb": "pause", "job": "a", "arguments": None},
            "refuse_strangers": lambda _: {"resume": True}, "write": lambda _: {"rows": [row()]},
        },
    ),
    "fleet.FleetProblem": Use(
        call=fleet.FleetProblem, good=lambda _: {"jobs": problem().jobs, "devices": problem().devices},
        check=simulated, methods={"may_run": lambda _: {"job": 0, "device": 0}},
    ),
    "fleet.JobCost": Use(
        call=fleet.JobCost, good=lambda _: cost(), check=lambda result, _: simulated(problem(jobs=(result,)), {}),
        methods={"unit": lambda _: {"index": 0}},
    ),
    "fleet.ShardCost": Use(
        call=fleet.ShardCost, good=lambda _: shard(),
        check=lambda result, _: simulated(problem(jobs=(fleet.JobCost(**cost(shards=(result, result))),)), {}),
    ),
    "fleet.DeviceCost": Use(
        call=fleet.DeviceCost, good=lambda _: device(),
        check=lambda result, _: simulated(problem(devices=(result,)), {}),
    ),
    "fleet.simulate": Use(
        call=fleet.simulate, good=lambda _: {"problem": problem(), "scheduler": "fifo"},
        check=lambda result, _: require(result.makespan_s > 0, "a makespan"),
    ),
    "fleet.verify": Use(call=fleet.verify, good=lambda _: {"problem": problem(), "schedule": schedule()}),
    "fleet.lower_bound_s": Use(call=fleet.lower_bound_s, good=lambda _: {"problem": problem()}),
    "fleet.model_parallel_s": Use(call=fleet.model_parallel_s, good=lambda _: {"problem": problem()}),
    "fleet.pipeline_s": Use(call=fleet.pipeline_s, good=lambda _: {"problem": problem(), "num_micro_batches": 2}),
}  # fmt: skip
RECORDS |= {
    "fleet.Schedule": schedule,
    "fleet.ScheduledUnit": lambda: schedule().units[0],
    "fleet.DeviceUse": lambda: schedule().devices[0],
    "fleet.Unit": lambda: fleet.JobCost(**cost()).unit(0),
    "fleet.UnitKind": lambda: fleet.UnitKind.FUSED,
    "fleet.JobState": lambda: fleet.JobState.DONE,
    "fleet.JobRow": row,
    "fleet.Progress": lambda: fleet.Progress(job=0, arrival_s=0.0, remaining_s=1.0, num_done=0),
    "fleet.UnitRecord": lambda: fleet.UnitRecord(
        job="a", kind="step", shard=0, device=0, start_s=0.0, end_s=0.0, stall_s=0.0, recompute_s=0.0
    ),
    "fleet.DeviceStatistics": lambda: fleet.DeviceStatistics(
        name="cpu", wall_s=1.0, compute_s=1.0, recompute_s=0.0, stall_s=0.0, num_units=1, peak_bytes=1,
        measured_peak_bytes=0, budget_bytes=1, parked_bytes=0, fetched_bytes=0, written_to_disk_bytes=0,
    ),
    "fleet.JobResult": lambda: fleet.JobResult(
        job=job(), state=fleet.JobState.DONE, losses=(), validations=(), error=None, seconds_per_step=0.0,
        checkpoint=None,
    ),
}  # fmt: skip
UNCALLED |= {
    "fleet.Scheduler": "the type of a function that the user writes",
    "fleet.SchedulerName": "names of schedulers",
    "fleet.Stopper": "the type of a function that the user writes",
    "fleet.Tracker": "what a user's own class is like",
}
