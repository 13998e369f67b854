"""The doors of `benchmarks.loops`: a loop is written once, against `Door`, and runs plainly and through each of them.

@loop
def classifier(door):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)      # the model to call
    for number in door.steps(8):            # late steps are measured
        with door:                          # around a step
            loss = net(torch.randn(4, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)                     # compared bit for bit, and so are model, optimizer and random state
"""

import contextlib
import ctypes
import gc
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock import fleet, offload, remat

Array = np.ndarray[Any, Any]
"""Results to compare are kept as arrays, since live tensors of a process count in its peak."""
NUM_MEASURED = 4
"""Steps at the end of a loop that are measured: by then every plan has settled."""


class Inapplicable(Exception):
    """The signal that a loop has no form through a door, such as a training without an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop as people write it."""

    name: str
    """Name of the function."""
    theme: str
    """Name of its file, without the prefix."""
    run: Callable[["Door"], None]
    """The loop."""
    job: Callable[[], fleet.Job] | None
    """The same as a job of a fleet; ``None``: it has no such form."""


LOOPS: dict[str, Loop] = {}


def loop(
    function: Callable[["Door"], None] | None = None,
    *,
    job: Callable[[], fleet.Job] | None = None,
) -> Any:
    """Register a loop; a decorator with or without arguments."""

    def register(function: Callable[["Door"], None]) -> Callable[["Door"], None]:
        name, theme = function.__name__, function.__module__.rpartition("loops_")[2]
        assert name not in LOOPS, name
        LOOPS[name] = Loop(name=name, theme=theme, run=function, job=job)
        return function

    return register if function is None else register(function)


class Meter:
    """Reads what `loops_meter.c` counts, where it is preloaded; elsewhere all is 0."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """The highest peak of the measured steps."""
        self.standing_bytes = 0
        """The most bytes held at the start of a measured step."""
        counter = ctypes.CDLL(None)
        self._counter = counter if hasattr(counter, "loops_meter_now") else None
        for name in ("loops_meter_now", "loops_meter_peak"):
            if self._counter is not None:
                getattr(self._counter, name).restype = ctypes.c_longlong

    def begin(self) -> None:
        if self._counter is not None:
            self.standing_bytes = max(self.standing_bytes, self._counter.loops_meter_now())
            self._counter.loops_meter_begin()

    def end(self) -> None:
        if self._counter is not None:
            self.peak_bytes = max(self.peak_bytes, self._counter.loops_meter_peak())


@dataclass(kw_only=True)
class Results:
    """What a run leaves to be compared."""

    values: dict[str, Array] = field(default_factory=dict)
    """Notes, and tensors of models and optimizers at the end, by name."""
    peak_bytes: int = 0
    """The highest peak of the measured steps; 0 if none was measured."""
    standing_bytes: int = 0
    """The most bytes held at the start of a measured step."""


class Door:
    """Plain PyTorch, and the base of the doors."""

    def __init__(self, budget_bytes: int = 0, folder: Path | None = None):
        self._budget_bytes, self._meter = budget_bytes, Meter()
        self.folder = folder or Path(tempfile.mkdtemp())
        self._notes: list[Any] = []
        self._compared: list[Any] = []

    def train(self, model: Any, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Take a model, or several with one optimizer, and return what to call."""
        self.also(model, optimizer)
        parts = list(model) if isinstance(model, list | tuple) else [model]
        calls = self._take(parts, optimizer)
        return calls if isinstance(model, list | tuple) else calls[0]

    def also(self, *things: Any) -> None:
        """Compare these at the end, too: modules, optimizers, tensors, and containers of them."""
        self._compared += [thing for thing in things if thing is not None]

    def note(self, *values: Any) -> None:
        """Compare these, as they are now."""
        self._notes += [as_arrays(value) for value in values]

    def steps(self, number: int) -> Iterator[int]:
        """Yield the numbers of steps."""
        for step in range(number):
            if step >= number - NUM_MEASURED:
                self._meter.begin()
            yield step
            if step >= number - NUM_MEASURED:
                self._meter.end()

    def __enter__(self) -> "Door":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def forget(self) -> None:
        """Drop what was taken without closing it, as a cell does that runs again, or a search."""
        self._compared.clear()

    def close(self) -> None:
        """Close what was taken."""

    def _take(self, models: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Any]:
        return list(models)

    def results(self) -> Results:
        """Close, and return what to compare."""
        state = torch.random.get_rng_state().numpy().copy()
        self.close()
        values: dict[str, Array] = {"random state": state}
        for number, note in enumerate(self._notes):
            values |= {f"note {number}{key}": array for key, array in note.items()}
        for number, thing in enumerate(self._compared):
            kind = type(thing).__name__
            values |= {f"{kind} {number}{key}": array for key, array in as_arrays(thing).items()}
        return Results(values=values, peak_bytes=self._meter.peak_bytes, standing_bytes=self._meter.standing_bytes)


def as_arrays(thing: Any, path: str = "", seen: set[int] | None = None) -> dict[str, Array]:
    """Return every number in a module, an optimizer, a tensor, or a container or object of them, by its path."""
    seen = seen if seen is not None else set()
    if isinstance(thing, torch.Tensor):
        return {path: as_array(thing)}
    if isinstance(thing, bool | int | float | np.ndarray | np.generic):
        return {path: np.asarray(thing).copy()}
    if isinstance(thing, nn.Module):
        return as_arrays(dict(thing.state_dict()), path, seen)
    if isinstance(thing, torch.optim.Optimizer):
        return as_arrays(thing.state_dict(), path, seen)
    if id(thing) in seen or thing is None or isinstance(thing, str | bytes) or callable(thing):
        return {}
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        pairs = list(thing.items())
    elif isinstance(thing, list | tuple | set):
        pairs = list(enumerate(thing))
    else:
        pairs = list(getattr(thing, "__dict__", {}).items())
    found: dict[str, Array] = {}
    for key, value in pairs:
        label = key if isinstance(key, str | int) else type(key).__name__
        found |= as_arrays(value, f"{path}.{label}", seen)
    return found


