"""`advise`: profile the step, try the options, choose one."""

import gc
import math
from collections.abc import Iterator

import torch
from torch import nn

from penstock import remat
from penstock.advisor._advice import Advice, Option, choose
from penstock.advisor._fleet import fleet_of_one
from penstock.advisor._trial import Progress, Trial, first_line, plain_can_run, try_all
from penstock.advisor._ways import Limits, Way, quiet, ways_for
from penstock.advisor._whole import training_of_all
from penstock.advisor._workload import Batch, Loss, Workload
from penstock.arguments import checked
from penstock.probe import peak_bytes
from penstock.tiers import Budget, DiskSpec, Footprint, Size
from penstock.units import format_bytes

_LARGE_BATCH_SHARE = 0.25
_LAYERS = {"RGCNConv": "RGCNConv", "FastRGCNConv": "RGCNConv", "RGATConv": "RGATConv", "HGTConv": "HGTConv"}
"""Layers of PyG by name, with the layers of Penstock that replace them."""


@checked("penstock.advise(model, batch, '6GiB')", rounds=1)
def advise(
    model: nn.Module,
    batch: Batch,
    budget: Size | Budget | None,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    host: Size | None = None,
    disk: DiskSpec = None,
    rounds: int = 5,
    progress: Progress | None = None,
) -> Advice:
    """Find the fastest way of training ``model`` on batches like ``batch`` that keeps the budget.

    The step is captured and profiled once. Everything that may keep the budget is then set up and tried: plain PyTorch,
    ``torch.utils.checkpoint`` for each block, `offload`, both, and `remat` with and without swaps. If none of them
    keeps it, two more are tried: `offload.training`, which applies the budget to parameters, gradients and optimizer
    state too, and a `fleet` of one job, which holds a part of the model at a time. Peaks are measured in one step each,
    with gradients that exist already (as with accumulation; dropping them takes no more). Times are medians over
    ``rounds``, in which all options take turns. If plain PyTorch cannot run, ratios are to the sum of its operators'
    times.

    Args:
        model: on the device on which it is to train.
        batch: a tensor, a tuple or list (``model(*batch)``) or a dict (``model(**batch)``), on the same device.
        budget: device bytes at the true peak, with parameters, gradients and optimizer state. Or a ``tiers.Budget``,
            whose host memory and disks may be used; what others hold of it is left to them.
        loss: a function of model and batch that returns a scalar; not needed if the model returns its loss, or has it
            as ``.loss``.
        optimizer: its state is counted, even before its first step.
        host: bytes of host memory to move to (CUDA).
        disk: directory on an SSD to move to, or several.
        rounds: how often each option is timed. If a round takes more than ten seconds, options that cannot become the
            best are left out of the next ones.
        progress: called with what is being done, how much of it is done, and how much there is.

    Parameters, gradients, buffers and random numbers are left as they were. Raises ``ValueError`` if the step has no
    loss, and whatever the model itself raises.
    """
    if rounds < 1:
        raise ValueError(f"`rounds` must be at least 1, got {rounds}: rounds=5")
    account = _account(budget, host, disk)
    workload = Workload(model, batch, loss, optimizer)
    tell = progress or _say_nothing
    tell("capturing and profiling the step", 0, 1)
    limits = _limits(workload, account, is_shared=isinstance(budget, Budget))
    planned, why_not = _planned(workload, limits)
    plain_peak = None if planned is None else planned.plan.keep_all_peak_bytes
    ways = ways_for(workload, limits, planned)
    if plain_peak is not None and not plain_can_run(workload, plain_peak):
        ways = ways[1:]
    trials = try_all(workload, ways, limits=limits, rounds=rounds, progress=tell)
    plain_s = _plain_s(trials, planned)
    options = [_option(way, trials[way.name], plain_s) for way in ways]
    if planned is None:
        options.append(_refused("remat", ("remat",), why_not))
    if all(option.is_refused for option in options):
        tell("trying a training that offloads parameters and states", 0, 1)
        options.append(training_of_all(workload, limits, plain_s))
        tell("trying a fleet of one", 0, 1)
        options.append(fleet_of_one(workload, limits, plain_s))
    best, plain = choose(options), trials.get("plain", Trial())
    return Advice(
        options=tuple(
            sorted(options, key=lambda option: (option is not best, option.is_refused, option.ratio or math.inf))
        ),
        budget_bytes=account.device_bytes,
        plain_peak_bytes=plain_peak if plain.peak_bytes is None else plain.peak_bytes,
        plain_is_measured=plain.ratio is not None,
        smallest_bytes=None if planned is None else remat.smallest_budget_bytes(planned.problem),
        notes=tuple(_notes(workload, limits.budget)),
        best_name=None if best is None else best.name,
    )


def _say_nothing(what: str, done: int, total: int) -> None:
    pass


