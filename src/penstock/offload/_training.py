"""Training of a model whose parameters, gradients and optimizer state exceed the device, in the user's own loop."""

import atexit
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from penstock.arguments import checked
from penstock.errors import BudgetError, ForkedProcessError, PenstockError
from penstock.offload import _checkpoint
from penstock.offload._made import CALL, Update, device_of, places
from penstock.offload._meter import Meter
from penstock.offload._on_host import HostUpdates
from penstock.offload._operators import id_or_zero
from penstock.offload._page import Kind
from penstock.offload._pages import Pages
from penstock.offload._past import do_all_pending, do_pending
from penstock.offload._statistics import Held, TrainingStatistics
from penstock.offload._taken import Taken, nbytes_of
from penstock.offload._updates import Updates
from penstock.offload._watch import Watch
from penstock.probe import can_record, held_bytes
from penstock.stepping import refuse_whole_optimizers, state_share
from penstock.tiers import Budget, DiskSpec, Event, Size, waterfall_for
from penstock.units import format_bytes

_CALL_PARAMETERS = CALL.replace("offload.training", "offload.parameters")
_PARTS = 16
"""Divisor of the budget that gives the size of a checkpoint's files. A file is larger only if a single tensor is."""


@checked(CALL)
def training(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    budget: Size | Budget | None = None,
    *,
    host: Size | None = None,
    disk: DiskSpec = None,
    device: str | torch.device | None = None,
    update_in_backward: bool = False,
    update: Update = "device",
) -> "Training":
    """Train a model whose parameters, gradients and optimizer state exceed the device, in your own loop.

    >>> training = penstock.offload.training(model, optimizer, budget="22GiB", disk="/nvme")  # doctest: +SKIP
    >>> for batch in loader:  # doctest: +SKIP
    ...     with training:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> training.close()  # doctest: +SKIP

    Parameters, gradients and states of 16 KiB and more stay on the device as long as the budget has room. Otherwise
    they are there only while an operator works on them, and at other times in host memory (on an accelerator, ``host``)
    or on ``disk``. Results are bit-identical to plain PyTorch. On a machine without an accelerator main memory is the
    device, and what leaves it goes to disk.

    Args:
        model: on the device, or on the CPU to be trained there; its parameters are taken over at once. Or a function
            that makes it: then parameters leave while it runs, and the whole model is never on the device. Afterwards
            the model is ``training.model``.
        optimizer: any of PyTorch's but L-BFGS, or your own, if it updates a parameter from that parameter, its
            gradient, its state and its group alone. It steps one parameter after the other. Or a function that makes it
            from the parameters. Afterwards the optimizer is ``training.optimizer``.
        budget: the true peak of the device in every step but the first of its kind, which is measured: bytes, a text
            such as ``"22GiB"``, or a `penstock.tiers.Budget`, which names all tiers.
        host: bytes of host memory to use below an accelerator.
        disk: a directory on an SSD, several, or a dict of directories and sizes.
        device: where to train. By default it is where the model is, or, if a function makes the model, the accelerator
            that this process uses, else the CPU. A model that is elsewhere is moved there one parameter at a time.
        update_in_backward: update each parameter as soon as its gradient is complete, so that gradients never leave the
            device. With this you promise one backward per step, followed by ``optimizer.step()``, without clipping,
            scaling or accumulation. Then results are the same.
        update: which processor computes the optimizer's updates. ``"host"``: the host does, in a thread of its own, for
            parameters of an accelerator whose weight, gradient and states are in host memory. States then never cross
            the link, which carries 12 bytes per parameter and step instead of 36 (AdamW, float32, nothing resident).
            Under autocast it carries 6, since weights and gradients travel in half precision, for 2 more bytes of host
            memory. Another processor rounds differently, so that results agree with plain PyTorch within rounding, not
            bit for bit. ``"auto"``: the host where it is faster, as measured in the first steps.

    Raises ``TypeError`` and ``ValueError`` for arguments that cannot be used, ``FileNotFoundError`` or
    ``PermissionError`` for a directory that cannot be used, and ``BudgetError`` if tiers have no room for parameters,
    gradients and optimizer state, or, after a first step, if an operator needs more than the budget. Inside a step it
    raises ``TierReadError`` if bytes cannot be read back: begin again from the last checkpoint. What cannot be written
    stays on the device, you get one warning (`TierDegradedWarning`), and the step goes on.
    """
    account, where = places(model, optimizer, budget, host, disk, device, update)
    return Training(model, optimizer, account, where, update_in_backward=update_in_backward, update=update)