def as_array(tensor: torch.Tensor) -> Array:
    dense = tensor.detach()
    if dense.is_nested:
        dense = torch.nested.to_padded_tensor(dense, 0.0)
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.dtype is torch.bfloat16:
        dense = dense.float()
    if isinstance(dense, nn.parameter.UninitializedTensorMixin):
        return np.zeros(0)
    array: Array = dense.cpu().resolve_conj().resolve_neg().contiguous().numpy().copy()
    return array


class Activations(Door):
    """`penstock.offload.activations` over all models that were taken."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._models: list[nn.Module] = []
        self._offloader: offload.Offloader | None = None
        self._entered: offload.Offloader | None = None

    def _take(self, models: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Any]:
        self.close()
        self._models += models
        return list(models)

    def __enter__(self) -> Door:
        if self._offloader is None:
            whole = self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models)
            self._offloader = offload.activations(whole, disk=self.folder, budget=self._budget_bytes, min_size="16KiB")
        self._entered = self._offloader
        self._entered.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None  # a loop may forget it inside
        assert entered is not None
        entered.__exit__(kind, error, trace)

    def forget(self) -> None:
        super().forget()
        self._models, self._offloader = [], None

    def close(self) -> None:
        if self._offloader is not None:
            self._offloader.close()
            self._offloader = None


class WholeTraining(Door):
    """`penstock.offload.training`, one for each model that was taken; all are entered around a step."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._trainings: list[offload.Training] = []
        self._entered: contextlib.ExitStack | None = None

    def _take(self, models: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Any]:
        if optimizer is None:
            raise Inapplicable("no optimizer")
        whole = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._trainings.append(offload.training(whole, optimizer, budget=self._budget_bytes, disk=self.folder))
        return list(models)

    def __enter__(self) -> Door:
        with contextlib.ExitStack() as stack:
            for training in self._trainings:
                stack.enter_context(training)
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._entered is not None
        self._entered.__exit__(kind, error, trace)

    def forget(self) -> None:
        super().forget()
        self._trainings = []

    def close(self) -> None:
        while self._trainings:
            self._trainings.pop().close()


class Compiled(Door):
    """`penstock.remat.compile` of each model."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._compiled: list[Any] = []

    def _take(self, models: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Any]:
        made = [remat.compile(model, budget=self._budget_bytes, optimizer=optimizer) for model in models]
        self._compiled += made
        return list(made)

    def forget(self) -> None:
        super().forget()
        self._compiled = []

    def close(self) -> None:
        while self._compiled:
            self._compiled.pop().close()


class CompiledByName(Door):
    """``torch.compile(model, backend="penstock")``."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._compiled: list[Any] = []
        """What it returned, which loops keep, also those that call the original."""

    def _take(self, models: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Any]:
        options: Any = {"budget": self._budget_bytes}
        self._compiled += [torch.compile(model, backend="penstock", options=options) for model in models]
        return self._compiled[-len(models) :]

    def forget(self) -> None:
        super().forget()
        self._compiled = []


class ByAotEager(Door):
    """PyTorch's own tracing: what differs or fails here too is not Penstock's fault."""

    def _take(self, models: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Any]:
        return [torch.compile(model, backend="aot_eager") for model in models]


DOORS: dict[str, type[Door]] = {
    "activations": Activations,
    "training": WholeTraining,
    "compile": Compiled,
    "string": CompiledByName,
}
TRACING = ("compile", "string")
NAMES = (*DOORS, "fleet")


def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # as loops do
    random.seed(0)


def run_once(which: Loop, door: Door) -> Results:
    """Run a loop through a door from the usual seeds."""
    seeded()
    try:
        which.run(door)
        return door.results()
    except BaseException:
        with contextlib.suppress(Exception):
            door.results()
        raise
    finally:
        torch._dynamo.reset()
        gc.collect()


def plain_job(job: fleet.Job) -> Results:
    """Train a job as its documentation says, in plain PyTorch."""
    seeded()
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.make_optimizer(list(model.named_parameters()))
    scheduler = job.lr_scheduler(optimizer) if job.lr_scheduler else None
    door = Door()
    door.also(model)
    batches = list(job.data())
    assert job.steps is not None
    waiting = iter(())
    for _ in door.steps(job.steps):
        parts = []
        for _ in range(job.accumulate):
            batch = next(waiting, None)
            if batch is None:
                waiting = iter(batches)
                batch = next(waiting)
            loss = job.loss(model, batch) / job.accumulate
            loss.backward()
            parts.append(loss.item())
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        door.note(np.asarray(sum(parts), np.float32))
    results = door.results()
    del results.values["random state"]
    return results


class FleetFailure(Exception):
    """The error of a failed job of a fleet, which keeps only the error's text."""


def in_fleet(job: fleet.Job, budget_bytes: int) -> Results:
    """Train a job in a fleet of one device, which measures its units."""
    seeded()
    device = fleet.Device(name="cpu", threads=1)
    results = fleet.run([job], [device], budget_bytes, host="1GiB", progress=None, verify=True)
    mine = results[job.name]
    if mine.error is not None:
        raise FleetFailure(mine.error)
    door = Door()
    door.also(mine.model())
    for loss in mine.losses:
        door.note(np.asarray(loss, np.float32))
    found = door.results()
    del found.values["random state"]
    found.peak_bytes = results.devices[0].measured_peak_bytes
    return found
