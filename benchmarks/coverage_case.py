"""One case of the coverage: an architecture through a door, next to plain PyTorch in the same process.

Both train the same batches from the same seeds: one size, another size, a short last batch, and the first size again.
Plain training runs twice, to know whether it repeats itself exactly. The door gets a budget. If the door raises an
error that names a budget that works, it gets exactly that budget, and has to keep it over the whole training.
"""

import contextlib
import gc
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.zoo import Architecture, Batch, loss_of
from penstock import fleet, offload, probe, remat
from penstock.errors import BudgetNotKeptWarning

SIZES = (4, 3, 2)
"""Samples in the first batches, in the others, and in a short last one."""
NUM_EACH = 3
"""Steps with each size: plans settle in the first ones, and the last is measured."""
MOST_ATTEMPTS = 4
"""The most budgets that are tried: each is the one that the previous attempt's error named."""
_NAMED = re.compile(r"(?:budget=|a budget of |at least )(\d+)(?!\d|\.\d| ?[KMG]iB)")

Array = np.ndarray[Any, Any]
"""Results to compare are kept as arrays, since live tensors of a process count in its peak."""
Step = Callable[[Batch], torch.Tensor]
"""Runs forward and backward, and returns the loss."""
Door = Callable[[nn.Module, int, Path], AbstractContextManager[Step]]
"""Makes a step of a model within a budget, with a folder to offload to."""


@dataclass(kw_only=True)
class Training:
    """Results of a training."""

    losses: list[Array] = field(default_factory=list)
    """Losses of every step."""
    gradients: list[list[Array]] = field(default_factory=list)
    """Gradients of every step, in the order of parameters; none for the fleet, which does not show them."""
    state: dict[str, Array] = field(default_factory=dict)
    """Parameters and buffers at the end."""
    standing_bytes: int = 0
    """Bytes of parameters, their gradients, buffers and the largest batch."""
    peak_bytes: int = 0
    """The highest peak of the measured steps, standing bytes included."""
    first_s: float = 0.0
    """Seconds of the first step; in a door mostly planning."""
    step_s: float = 0.0
    """Seconds of the fastest step."""


Schedule = list[tuple[int, bool]]


def schedule(num_each: int = NUM_EACH, sizes: Sequence[int] = SIZES) -> Schedule:
    """Return the size of each step's batch, and whether it is measured: those of each size, and the first again."""
    steps = [(size, number == num_each - 1) for size in sizes for number in range(num_each)]
    return [*steps, (sizes[0], True)]


class EnoughSeen(Exception):
    """The signal that ends a training early, when it will start again with a budget that an error named."""


def _never() -> bool:
    return False


