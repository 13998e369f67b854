"""The option for parameters, gradients and optimizer state that do not fit: `offload.training`."""

import copy
import gc
import time
from statistics import median

from torch import nn

from penstock import offload
from penstock.advisor._advice import Option
from penstock.advisor._fleet import optimizer_like
from penstock.advisor._trial import first_line
from penstock.advisor._ways import Limits, quiet
from penstock.advisor._workload import Workload
from penstock.probe import held_bytes

NAME = "training"
_NUM_WARM = 3
"""Number of steps that are measured or come right after those."""
_NUM_TIMED = 3


def training_of_all(workload: Workload, limits: Limits, plain_s: float | None) -> Option:
    """Train a copy of the model for some steps; refuse the option if an operator or the tiers below have no room."""
    peak_bytes, seconds, reason, beside_bytes = None, None, "", 0
    try:
        with workload.left_as_found(), quiet():
            gc.collect()  # the model itself stays, and so does what other options left
            beside_bytes = max(0, held_bytes(workload.device) - limits.reserve_bytes - workload.batch_bytes)
            training = offload.training(
                lambda: _copied(workload),
                lambda parameters: optimizer_like(workload.optimizer, list(parameters)),
                limits.alone(beside_bytes),
                device=workload.device,
            )
            try:
                times = [_timed_step(workload, training) for _ in range(_NUM_WARM + _NUM_TIMED)]
                seconds, peak_bytes = median(times[_NUM_WARM:]), training.statistics().measured_peak_bytes
            finally:
                training.close(discard=True)
    except Exception as error:  # the model may raise anything when it is copied or trained
        reason = first_line(error)
    return Option(
        name=NAME,
        rooms=("offload",),
        is_refused=bool(reason),
        reason=reason,
        peak_bytes=None if peak_bytes is None else max(0, peak_bytes - beside_bytes),
        ratio=seconds / plain_s if not reason and plain_s and seconds else None,
        is_measured=not reason,
        code=_code(workload, limits),
    )


def _copied(workload: Workload) -> nn.Module:
    model = copy.deepcopy(workload.model)
    for parameter in model.parameters():
        parameter.grad = None
    return model


def _timed_step(workload: Workload, training: offload.Training) -> float:
    start_s = time.perf_counter()
    with training:
        loss = workload.call(training.model, workload.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        training.optimizer.zero_grad()
    float(loss.detach())  # waits for the device
    return time.perf_counter() - start_s


def _code(workload: Workload, limits: Limits) -> str:
    optimizer = "" if workload.optimizer is not None else "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    return (
        f"import penstock\n{'import torch' if optimizer else ''}\n"
        f"{workload.preparation}{optimizer}"
        f"training = penstock.offload.training(model, optimizer, {limits.spelled})\n"
        "for batch in batches:\n"
        "    with training:\n"
        f"        {workload.expression}.backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        'training.save("trained")\n'
        "training.close(discard=True)\n"
    )
