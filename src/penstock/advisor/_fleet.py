"""A fleet with one job as the last resort: it has only a part of the model on the device at a time."""

import copy
import inspect
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock import fleet
from penstock.advisor._advice import Option
from penstock.advisor._trial import first_line
from penstock.advisor._ways import Limits, quiet
from penstock.advisor._workload import Workload

_NUM_STEPS = 4
_NAME = "fleet"


def fleet_of_one(workload: Workload, limits: Limits, plain_s: float | None) -> Option:
    """Train copies of the model for some steps; refuse if the model cannot be cut, or a part does not fit."""
    peak_bytes, seconds, reason = None, None, ""
    try:
        job = _job(workload)
        with quiet():
            checked, timed = (
                fleet.run([job], [str(workload.device)], limits.alone(), progress=None, verify=verify)
                for verify in (True, False)  # measuring peaks takes time, so the second run does not
            )
        error = checked["advice"].error or timed["advice"].error
        reason = "" if error is None else first_line(ValueError(error))
        peak_bytes = checked.devices[0].measured_peak_bytes
        seconds = (timed.devices[0].compute_s + timed.devices[0].stall_s) / _NUM_STEPS
    except Exception as error:  # the model may raise anything when it is copied, cut or trained
        reason = first_line(error)
    return Option(
        name=_NAME,
        rooms=("fleet",),
        is_refused=bool(reason),
        reason=reason,
        peak_bytes=None if reason else peak_bytes,
        ratio=seconds / plain_s if not reason and plain_s and seconds else None,
        is_measured=not reason,
        code=_code(workload, limits),
    )


def _job(workload: Workload) -> fleet.Job:
    on_cpu = {id(tensor): _copy_on_cpu(tensor) for tensor in (*workload.model.parameters(), *workload.model.buffers())}
    model = copy.deepcopy(workload.model, on_cpu)
    if workload.evaluates:
        model.train()
    batch = pytree.tree_map(lambda leaf: leaf.to("cpu") if isinstance(leaf, torch.Tensor) else leaf, workload.batch)
    return fleet.Job(
        name="advice",
        model=lambda: copy.deepcopy(model),
        data=lambda: [batch] * _NUM_STEPS,
        loss=workload.call,
        optimizer=lambda parameters: optimizer_like(workload.optimizer, parameters),
        steps=_NUM_STEPS,
    )


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(copied, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def optimizer_like(optimizer: torch.optim.Optimizer | None, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class with the same defaults, SGD if there is none."""
    if optimizer is None:
        return torch.optim.SGD(parameters, lr=0.0)
    return type(optimizer)(parameters, **_options_of(optimizer))


def _options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:  # any: each optimizer's own
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def _code(workload: Workload, limits: Limits) -> str:
    optimizer, imports = "torch.optim.SGD(parameters, lr=0.1)", ""
    if workload.optimizer is not None:
        module, name = type(workload.optimizer).__module__, type(workload.optimizer).__name__
        options = ", ".join(f"{key}={value!r}" for key, value in _options_of(workload.optimizer).items())
        is_pytorchs = module.startswith("torch.optim.")
        optimizer = f"{'torch.optim.' if is_pytorchs else ''}{name}(parameters, {options})"
        imports = "" if is_pytorchs else f"from {module} import {name}\n"
    return (
        f"import copy\n\nimport penstock\nimport torch\n{imports}\n"
        f"{workload.preparation}model.cpu()\n"
        "job = penstock.fleet.Job(\n"
        '    name="model",\n'
        "    model=lambda: copy.deepcopy(model),\n"
        "    data=lambda: batches,\n"
        f"    loss=lambda model, batch: {workload.expression},\n"
        f"    optimizer=lambda parameters: {optimizer},\n"
        "    epochs=1,\n"
        ")\n"
        f'results = penstock.fleet.run([job], ["{workload.device}"], {limits.spelled})\n'
        'model = results["model"].model()\n'
    )
