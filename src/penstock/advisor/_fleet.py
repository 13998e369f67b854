"""The last resort: a fleet of one, which holds a part of the model on the device at a time."""

import copy
import inspect

import torch
from torch.utils import _pytree as pytree

from penstock import fleet
from penstock.advisor._advice import Option
from penstock.advisor._task import Task
from penstock.advisor._trial import Trial, first_line
from penstock.advisor._ways import Limits, quiet
from penstock.errors import PenstockError

_NUM_STEPS = 4
_NAME = "fleet"


def fleet_of_one(task: Task, limits: Limits, plain: Trial | None) -> Option:
    """Trains copies of the model for some steps; refused where the model cannot be cut, or a part does not fit."""
    model = copy.deepcopy(task.model).to("cpu")
    batch = pytree.tree_map(lambda one: one.to("cpu") if isinstance(one, torch.Tensor) else one, task.batch)
    job = fleet.Job(
        name="advice",
        model=lambda: copy.deepcopy(model),
        data=lambda: [batch] * _NUM_STEPS,
        loss=task.call,
        optimizer=lambda parameters: _optimizer_like(task.optimizer, parameters),
        steps=_NUM_STEPS,
    )
    peak_bytes, seconds, reason = None, None, ""
    try:
        with quiet():
            results = fleet.run([job], [str(task.device)], limits.alone(), progress=None, verify=True)
        (device,), result = results.devices, results["advice"]
        reason = first_line(ValueError(result.error)) if result.error else ""
        peak_bytes, seconds = device.measured_peak_bytes, (device.compute_s + device.stall_s) / _NUM_STEPS
    except (PenstockError, RuntimeError, ValueError, TypeError, OSError) as error:
        reason = first_line(error)
    is_comparable = not reason and plain is not None and plain.step_s
    return Option(
        name=_NAME,
        rooms=("fleet",),
        is_refused=bool(reason),
        reason=reason,
        peak_bytes=None if reason else peak_bytes,
        ratio=seconds / plain.step_s if is_comparable and plain and plain.step_s and seconds else None,
        is_measured=not reason,
        code=_code(task, limits),
    )


def _optimizer_like(
    optimizer: torch.optim.Optimizer | None, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    if optimizer is None:
        return torch.optim.SGD(parameters, lr=0.0)
    known = inspect.signature(type(optimizer)).parameters
    return type(optimizer)(parameters, **{name: value for name, value in optimizer.defaults.items() if name in known})


def _code(task: Task, limits: Limits) -> str:
    loss = f"lambda model, batch: {task.expression}"
    made = "torch.optim.SGD(parameters, lr=0.1)"
    if task.optimizer is not None:
        made = f"torch.optim.{type(task.optimizer).__name__}(parameters, lr={task.optimizer.defaults.get('lr')})"
    return (
        "import copy\n\nimport penstock\nimport torch\n\n"
        "job = penstock.fleet.Job(\n"
        '    name="model",\n'
        "    model=lambda: copy.deepcopy(model).cpu(),\n"
        "    data=lambda: batches,\n"
        f"    loss={loss},\n"
        f"    optimizer=lambda parameters: {made},\n"
        "    epochs=1,\n"
        ")\n"
        f'results = penstock.fleet.run([job], ["{task.device}"], {limits.spelled})\n'
        'model = results["model"].model()\n'
    )
