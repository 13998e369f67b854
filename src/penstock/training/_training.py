"""Training of a model whose parameters, gradients and optimizer state exceed the device, in the user's own loop."""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from penstock.arguments import checked
from penstock.errors import BudgetError, BudgetNotKeptWarning, ForkedProcessError, PenstockError
from penstock.living import living
from penstock.probe import can_record
from penstock.state import OthersMeter, UpdatedBy
from penstock.tiers import Budget, DiskSpec, Event, Size
from penstock.training import _checkpoint
from penstock.training._made import CALL, places
from penstock.training._managed import Managed
from penstock.training._progress import TrainingProgress
from penstock.training._statistics import Held, TrainingStatistics
from penstock.units import format_bytes

_CALL_PARAMETERS = CALL.replace("offload.training", "offload.parameters")


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
    update: UpdatedBy = "device",
    separable: bool = False,
    strict: bool = False,
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
        optimizer: PyTorch's own step one parameter after the other, except L-BFGS and SparseAdam. These, and every
            optimizer that is not PyTorch's, run their own ``step`` as it is: most read one parameter after the other,
            so that they take no more memory. Or a function that makes it from the parameters. Afterwards the optimizer
            is ``training.optimizer``.
        budget: the true peak of the device in every step but the first of its kind, which is measured: bytes, a text
            such as ``"22GiB"``, or a `penstock.tiers.Budget`, which names all tiers.
        host: bytes of host memory to use below an accelerator.
        disk: a directory on an SSD, several, or a dict of directories and sizes.
        device: where to train. By default it is where the model is, or, if a function makes the model, the accelerator
            that this process uses, else the CPU. A model that is elsewhere is moved there one parameter at a time.
        update_in_backward: update each parameter as soon as its gradient is complete, so that gradients never leave the
            device. With this you promise one backward per step, followed by ``optimizer.step()`` and ``zero_grad()``,
            without clipping, scaling or accumulation. Then results are the same. A use of a gradient or of an updated
            parameter that would break the promise raises ``RuntimeError``. For PyTorch's own and separable optimizers.
        update: which processor computes the optimizer's updates. ``"host"``: the host does, in a thread of its own, for
            parameters of an accelerator whose weight, gradient and states are in host memory. States then never cross
            the link, which carries 12 bytes per parameter and step instead of 36 (AdamW, float32, nothing resident).
            Under autocast it carries 6, since weights and gradients travel in half precision, for 2 more bytes of host
            memory. Another processor rounds differently, so that results agree with plain PyTorch within rounding, not
            bit for bit. ``"auto"``: the host takes as many updates as make the step shortest, as planned from the first
            steps, in which the device does all. For optimizers of PyTorch's own.
        separable: your word that an optimizer which is not PyTorch's updates each parameter from that parameter, its
            gradient, its state and its group alone, and changes nothing else in ``step``. Then it steps one parameter
            after the other, as PyTorch's own do. The word is tried on small stand-ins.
        strict: raise ``BudgetError`` if the budget was kept and cannot be kept any more, because something outside of
            the training has grown. Otherwise it is said once (`BudgetNotKeptWarning`), and training goes on. Steps are
            measured when their kind is new, and again at steps 2, 4, 8, 16 and so on.

    Raises ``TypeError`` and ``ValueError`` for arguments that cannot be used, ``FileNotFoundError`` or
    ``PermissionError`` for a directory that cannot be used, and ``BudgetError`` if tiers have no room for parameters,
    gradients and optimizer state, or, after a first step, if an operator needs more than the budget. Inside a step it
    raises ``TierReadError`` if bytes cannot be read back: begin again from the last checkpoint. What cannot be written
    stays on the device, you get one warning (`TierDegradedWarning`), and the step goes on.
    """
    account, where = places(model, optimizer, budget, host, disk, device, update)
    return Training(
        model,
        optimizer,
        account,
        where,
        update_in_backward=update_in_backward,
        update=update,
        separable=separable,
        strict=strict,
    )


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
    update: UpdatedBy = "device",
    separable: bool = False,
    strict: bool = False,
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
        separable=separable,
        strict=strict,
        moves_activations=False,
    )


class Training:
    """A context manager, made by `training`, to enter around each step; ``close`` it at the end.

    It only guards, counts and measures the steps: `Managed` takes model and optimizer over, and its `Pages` move. It is
    wide because every call of a user's is here.
    """

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
        update: UpdatedBy,
        separable: bool,
        strict: bool,
        moves_activations: bool = True,
    ):
        self.disks = tuple(account.disk_bytes)
        """Directories of the disk tiers."""
        self._thread = threading.get_ident()
        self._managed = Managed(account, device, updates_in_backward=update_in_backward, separable=separable)
        self._pages = self._managed.pages
        self._progress = TrainingProgress(self._pages.copies)
        self._meter: OthersMeter | None = None
        self._strict = strict
        self._is_known = self._is_told = False
        """Whether the bytes outside of pages were known when the step began; whether the user knows that the budget is
        not kept.
        """
        self._num_over = 0
        """Number of measured steps in a row that took more than the budget although they were known."""
        self._is_entered = self._is_closed = False
        try:
            self._managed.begin(model, optimizer, update)
            self._managed.watch.adopts_results = moves_activations
            self._managed.recall(update, update_in_backward, moves_activations)
        except BaseException:
            self.close(discard=not isinstance(model, nn.Module))
            raise
        self.model, self.optimizer = self._managed.model, self._managed.optimizer

    def __enter__(self) -> Self:
        self._refuse_unusable()
        if self._thread != threading.get_ident():
            raise ValueError(
                "a training must be entered in the thread that made it: it sees no operators of other threads"
            )
        if self._is_entered:
            raise ValueError("this training is entered already; enter it once around a step: with training: ...")
        if self._managed.updates.is_broken:
            raise PenstockError(
                "the update of a parameter was interrupted half way; go on from the last checkpoint: "
                "training.load('checkpoints/step-100')"
            )
        if self._managed.updates_in_backward and self._progress.num_steps <= 1:
            _refuse_parallel(self.model)
        self._managed.make_others_leave()
        self._is_entered = True
        self._progress.begin_step()
        self._managed.taken.parameters()  # some may be new or have new storages
        if self._managed.updates.why_whole:
            self._managed.taken.states(self.optimizer)  # made by other methods than `step`, or replaced
        self._pages.begin_step()
        self._managed.watch.norms.begin_step()
        self._managed.watch.casts.begin_step()
        self._managed.updates.begin_step()
        num_steps = self._progress.num_steps
        self._is_known = not self._pages.course.wants_measure
        looks_again = self._num_over == 1 or (num_steps > 1 and not num_steps & (num_steps - 1))  # 2, 4, 8, ...
        if (looks_again or not self._is_known) and can_record(self._managed.device):
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
            self._progress.peak_bytes = meter.peak_bytes or self._progress.peak_bytes
        if kind is not None:
            self._pages.end_step((), is_whole=False)
            return
        self._progress.end_step()
        try:
            self._pages.end_step(measured, is_whole=True)
        except BudgetError as refusal:
            if not self._is_known:
                raise
            self._say_not_kept(str(refusal))
        if meter is not None and measured and self._is_known:
            budget_bytes = self._pages.course.budget_bytes
            self._num_over = self._num_over + 1 if meter.peak_bytes > budget_bytes else 0
            if self._num_over > 1:  # what the first one found is left free in the second
                self._say_not_kept(
                    f"a step took {meter.peak_bytes} bytes ({format_bytes(meter.peak_bytes)}), above `budget`="
                    f"{format_bytes(budget_bytes)}, because more is on the device than when training began"
                )
        if meter is not None and not measured and meter.peak_bytes > self._pages.course.budget_bytes:
            raise BudgetError(
                f"`budget` must be at least {meter.peak_bytes} ({format_bytes(meter.peak_bytes)}), got "
                f"{format_bytes(self._pages.course.budget_bytes)}: all tensors of this step "
                "are smaller than 16 KiB, and such tensors stay on the device"
            )

    def _say_not_kept(self, text: str) -> None:
        """Say once that the budget cannot be kept any more, or raise ``BudgetError`` if that was asked for."""
        if self._strict:
            raise BudgetError(text)
        if not self._is_told:
            self._is_told = True
            warnings.warn(f"{text}. Training goes on; strict=True raises instead", BudgetNotKeptWarning, stacklevel=3)

    def _measure(self) -> None:
        """Begin to measure this step, or wait for the next one if another thread holds a page on a CPU, as while it
        saves.
        """
        with self._pages.lock:
            is_cpu = self._managed.device.type == "cpu"
            if is_cpu and any(page.held_bytes() for page in self._pages.register.pinned):
                return
            self._meter = OthersMeter(self._pages, self._managed.device)

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
            self._managed.watch.casts.forget()
        with self._managed.watch.entered(), self._managed.pinned(module):
            yield

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
        with self._managed.room_for_parts() as part_bytes:
            _checkpoint.save(Path(path), self.model, self.optimizer, self._managed.device, extra, part_bytes)

    @checked("training.save_weights('model')")
    def save_weights(self, path: str | os.PathLike[str], *, names: Collection[str] | None = None) -> None:
        """Write the model's parameters and buffers into a folder, one part at a time, within the budget.

        They are safetensors with the names of ``state_dict``, in several files with an index if they are large.
        Together with a ``config.json`` that is what ``from_pretrained`` reads. ``names`` selects some of them; for a
        tensor with several names, any of these will do.

        Raises ``CheckpointError`` if they cannot be written.
        """
        self._refuse_in_step("saved")
        with self._managed.room_for_parts() as part_bytes:
            _checkpoint.save_weights(Path(path), self.model, names, part_bytes)

    @checked("extra = training.load('checkpoints/step-100')")
    def load(self, path: str | os.PathLike[str]) -> Any:  # any: what `save` was given
        """Continue from a folder that `save` wrote; return its ``extra``.

        Parameters, buffers, optimizer states and groups are restored, and so are the states of PyTorch's random
        generators. If the same batches follow, the losses are bit-identical to those of a run that was not interrupted.

        Raises ``CheckpointError`` for files that are damaged or belong to another model, before anything has changed.
        """
        self._refuse_in_step("loaded")
        put = _checkpoint.load(Path(path), self.model, self.optimizer, self._managed.device)
        self._managed.updates.forget()  # due updates are of weights that are about to be replaced
        try:
            with self._managed.step(), self._managed.watch.entered():  # states become pages as soon as they are made
                return put()
        finally:
            self._managed.taken.states(self.optimizer)

    @property
    def is_entered(self) -> bool:
        """Whether a step is under way."""
        return self._is_entered

    @property
    def fits(self) -> bool:
        """Whether the budget has room for all parameters, gradients and states, which `close` brings to the device."""
        return self._pages.course.others_bytes + self._managed.state_bytes <= self._pages.course.budget_bytes

    def park(self) -> None:
        """Move everything off the device now, to leave the memory to others until the next step."""
        if not self._is_closed:
            self._refuse_unusable()
            self._pages.flush()

    def timeline(self) -> tuple[Held, ...]:
        """Return what was on the device in the course of a step, for a report; empty before a step has been recorded.

        The third step of each kind is recorded, which is the first after the measured ones. The last recording counts.
        """
        others_bytes = self._pages.course.others_bytes
        return tuple(
            Held(at_s=at_s, held_bytes={kind.value: size for kind, size in held.items()}, others_bytes=others_bytes)
            for at_s, held in self._pages.timeline.samples
        )

    def trace(self) -> tuple[Event, ...]:
        """Return the latest copies and waits, for `penstock.tiers.write_trace` and reports."""
        return self._pages.copies.waterfall.events.since()

    @property
    def budget_bytes(self) -> int:
        """The true peak that a step may have, in bytes."""
        return self._pages.course.budget_bytes

    def statistics(self) -> TrainingStatistics:
        """Return what it has done so far."""
        return self._progress.statistics(
            self.model,
            self._pages.replay,
            state_bytes=self._managed.state_bytes,
            written_to_disk_bytes=self._pages.copies.waterfall.statistics().written_to_disk_bytes,
            num_host_updates=self._managed.updates.num_on_host,
        )

    @checked("training.close()")
    def close(self, *, discard: bool = False) -> None:
        """Bring everything back to the device, whatever the budget is, and stop managing it.

        ``discard`` leaves behind what is not on the device, for a model that would not fit. Save it before, a part at a
        time: ``with training.whole(module): torch.save(module.state_dict(), path)``.
        """
        if self._is_closed or self._managed.has_ended:
            self._is_closed = True
            return
        if self._is_entered:
            self.__exit__(RuntimeError, RuntimeError("closed in mid-step"), None)
        self._managed.end(discard=discard)
        self._is_closed = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a training cannot be copied or pickled, since it owns lanes and files; make another: {CALL}")

    def _refuse_in_step(self, what: str) -> None:
        self._refuse_unusable()
        if self._is_entered:
            raise ValueError(f"a training must be {what} between two steps, outside of `with training:`")

    def _refuse_unusable(self) -> None:
        if self._is_closed or self._managed.has_ended:
            raise ValueError(f"this training is closed, or a later one has its model; make another: {CALL}")
        if self._managed.is_forked_copy:
            raise ForkedProcessError(f"a training belongs to the process that made it; make one here: {CALL}")


def _refuse_parallel(model: nn.Module) -> None:
    """Raise ``ValueError`` if DDP would sum a gradient that an update in backward has already used."""
    if not torch.distributed.is_initialized():
        return
    own = {id(parameter) for parameter in model.parameters()}
    for other in living(nn.Module):
        is_parallel = any(
            kind.__name__ == "DistributedDataParallel" for kind in type(other).__mro__
        )  # Apex has one too
        if is_parallel and own & {id(each) for each in other.parameters()}:
            raise ValueError(
                "update_in_backward=True updates each parameter before DistributedDataParallel has summed its "
                "gradient over the ranks; leave it out"
            )