def train(
    architecture: Architecture,
    door: Door,
    budget_bytes: int,
    folder: Path,
    steps: Schedule,
    is_enough: Callable[[], bool] = _never,
) -> Training:
    """Train an architecture through a door, and measure its memory and time.

    Raises `EnoughSeen` after a step for which ``is_enough`` returns true.
    """
    torch.manual_seed(0)
    model = architecture.make().train()
    result = Training()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = [
        *model.parameters(),
        *model.buffers(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]
    result.step_s = float("inf")
    with door(model, budget_bytes, folder) as run:
        for number, (size, is_measured) in enumerate(steps):
            batch = _begin(architecture, model, number, size)
            standing_bytes = sum(tensor.nbytes for tensor in (*held, *_tensors(batch)))
            result.standing_bytes = max(result.standing_bytes, standing_bytes)
            start_s = time.perf_counter()
            if is_measured:
                report = probe.peak_bytes(lambda: (run(batch), optimizer.step())[0], device="cpu")  # noqa: B023
                result.peak_bytes = max(result.peak_bytes, standing_bytes + report.activation_bytes)
                loss = report.result
            else:
                loss = run(batch)
                optimizer.step()
            taken_s = time.perf_counter() - start_s
            result.first_s, result.step_s = result.first_s or taken_s, min(result.step_s, taken_s)
            result.losses.append(_array(loss))
            result.gradients.append(
                [_array(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
            )
            if is_enough():
                raise EnoughSeen
    result.state = _state(model)
    return result


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().numpy().copy()


def _state(model: nn.Module) -> dict[str, Array]:
    return {name: _array(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _begin(architecture: Architecture, model: nn.Module, number: int, size: int) -> Batch:
    """Return the batch of a step, with all random generators seeded by the step's number."""
    model.zero_grad(set_to_none=False)
    torch.manual_seed(1000 + number)
    batch = architecture.make_batch(size)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(number)
    gc.collect()
    return batch


def _tensors(batch: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def plainly(model: Callable[..., Any], _: int, __: Path) -> Iterator[Step]:
    """Yield a step of eager PyTorch."""

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(model(**batch))
        loss.backward()
        return loss.detach()

    yield step


@contextlib.contextmanager
def offloaded(model: nn.Module, budget_bytes: int, folder: Path) -> Iterator[Step]:
    """Yield a step with `penstock.offload.activations`, to a disk."""
    offloader = offload.activations(model, disk=folder, budget=budget_bytes, min_size=0)
    with contextlib.closing(offloader), plainly(model, budget_bytes, folder) as plain:

        def step(batch: Batch) -> torch.Tensor:
            with offloader:
                return plain(batch)

        yield step


@contextlib.contextmanager
def optimized(model: nn.Module, budget_bytes: int, _: Path) -> Iterator[Step]:
    """Yield a step of `penstock.remat.optimize`, with the loss inside."""
    steps: list[remat.OptimizedStep] = []

    def step(batch: Batch) -> torch.Tensor:
        if not steps:
            steps.append(remat.optimize(lambda batch: loss_of(model(**batch)), [batch], budget_bytes))
        loss: torch.Tensor = steps[0](batch)
        loss.backward()
        return loss.detach()

    try:
        yield step
    finally:
        for planned in steps:
            planned.close()


@contextlib.contextmanager
def compiled(model: nn.Module, budget_bytes: int, folder: Path) -> Iterator[Step]:
    """Yield a step of `penstock.remat.compile`."""
    with plainly(remat.compile(model, budget=budget_bytes), budget_bytes, folder) as step:
        yield step


@contextlib.contextmanager
def compiled_by_name(model: nn.Module, budget_bytes: int, folder: Path) -> Iterator[Step]:
    """Yield a step of ``torch.compile(model, backend="penstock")``."""
    module: Any = torch.compile(model, backend="penstock", options={"budget": budget_bytes})
    with plainly(module, budget_bytes, folder) as step:
        yield step


@contextlib.contextmanager
def by_aot_eager(model: nn.Module, _: int, folder: Path) -> Iterator[Step]:
    """Yield a step of PyTorch's own tracing: what differs or fails here too is not Penstock's fault."""
    module: Any = torch.compile(model, backend="aot_eager")
    with plainly(module, 0, folder) as step:
        yield step


DOORS: dict[str, Door] = {
    "offload": offloaded,
    "optimize": optimized,
    "compile": compiled,
    "string": compiled_by_name,
    "aot_eager": by_aot_eager,
}
"""Doors that take a training loop. The fleet has its own loop: `in_fleet`."""
PEERS = ("aot_eager",)
"""Doors that are not ours and take no budget: they run only if requested."""
NAMES = (*(door for door in DOORS if door not in PEERS), "fleet")


CLIP_NORM = 1.0
JOB_TRAINS_WITH = "AdamW, 2 batches accumulated, clipped"
"""A training with everything that takes memory next to the model: state, accumulated gradients, and their norms."""


def plain_job(architecture: Architecture, steps: Schedule) -> tuple[fleet.Job, Training]:
    """Return a job for the fleet, as `JOB_TRAINS_WITH` says, and the results of plain PyTorch for it."""

    def data() -> list[Batch]:
        generator = torch.random.get_rng_state()
        torch.manual_seed(1000)
        batches = [architecture.make_batch(size) for size, _ in steps]
        torch.random.set_rng_state(generator)
        return batches

    job = fleet.Job(
        name="job",
        model=architecture.make,
        data=data,
        loss=lambda model, batch: loss_of(model(**batch)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        epochs=1,
        accumulate=2,
        clip_norm=CLIP_NORM,
    )
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(job.seed)
    model, result = architecture.make().train(), Training()
    optimizer = job.make_optimizer(list(model.named_parameters()))
    parts: list[torch.Tensor] = []
    for batch in data():
        parts.append(job.loss(model, batch) / job.accumulate)
        parts[-1].backward()
        if len(parts) == job.accumulate:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            result.losses.append(np.asarray(sum(part.item() for part in parts), np.float32))
            parts = []
    result.state = _state(model)
    return job, result


def in_fleet(job: fleet.Job, budget_bytes: int) -> Training:
    """Train a job in a fleet of one device, and measure its units. Raises the error with which the job failed."""
    device = fleet.Device(name="cpu", threads=1)
    start_s = time.perf_counter()
    results = fleet.run([job], [device], budget_bytes, host="1GiB", progress=None, verify=True)
    mine = results[job.name]
    if mine.error is not None:
        raise FleetFailure(mine.error)
    return Training(
        losses=[np.asarray(loss, np.float32) for loss in mine.losses],
        state=_state(mine.model()),
        peak_bytes=results.devices[0].measured_peak_bytes,
        first_s=time.perf_counter() - start_s,
    )


class FleetFailure(Exception):
    """The error of a failed job of a fleet, which keeps only the error's text."""


def difference(expected: Training, actual: Training) -> float | None:
    """Return the largest difference relative to a tensor's largest number; ``None`` if all bits are equal."""
    pairs = list(zip(expected.losses, actual.losses, strict=True))
    for mine, other in zip(expected.gradients, actual.gradients, strict=False):
        pairs += zip(mine, other, strict=True)
    if expected.state.keys() != actual.state.keys():
        return float("inf")
    pairs += [(tensor, actual.state[name]) for name, tensor in expected.state.items()]
    if all(_same_bits(ours, other) for ours, other in pairs):
        return None
    return max(_relative(ours, other) for ours, other in pairs)


def _same_bits(ours: Array, other: Array) -> bool:
    return (ours.shape, ours.dtype) == (other.shape, other.dtype) and ours.tobytes() == other.tobytes()


def _relative(ours: Array, other: Array) -> float:
    if ours.shape != other.shape or not ours.size:
        return 0.0 if ours.shape == other.shape else float("inf")
    mine, others = ours.astype(np.float64), other.astype(np.float64)
    return float(np.abs(mine - others).max() / max(np.abs(mine).max(), 1e-6))


def case(
    architecture: Architecture, door: str, folder: Path, *, share: float = 0.05, steps: Schedule | None = None
) -> dict[str, Any]:
    """Train plainly twice and once through the door, and return the row."""
    steps = steps or schedule()
    expected, again = (train(architecture, plainly, 0, folder, steps) for _ in range(2))
    control = difference(expected, again)
    budget_bytes = expected.standing_bytes + int(share * (expected.peak_bytes - expected.standing_bytes))
    run: Run
    if door == "fleet":
        job, expected_of_job = plain_job(architecture, steps)
        run, compared = (lambda budget, _: in_fleet(job, budget)), expected_of_job
    else:
        run = lambda budget, is_enough: train(architecture, DOORS[door], budget, folder, steps, is_enough)  # noqa: E731
        compared = expected
    row: dict[str, Any] = {
        "name": architecture.name,
        "library": architecture.library,
        "door": door,
        "control": control,
        "standing_bytes": expected.standing_bytes,
        "plain_peak_bytes": expected.peak_bytes,
        "plain_s": expected.step_s,
        "is_finite": bool(np.isfinite(expected.losses).all()),
    }
    if door == "fleet":
        row["optimizer"] = JOB_TRAINS_WITH
    return row | _through(run, compared, control, budget_bytes)


Run = Callable[[int, Callable[[], bool]], Training]
"""Trains within a budget, until a function says that it is enough."""


def _through(run: Run, expected: Training, control: float | None, budget_bytes: int) -> dict[str, Any]:
    """Run within a budget, then within the one that the error names, until no error names one."""
    row: dict[str, Any] = {}
    tried: list[dict[str, Any]] = []
    for attempt in range(1, MOST_ATTEMPTS + 1):
        row = {"budget_bytes": budget_bytes, "is_named": bool(tried)}
        torch._dynamo.reset()
        gc.collect()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            def is_enough(caught: list[warnings.WarningMessage] = caught) -> bool:
                return attempt < MOST_ATTEMPTS and (named_bytes(_said(caught)) or 0) > budget_bytes  # noqa: B023

            try:
                result = run(budget_bytes, is_enough)
            except EnoughSeen:
                pass
            except Exception as error:
                row |= failed(error)
            else:
                row |= _compared(expected, result, control)
                row["is_held"] = result.peak_bytes <= budget_bytes
        row["said"] = _said(caught)
        text = row.pop("text", "") or row["said"]
        tried.append({"budget_bytes": budget_bytes, "text": text[:500]})
        named = named_bytes(text)
        if named is None or named <= budget_bytes:
            break
        budget_bytes = named
    return row | {"tried": tried}


def _said(caught: Sequence[warnings.WarningMessage]) -> str:
    return " | ".join(str(warning.message) for warning in caught if issubclass(warning.category, BudgetNotKeptWarning))


def _compared(expected: Training, result: Training, control: float | None) -> dict[str, Any]:
    apart = difference(expected, result)
    verdict, message = "equal", ""
    if apart is not None:
        is_close = control is not None and apart <= max(10 * control, 1e-5)
        verdict = "close" if is_close else "not equal"
        message = f"apart by {apart:.2g}" + ("" if control is None else f", plain from plain by {control:.2g}")
    return {
        "verdict": verdict,
        "message": message,
        "peak_bytes": result.peak_bytes,
        "first_s": result.first_s,
        "step_s": result.step_s,
    }


def failed(error: BaseException) -> dict[str, Any]:
    """Return the verdict on an error of a door, and its whole text."""
    cause = _cause(error)
    text, kind = str(cause), f"{type(cause).__module__}.{type(cause).__name__}"
    if isinstance(cause, FleetFailure):
        kind, _, text = text.partition(": ")
    kind = kind.removeprefix("builtins.")
    is_ours = kind.startswith("penstock.errors.") and not kind.endswith(".InternalError")
    line = text.strip().split("\n", 1)[0]
    return {
        "verdict": "refused" if is_ours else "failed",
        "message": f"{kind.removeprefix('penstock.errors.')}: {line}",
        "text": text,
        "trace": "" if is_ours else "".join(traceback.format_exception(cause))[-3000:],
    }


def _cause(error: BaseException) -> BaseException:
    """Return the error that was raised inside a backend, without Dynamo's wrapper."""
    inner = getattr(error, "inner_exception", None)
    return error if inner is None else _cause(inner)


def named_bytes(text: str) -> int | None:
    """Return the budget that a message names."""
    match = _NAMED.search(text.replace(",", ""))
    return int(match[1]) if match else None
