"""Jobs, made of factories, and devices: what a user gives to a fleet."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from penstock.arguments import check_fields, checked, must_be
from penstock.tiers import Size
from penstock.units import parse_bytes

Precision = Literal["float32", "bfloat16", "float16"]
"""A precision.

``"float32"`` leaves dtypes alone; the others run forward under autocast, ``"float16"`` with loss scaling.
"""

Update = Literal["device", "host", "auto"]
"""The processor that computes an optimizer's updates; ``"auto"``: the one that is faster, as measured."""

Batch = Any  # whatever the user's data yields: tensors, and tuples, lists and dicts of them
Model = Callable[..., Any]  # the module, or its stand-in when only its last shard is on the device
Loss = Callable[[Model, Batch], torch.Tensor]
"""A function from the model and a batch to a scalar.

It calls the model once: ``lambda model, batch: model(**batch).loss``.
"""

AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class CannotBeCut(Exception):
    """A job turns out to be one that must run uncut. The text is the reason, to stand after "because"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model to train. Factories build everything, so that the fleet decides when and where.

    It trains as this loop does, bit for bit if the order of operations is the same::

        torch.manual_seed(job.seed)
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        data = job.data()
        for batch in data:            # again for each epoch
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The record is wide because it holds all that such a loop decides. Raises ``TypeError`` or ``ValueError`` if a field
    cannot be used.
    """

    name: str
    """A name that is unique in the fleet: letters, digits, ``._-=+,`` and blanks, since it names a folder."""
    model: Callable[[], nn.Module]
    """A factory of the model, in main memory."""
    data: Callable[[], Iterable[Batch]]
    """A factory of an iterable of batches, such as a ``DataLoader``, which is iterated once per epoch."""
    loss: Loss
    """A function from the model and a batch to the loss, a scalar."""
    optimizer: Callable[[Any], torch.optim.Optimizer]
    """A factory of the optimizer.

    It takes the list of parameters, or, if its argument is called ``named_parameters``, ``(name, parameter)`` pairs.
    """
    epochs: int | None = None
    """Passes over the data. Give this or ``steps``."""
    steps: int | None = None
    """Optimizer steps; the data is restarted as often as needed."""
    validation: Callable[[], Iterable[Batch]] | None = None
    """A factory of the validation batches; ``None``: no validation."""
    evaluate_every: int | None = None
    """Steps between validations; ``None``: at the end of each epoch. The job is always validated at its end."""
    metric: Callable[[Model, Batch], Any] | None = None
    """A function like ``loss``, to a scalar or a dict of scalars, averaged over validation batches.

    ``None``: the loss.
    """
    best: tuple[str, Literal["min", "max"]] | None = None
    """A metric of validations and whether less or more of it is better: ``("accuracy", "max")``.

    The checkpoint of the best validation is then kept beside the last one: ``result.model(best=True)``.
    """
    patience: int | None = None
    """Validations in a row that may bring nothing better before the job is stopped; ``None``: no limit.

    Better is what ``best`` says, or else a smaller loss.
    """
    lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    """A factory of the learning-rate scheduler, which is stepped after every optimizer step.

    ``ReduceLROnPlateau`` is stepped after every validation, with its ``"loss"`` or its one metric.
    """
    accumulate: int = 1
    """Batches per optimizer step; each loss is divided by this number.

    Accumulation continues across epochs; an incomplete last step is dropped.
    """
    clip_norm: float | None = None
    """Largest total norm of all gradients, as in ``torch.nn.utils.clip_grad_norm_``; ``None``: no clipping."""
    precision: Precision = "float32"
    """Precision of forward."""
    update: Update = "device"
    """Which processor computes the optimizer's updates of a job on an accelerator.

    ``"host"``: the host does, in a thread of its own, where weights, gradients and states are in host memory. States
    then never cross the link, which carries 12 bytes per parameter and step instead of 28, or of 40 with clipping
    (AdamW, float32, nothing resident). Another processor rounds differently, so that results agree with plain PyTorch
    within rounding, not bit for bit. ``"auto"``: the host where it is faster, as measured in the first steps.
    """
    separable: bool = False
    """Your word that the optimizer updates each parameter from its own gradient, state and group alone.

    PyTorch's do. A job with any other optimizer, or with hooks on its steps, runs uncut: the optimizer steps once,
    whole, and the job has a device to itself until it is over. With your word, which is checked once, it is cut.
    """
    stages: Callable[[nn.Module], Sequence[Callable[..., Any]]] | None = None
    """A function that cuts the model by hand into layers, in order. Each takes the result of the previous one.

    ``None``: the model is traced.
    """
    seed: int = 0
    """Seed of the job's random numbers, as for ``torch.manual_seed``."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """Anything to show next to the results, usually hyperparameters."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise must_be("name", "text", self.name, "Job(name='lr=3e-4', ...)")
        if not self.name or not set(self.name) <= _ALLOWED or self.name.strip(" .") != self.name:
            raise ValueError(
                f"job name {self.name!r}: a name may contain letters, digits, spaces and any of ._-=+, but must not be "
                "empty or begin or end with a space or a dot, for instance 'lr=3e-4'"
            )
        for key in ("model", "data", "loss", "optimizer"):
            factory = getattr(self, key)
            if not callable(factory) or (key == "model" and isinstance(factory, nn.Module)):
                raise TypeError(
                    f"job {self.name!r}: `{key}` must be a function, got {type(factory).__name__}; for instance "
                    f"{_EXAMPLES[key]}"
                )
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"job {self.name!r}: give either epochs=3 or steps=1000")
        for key in ("epochs", "steps", "accumulate", "evaluate_every", "patience"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"job {self.name!r}: `{key}` must be a whole number of at least 1, got {value!r}")
        check_fields(self, "Job(name='lr=3e-4', model=..., data=..., loss=..., optimizer=..., epochs=3)")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"job {self.name!r}: `clip_norm` must be above 0, got {self.clip_norm!r}")
        if self.validation is None and (self.evaluate_every or self.metric or self.best or self.patience):
            raise ValueError(
                f"job {self.name!r}: `evaluate_every`, `metric`, `best` and `patience` need validation data; give "
                "validation=lambda: batches"
            )

    def with_changes(self, **changes: Any) -> "Job":
        """Return the same job with other fields, as for a clone: ``job.with_changes(name="b", optimizer=...)``."""
        return replace(self, **changes)

    @checked("job.make_optimizer(list(model.named_parameters()))")
    def make_optimizer(self, named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        """Call the optimizer's factory with parameters or named parameters, whichever it takes."""
        if not named:
            raise ValueError("`named` must have a parameter: job.make_optimizer(list(model.named_parameters()))")
        try:
            first = next(iter(inspect.signature(self.optimizer).parameters), "")
        except (TypeError, ValueError):  # built in, or a class without a signature
            first = ""
        return self.optimizer(named if first == "named_parameters" else [parameter for _, parameter in named])


_ALLOWED = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-=+, ")
_EXAMPLES = {
    "model": "model=lambda: GPT2LMHeadModel(config)",
    "data": "data=lambda: DataLoader(dataset, batch_size=8)",
    "loss": "loss=lambda model, batch: model(**batch).loss",
    "optimizer": "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """A recipe with which another process, or a clone, makes a job again: ``make(**parameters)``."""

    make: Callable[..., Job]
    """A function from hyperparameters to a job."""
    path: str
    """Location of the function, as ``"module:function"`` or ``"file.py:function"``."""
    parameters: Mapping[str, Any]
    """The arguments that it was called with."""

    def __post_init__(self) -> None:
        check_fields(self, "JobSource(make=make_job, path='jobs.py:make_job', parameters={'lr': 1e-3})")


@dataclass(slots=True, kw_only=True)
class Ablation:
    """Parts of the engine that go beyond training one job after the other, switched off for comparison."""

    double_buffer: bool = True
    """Whether the next unit's bytes are copied in while one computes."""
    sharp: bool = True
    """Whether a device may switch to another job before one is over."""
    recompute: bool | None = None
    """Whether backward runs forward again; ``None``: where it is cheaper."""
    vertical: bool = True
    """Whether all mini-batches of a step pass one shard before the next, where that moves fewer bytes."""

    def __post_init__(self) -> None:
        check_fields(self, "Ablation(double_buffer=False)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of a fleet: ``Device(name="cuda:0", budget="40GiB")`` or ``Device(name="cpu", threads=1)``."""

    name: str
    """``"cuda:0"``, or ``"cpu"``, which means a share of main memory and of the cores."""
    budget: Size | None = None
    """Bytes that training may take on it at its true peak; ``None``: the fleet's budget."""
    threads: int | None = None
    """Intra-op threads of a CPU device; ``None``: an equal share of PyTorch's."""

    def __post_init__(self) -> None:
        check_fields(self, "Device(name='cuda:0', budget='40GiB')")
        try:
            kind = torch.device(self.name).type
        except RuntimeError as error:
            raise ValueError(
                f"`devices` must name 'cpu' or accelerators, got {self.name!r}: fleet.Device(name='cuda:0')"
            ) from error
        if self.threads is not None and (kind != "cpu" or self.threads < 1):
            raise ValueError(
                f"device {self.name!r}: `threads` must be at least 1 and is for CPU devices only, got {self.threads}"
            )
        if self.budget is not None:
            parse_bytes(self.budget)