@checked(_CALL_PARAMETERS)
def parameters(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    budget: Size | Budget | None = None,
    *,
    host: Size | None = None,
    disk: DiskSpec = None,
    device: str | torch.device | None = None,
    update_in_backward: bool = False,
    update: Update = "device",
) -> "Training":
    """Train as `training` does, but leave activations on the device, or to checkpointing or `activations`.

    The budget is still that of the whole step: parameters, gradients and optimizer state get what activations leave.
    Arguments, result and errors are those of `training`.
    """
    account, where = places(model, optimizer, budget, host, disk, device, update)
    return Training(
        model,
        optimizer,
        account,
        where,
        update_in_backward=update_in_backward,
        update=update,
        moves_activations=False,
    )


class Training:
    """A context manager, made by `training`, to enter around each step; ``close`` it at the end."""

    model: nn.Module
    """The model that was given, or that the function made."""
    optimizer: torch.optim.Optimizer
    """The optimizer that was given, or that the function made."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        account: Budget,
        device: torch.device,
        *,
        update_in_backward: bool,
        update: Update,
        moves_activations: bool = True,
    ):
        assert account.device_bytes is not None
        self._device, self._updates_in_backward = device, update_in_backward
        self._wants_host = update == "host"
        self._waterfall = waterfall_for(device, account)
        self._pages = Pages(self._waterfall, account.device_bytes, device)
        self._num_steps = 0
        self._begun_s: float | None = None
        self._ended_s = 0.0
        self.disks = tuple(account.disk_bytes)
        """Directories of the disk tiers."""
        self._last: tuple[dict[Kind, int], dict[Kind, int]] = ({}, {})
        self._before = self._last
        self._measured_peak_bytes: int | None = None
        self._meter: Meter | None = None
        self._is_entered = self._is_closed = False
        self._forget_updates: Callable[[], None] = lambda: None
        self._undo = contextlib.ExitStack()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._watch = Watch(self._pages, device)
        try:
            self._watch.begin()  # now, since parameters may leave the device from here on
        except ValueError:
            self._waterfall.close()
            raise
        try:
            self.model, self.optimizer = self._made(model, optimizer)
            self._move()
            self._taken = Taken(self._pages, self.model, device)
            self._refuse_too_much(account.device_bytes)
            casts = self._watch.casts
            casts.name, casts.updates_on_host = self._taken.name, self._wants_host
            on_host = (
                None
                if update == "device"
                else HostUpdates(self.optimizer, self._pages, casts, last_first=update_in_backward)
            )
            self._updates = Updates(self.optimizer, self._pages, self._taken, on_host, is_measured=update == "auto")
            self._forget_updates = self._updates.forget
            self._taken.on_gradient = self._updates.in_backward if update_in_backward else self._complete
            self._undo.callback(self._taken.end)
            self._taken.parameters()
            self._taken.states(self.optimizer)
            self._undo.callback(self._updates.begin())
            for handle in (
                self.optimizer.register_state_dict_pre_hook(lambda *_: do_all_pending(self._pages)),
                self.optimizer.register_load_state_dict_pre_hook(lambda *_: do_all_pending(self._pages)),
                self.optimizer.register_load_state_dict_post_hook(lambda _: self._taken.states(self.optimizer)),
            ):
                self._undo.callback(handle.remove)
            self._pages.flush()
            self._pages.others_bytes = held_bytes(device)
            if self._pages.others_bytes > account.device_bytes:
                raise BudgetError(
                    f"`budget` must be more than {format_bytes(self._pages.others_bytes)}, got "
                    f"{format_bytes(account.device_bytes)}: the device already holds that much that cannot be "
                    "moved, because it does not belong to this model or its optimizer, or is too small"
                )
        except BaseException:
            self.close(discard=not isinstance(model, nn.Module))
            raise
        self._watch.adopts_results = moves_activations
        _open.add(self)

    def __enter__(self) -> Self:
        self._refuse_unusable()
        if self._thread != threading.get_ident():
            raise ValueError(
                "a training must be entered in the thread that made it: it sees no operators of other threads"
            )
        if self._is_entered:
            raise ValueError("this training is entered already; enter it once around a step: with training: ...")
        if self._updates.is_broken:
            raise PenstockError(
                "the update of a parameter was interrupted half way; go on from the last checkpoint: "
                "training.load('checkpoints/step-100')"
            )
        self._is_entered = True
        self._begun_s = time.perf_counter() if self._begun_s is None else self._begun_s
        self._refuse_parallel()
        self._taken.parameters()  # some may be new or have new storages
        self._pages.begin_step()
        self._watch.norms.begin_step()
        self._watch.casts.begin_step()
        if self._pages.wants_measure and can_record(self._device):
            self._measure()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_entered = False
        meter, self._meter = self._meter, None
        measured: Sequence[int] = ()
        if meter is not None:
            measured = meter.close(is_whole=kind is None)
            self._measured_peak_bytes = meter.peak_bytes or self._measured_peak_bytes
        if kind is not None:
            self._pages.end_step((), is_whole=False)
            return
        self._num_steps += 1
        self._ended_s = time.perf_counter()
        now = dict(self._pages.fetched_bytes), dict(self._pages.parked_bytes)
        fetched, parked = (
            {kind: size - before.get(kind, 0) for kind, size in one.items()}
            for one, before in zip(now, self._before, strict=True)
        )
        self._last, self._before = (fetched, parked), now
        self._pages.end_step(measured, is_whole=True)
        if meter is not None and not measured and meter.peak_bytes > self._pages.budget_bytes:
            raise BudgetError(
                f"`budget` must be at least {meter.peak_bytes} ({format_bytes(meter.peak_bytes)}), got "
                f"{format_bytes(self._pages.budget_bytes)}: all tensors of this step "
                "are smaller than 16 KiB, and such tensors stay on the device"
            )

    def _measure(self) -> None:
        """Begin to measure this step, or wait for the next one if another thread holds a page on a CPU, as while it
        saves.
        """
        with self._pages.lock:
            if self._device.type == "cpu":
                self._pages.flush()  # the profiler does not report when memory from before it is freed
                if any(page.held_bytes() for page in self._pages.pinned):
                    return
            self._meter = Meter(self._pages, self._device)

    @contextlib.contextmanager
    @checked("with training.whole(model.head)")
    def whole(self, module: nn.Module | None = None) -> Iterator[None]:
        """Keep everything of ``module``, or of the model and its optimizer, on the device while the block runs.

        The budget does not matter here. You can read and write all of it in any way: ``state_dict``, ``torch.save``,
        ``save_pretrained``, ``numpy``.
        """
        if self._is_closed:
            yield
            return
        self._refuse_unusable()
        if module is None:
            self._watch.casts.forget()
        with self._watch.entered(), self._pinned(module):
            yield

    @contextlib.contextmanager
    def _pinned(self, module: nn.Module | None) -> Iterator[None]:
        wanted = None if module is None else {id_or_zero(one) for one in module.parameters()}
        do_pending(list(self._pages) if wanted is None else [one for one in self._pages if one.identity in wanted])
        with self._pages.lock:
            pages = [page for page in self._pages if wanted is None or page.identity in wanted]
            added = set(pages) - self._pages.pinned
            self._pages.pinned |= added
        try:
            for page in pages:
                self._pages.need([page], [page])
            yield
        finally:
            with self._pages.lock:
                self._pages.pinned -= added

    @checked("training.save('checkpoints/step-100', extra={'scheduler': scheduler.state_dict()})")
    def save(self, path: str | os.PathLike[str], *, extra: Any = None) -> None:  # any: see `load`
        """Write a checkpoint between two steps, one part at a time, within the budget.

        ``path`` becomes a folder, which appears as a whole or not at all; an older one there is replaced. It holds the
        model's parameters and buffers as safetensors with the names of ``state_dict`` (which ``from_pretrained`` reads
        if there is also a ``config.json``), the optimizer's states and groups, and the states of PyTorch's random
        generators. Gradients are not stored. ``extra`` is whatever else you need to continue, made of numbers, texts,
        tensors, lists and dicts.

        Raises ``CheckpointError`` if it cannot be written; an older one is then untouched.
        """
        self._refuse_in_step("saved")
        with self._room_for_parts() as part_bytes:
            _checkpoint.save(Path(path), self.model, self.optimizer, self._device, extra, part_bytes)

    @checked("training.save_weights('model')")
    def save_weights(self, path: str | os.PathLike[str], *, names: Collection[str] | None = None) -> None:
        """Write the model's parameters and buffers into a folder, one part at a time, within the budget.

        They are safetensors with the names of ``state_dict``, in several files with an index if they are large.
        Together with a ``config.json`` that is what ``from_pretrained`` reads. ``names`` selects some of them; for a
        tensor with several names, any of these will do.

        Raises ``CheckpointError`` if they cannot be written.
        """
        self._refuse_in_step("saved")
        with self._room_for_parts() as part_bytes:
            _checkpoint.save_weights(Path(path), self.model, names, part_bytes)

    @checked("extra = training.load('checkpoints/step-100')")
    def load(self, path: str | os.PathLike[str]) -> Any:  # any: what `save` was given
        """Continue from a folder that `save` wrote; return its ``extra``.

        Parameters, buffers, optimizer states and groups are restored, and so are the states of PyTorch's random
        generators. If the same batches follow, the losses are bit-identical to those of a run that was not interrupted.

        Raises ``CheckpointError`` for files that are damaged or belong to another model, before anything has changed.
        """
        self._refuse_in_step("loaded")
        put = _checkpoint.load(Path(path), self.model, self.optimizer, self._device)
        self._updates.forget()  # due updates are of weights that are about to be replaced
        self._pages.begin_step()  # so that states become pages as soon as they are made
        try:
            with self._watch.entered():
                return put()
        finally:
            self._pages.end_step((), is_whole=False)
            self._taken.states(self.optimizer)

    @property
    def is_entered(self) -> bool:
        """Whether a step is under way."""
        return self._is_entered

    @property
    def fits(self) -> bool:
        """Whether the budget has room for all parameters, gradients and states, which `close` brings to the device."""
        return self._pages.others_bytes + self._state_bytes <= self._pages.budget_bytes

    @property
    def _state_bytes(self) -> int:
        """Bytes of all pages but those that are casts of others."""
        return sum(page.size_bytes for page in self._pages if page.wide is None)

    def park(self) -> None:
        """Move everything off the device now, to leave the memory to others until the next step."""
        if not self._is_closed:
            self._refuse_unusable()
            self._pages.flush()

    def timeline(self) -> tuple[Held, ...]:
        """Return what was on the device in the course of a step, for a report; empty before a step has been recorded.

        The third step of each kind is recorded, which is the first after the measured ones. The last recording counts.
        """
        others_bytes = self._pages.others_bytes
        return tuple(
            Held(at_s=at_s, held_bytes={kind.value: size for kind, size in held.items()}, others_bytes=others_bytes)
            for at_s, held in self._pages.timeline.samples
        )

    def trace(self) -> tuple[Event, ...]:
        """Return the latest copies and waits, for `penstock.tiers.write_trace` and reports."""
        return self._waterfall.events.since()

    @property
    def budget_bytes(self) -> int:
        """The true peak that a step may have, in bytes."""
        return self._pages.budget_bytes

    def statistics(self) -> TrainingStatistics:
        """Return what it has done so far."""
        return TrainingStatistics(
            num_steps=self._num_steps,
            state_bytes=self._state_bytes,
            num_parameters=sum(one.numel() for one in self.model.parameters()),
            fetched_bytes=sum(self._pages.fetched_bytes.values()),
            parked_bytes=sum(self._pages.parked_bytes.values()),
            step_fetched={kind.value: size for kind, size in self._last[0].items()},
            step_parked={kind.value: size for kind, size in self._last[1].items()},
            written_to_disk_bytes=self._waterfall.statistics().written_to_disk_bytes,
            stall_s=self._pages.stall_s,
            wall_s=0.0 if not self._num_steps or self._begun_s is None else self._ended_s - self._begun_s,
            num_host_updates=self._updates.num_on_host,
            held_bytes=self._pages.held_bytes(),
            measured_peak_bytes=self._measured_peak_bytes,
        )

    @checked("training.close()")
    def close(self, *, discard: bool = False) -> None:
        """Bring everything back to the device, whatever the budget is, and stop managing it.

        ``discard`` leaves behind what is not on the device, for a model that would not fit. Save it before, a part at a
        time: ``with training.whole(module): torch.save(module.state_dict(), path)``.
        """
        if self._is_closed:
            return
        if self._is_entered:
            self.__exit__(RuntimeError, RuntimeError("closed in mid-step"), None)
        if self._process != os.getpid():
            self._pages.drop_all()
        elif discard:
            self._forget_updates()
            self._pages.drop_all()
        else:
            do_pending(list(self._pages))
            self._forget_updates()  # no update is due any more; this ends the thread that computed some
            self._watch.casts.forget()
            self._pages.bring_back()
        self._is_closed = True
        _open.discard(self)
        self._undo.close()
        self._watch.end()
        self._waterfall.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a training cannot be copied or pickled, since it owns lanes and files; make another: {CALL}")

    @contextlib.contextmanager
    def _room_for_parts(self) -> Iterator[int]:
        """Yield the bytes of one file, and leave the memory free that writing it takes."""
        part_bytes = max(self._pages.budget_bytes // _PARTS, max((one.size_bytes for one in self._pages), default=0))
        with self._watch.entered(), self._pages.room(2 * part_bytes):
            do_all_pending(self._pages)
            yield part_bytes

    def _refuse_in_step(self, what: str) -> None:
        self._refuse_unusable()
        if self._is_entered:
            raise ValueError(f"a training must be {what} between two steps, outside of `with training:`")

    def _refuse_parallel(self) -> None:
        """Raise ``ValueError`` if DDP would sum a gradient that an update in backward has already used."""
        if not self._updates_in_backward or self._num_steps > 1 or not torch.distributed.is_initialized():
            return
        own = {id(one) for one in self.model.parameters()}
        for one in gc.get_objects():
            if type(one).__name__ == "DistributedDataParallel" and own & {id(each) for each in one.parameters()}:
                raise ValueError(
                    "update_in_backward=True updates each parameter before DistributedDataParallel has summed its "
                    "gradient over the ranks; leave it out"
                )

    def _refuse_unusable(self) -> None:
        if self._is_closed:
            raise ValueError(f"this training is closed; make another: {CALL}")
        if self._process != os.getpid():
            raise ForkedProcessError(f"a training belongs to the process that made it; make one here: {CALL}")

    # What the beginning makes

    def _made(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and the optimizer; those given as functions are made within the budget.

        What they make leaves the device while they run.
        """
        self._pages.others_bytes = held_bytes(self._device)
        self._pages.begin_step()
        try:
            if not isinstance(model, nn.Module):
                model = model()
                if not isinstance(model, nn.Module):
                    raise TypeError(f"`model` must return a torch.nn.Module, got {type(model).__name__}: {CALL}")
                if device_of(model) != self._device:
                    raise ValueError(
                        f"`model` must return a model on `device`={self._device}, got one on {device_of(model)}: "
                        "with torch.device('cuda'): return Model()"
                    )
            if not isinstance(optimizer, torch.optim.Optimizer):
                optimizer = optimizer(model.parameters())
                if not isinstance(optimizer, torch.optim.Optimizer):
                    raise TypeError(
                        f"`optimizer` must return a torch optimizer, got {type(optimizer).__name__}: {CALL}"
                    )
            refuse_whole_optimizers(optimizer, CALL)
            if self._wants_host and any(one.get("fused") or one.get("capturable") for one in optimizer.param_groups):
                raise ValueError(
                    "fused and capturable optimizers keep numbers on the device, which an update on the host cannot "
                    f"use: make one without these options, as AdamW(parameters, lr=1e-4), or leave out update=: {CALL}"
                )
        finally:
            self._pages.end_step((), is_whole=False)
        return model, optimizer

    def _complete(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has been added to."""
        self._taken.gradient(parameter)
        if parameter.grad is not None and self._is_entered:
            self._watch.norms.take(parameter.grad)

    def _move(self) -> None:
        """Move parameters and buffers that are elsewhere to the device; they leave it as more come."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if all(one.device == self._device for one in tensors):
            return
        self._pages.begin_step()
        try:
            for one in tensors:
                one.data = one.data.to(self._device)
                if one.grad is not None:
                    one.grad = one.grad.to(self._device)
            for state in self.optimizer.state.values():
                for field, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        state[field] = value.to(self._device)
        finally:
            self._pages.end_step((), is_whole=False)

    def _refuse_too_much(self, device_bytes: int) -> None:
        """Raise ``BudgetError`` if parameters, gradients and states do not fit into all tiers together."""
        own = sum(map(nbytes_of, self.model.parameters()))
        trained = [one for one in self.model.parameters() if one.requires_grad]
        trained_bytes = sum(map(nbytes_of, trained))
        states = int(trained_bytes * state_share(self.optimizer, trained, self.optimizer.state))
        below = sum(tier.capacity_bytes - tier.used_bytes for tier in self._waterfall.tiers)
        if own + trained_bytes + states > device_bytes + below:
            raise BudgetError(
                f"training needs {format_bytes(own)} of parameters, {format_bytes(trained_bytes)} of gradients and "
                f"{format_bytes(states)} of optimizer state, but there are only {format_bytes(device_bytes)} on the "
                f"device and {format_bytes(below)} in the tiers below it. Give more room: {CALL}"
            )


_open: "weakref.WeakSet[Training]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all trainings, since threads and PyTorch's stack of modes must not outlive the interpreter.

    Bytes need no care, since they vanish with the process.
    """
    for one in list(_open):
        if one._process == os.getpid():
            with contextlib.suppress(Exception):
                one.close(discard=True)