def _account(budget: Size | Budget | None, host: Size | None, disk: DiskSpec) -> Budget:
    if not isinstance(budget, Budget):
        return Budget(device=budget, host=host, disk=disk)
    if host is not None or disk is not None:
        raise ValueError("`host` and `disk` must be inside the Budget: Budget(device=..., host=..., disk=...)")
    return budget


def _limits(workload: Workload, account: Budget, *, is_shared: bool) -> Limits:
    """Return what others leave of the account and of the device for this step."""
    optimizer = workload.optimizer
    state_bytes = 0 if optimizer is None else remat.optimizer_state_bytes(optimizer)
    is_made = optimizer is not None and bool(optimizer.state)
    own_bytes = workload.input_bytes + workload.gradient_bytes + (state_bytes if is_made else 0)
    gc.collect()
    others_bytes = max(0, peak_bytes(lambda: None, device=workload.device).start_bytes - own_bytes)
    if workload.device.type == "cpu":
        others_bytes = max(0, others_bytes - account.held_bytes("host"))
    device_bytes, standing_bytes = account.device_bytes, 0
    left = None
    if device_bytes is not None:
        left = max(1, device_bytes - account.beside_bytes())
        own = Footprint(tensors=dict.fromkeys(map(id, workload.model.parameters()), 0))
        standing_bytes = left - (account.step_room_bytes(own) or 0)
    return Limits(
        budget=account.alone(device=left, host=account.room_bytes("host")),
        spelled="budget" if is_shared else _spelled(account),
        reserve_bytes=others_bytes,
        unaccounted_bytes=max(0, others_bytes - standing_bytes),
        extra_bytes=workload.set_aside_bytes - (0 if is_made else state_bytes),
    )


def _planned(workload: Workload, limits: Limits) -> tuple[remat.Planned | None, str]:
    """Return the profile of the step, or the reason why there is none."""
    try:
        with workload.left_as_found(), quiet():
            step = remat.optimize(
                workload.loss_of, [workload.batch], limits.budget.alone(device=None, host=limits.budget.host_bytes),
                optimizer=workload.optimizer, reserve=limits.reserve_bytes, fullgraph=True,
            )  # fmt: skip
            return step.plan, ""
    except Exception as error:  # whatever capturing raises, the step cannot be planned
        return None, first_line(error)


def _option(way: Way, trial: Trial, plain_s: float | None) -> Option:
    """Return an option with what was measured."""
    ratio = trial.ratio
    if ratio is None and trial.step_s is not None and plain_s is not None:
        ratio = trial.step_s / plain_s
    return Option(
        name=way.name, rooms=way.rooms, is_refused=bool(trial.reason), reason=trial.reason,
        peak_bytes=trial.peak_bytes, ratio=ratio, is_measured=trial.step_s is not None, code=way.code,
    )  # fmt: skip


def _plain_s(trials: dict[str, Trial], planned: remat.Planned | None) -> float | None:
    """Return the seconds of a plain step: as timed, else the sum of its operators' times."""
    if "plain" in trials and trials["plain"].step_s is not None:
        return trials["plain"].step_s
    return None if planned is None else planned.plan.step_s - planned.plan.extra_s


def _refused(name: str, rooms: tuple[str, ...], reason: str) -> Option:
    return Option(
        name=name, rooms=rooms, is_refused=True, reason=reason, peak_bytes=None, ratio=None, is_measured=False, code=""
    )


def _notes(workload: Workload, budget: Budget) -> Iterator[str]:
    limit = budget.device_bytes
    modes = {module.training for module in workload.model.modules()}
    if len(modes) > 1:
        yield "some modules are in evaluation mode, and were tried in it; model.train() sets all to training mode"
    if limit is not None and workload.batch_bytes > _LARGE_BATCH_SHARE * limit:
        yield (
            f"the batch alone takes {format_bytes(workload.batch_bytes)} of {format_bytes(limit)}: if it holds the "
            "features of a graph, penstock.unified.TieredFeatures reads only the rows of a mini-batch instead"
        )
    layers = {
        type(module) for module in workload.model.modules() if type(module).__module__.startswith("torch_geometric.")
    }
    for name in sorted({layer.__name__ for layer in layers} & set(_LAYERS)):
        yield (
            f"{name} is a layer of PyG; penstock.relational.{_LAYERS[name]} takes the same arguments and copies "
            "nothing per edge"
        )


def _spelled(budget: Budget) -> str:
    sizes = [("device", budget.device_bytes), ("host", budget.host_bytes)]
    arguments = [f"{name}={_exactly(size)}" for name, size in sizes if size is not None]
    disk = {str(path): limit for path, limit in budget.disk_bytes.items()}
    return f"penstock.tiers.Budget({', '.join(arguments + ([f'disk={disk}'] if disk else []))})"


def _exactly(size_bytes: int) -> str:
    """Return a size as a user would write it: ``'6GiB'``, or the number of bytes if no unit divides it."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and not size_bytes % 1024**power:
            return f"'{size_bytes // 1024**power}{unit}'"
    return str(size_bytes)
