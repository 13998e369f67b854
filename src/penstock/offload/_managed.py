"""A model and its optimizer whose tensors are pages: what a training works with, from its beginning to its end."""

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import BudgetError
from penstock.offload._made import Update, check_optimizer, made, move, refuse_too_much
from penstock.offload._on_host import HostUpdates
from penstock.offload._operators import id_or_zero
from penstock.offload._pages import Pages
from penstock.offload._past import do_all_pending, do_pending
from penstock.offload._taken import Taken
from penstock.offload._updates import Updates
from penstock.offload._watch import PageWatch
from penstock.probe import held_bytes
from penstock.tiers import Budget, waterfall_for
from penstock.units import format_bytes

_PARTS = 16
"""Divisor of the budget that gives the size of a checkpoint's files. A file is larger only if a single tensor is."""


class Managed:
    """A model, its optimizer, and everything that moves their tensors; `end` gives them back."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    taken: Taken
    updates: Updates

    def __init__(self, account: Budget, device: torch.device, *, updates_in_backward: bool, separable: bool):
        assert account.device_bytes is not None
        self.device, self.updates_in_backward = device, updates_in_backward
        self._separable = separable
        waterfall = waterfall_for(device, account)
        self.pages = Pages(waterfall, account.device_bytes, device)
        self.watch = PageWatch(self.pages, device)
        self._forget_updates: Callable[[], None] = lambda: None
        self._undo = contextlib.ExitStack()
        self._process = os.getpid()
        try:
            self.watch.begin()  # now, since parameters may leave the device from here on
        except ValueError:
            waterfall.close()
            raise

    def begin(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        update: Update,
    ) -> None:
        """Make the model and the optimizer, or move them to the device, and take them over.

        Parameters leave the device as more come. If this raises, call `end`.
        """
        course, casts = self.pages.course, self.watch.casts
        course.others_bytes = held_bytes(self.device)
        with self.step():
            self.model, self.optimizer = made(model, optimizer, self.device)
        in_parts_only = "update_in_backward=True" if self.updates_in_backward else f"update={update!r}"
        check_optimizer(
            self.optimizer,
            separable=self._separable,
            asked="" if update == "device" and not self.updates_in_backward else in_parts_only,
            on_host=update != "device",
        )
        with self.step():
            move(self.model, self.optimizer, self.device)
        self.taken = Taken(self.pages, self.model, self.device)
        refuse_too_much(
            self.model, self.optimizer, course.budget_bytes, self.pages.copies.waterfall, separable=self._separable
        )
        casts.name, casts.updates_on_host = self.taken.name, update == "host"
        on_host = None
        if update != "device":
            on_host = HostUpdates(self.optimizer, self.pages, casts, last_first=self.updates_in_backward)
        self.updates = Updates(
            self.optimizer,
            self.pages,
            self.taken,
            on_host,
            is_measured=update == "auto",
            separable=self._separable,
        )
        self._take_over()
        self.pages.flush()
        course.others_bytes = held_bytes(self.device)
        if course.others_bytes > course.budget_bytes:
            raise BudgetError(
                f"`budget` must be more than {format_bytes(course.others_bytes)}, got "
                f"{format_bytes(course.budget_bytes)}: the device already holds that much that cannot be "
                "moved, because it does not belong to this model or its optimizer, or is too small"
            )
        _open.add(self)

    def _take_over(self) -> None:
        """Make pages of parameters, gradients and states, now and whenever there are new ones."""
        self._forget_updates = self.updates.forget
        self.taken.on_gradient = self.updates.in_backward if self.updates_in_backward else self._complete
        self._undo.callback(self.taken.end)
        self.taken.parameters()
        self.taken.states(self.optimizer)
        self._undo.callback(self.updates.begin())
        if self.updates.why_whole:
            return  # nothing is put off, and its states are looked for before every step and after each of its own
        hooks: tuple[Any, ...] = (  # any: PyTorch's handles
            self.optimizer.register_state_dict_pre_hook(lambda *_: do_all_pending(self.pages)),
            self.optimizer.register_load_state_dict_pre_hook(lambda *_: do_all_pending(self.pages)),
            self.optimizer.register_load_state_dict_post_hook(lambda _: self.taken.states(self.optimizer)),
        )
        for hook in hooks:
            self._undo.callback(hook.remove)

    def _complete(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has been added to."""
        self.taken.gradient(parameter)
        if parameter.grad is not None and self.pages.course.is_in_step:
            self.watch.norms.take(parameter.grad)

    @property
    def state_bytes(self) -> int:
        """Bytes of all pages but those that are casts of others."""
        return sum(page.size_bytes for page in self.pages if page.wide is None)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Let tensors that the block makes on the device leave it while the block makes more."""
        self.pages.begin_step()
        try:
            yield
        finally:
            self.pages.end_step((), is_whole=False)

    @contextlib.contextmanager
    def pinned(self, module: nn.Module | None) -> Iterator[None]:
        """Keep the parameters of ``module``, or everything, on the device while the block runs."""
        wanted = None if module is None else {id_or_zero(parameter) for parameter in module.parameters()}
        do_pending([page for page in self.pages if wanted is None or page.identity in wanted])
        register = self.pages.register
        with self.pages.lock:
            pages = [page for page in self.pages if wanted is None or page.identity in wanted]
            added = set(pages) - register.pinned
            register.pinned |= added
        try:
            for page in pages:
                self.pages.need([page], [page])
            yield
        finally:
            with self.pages.lock:
                register.pinned -= added

    @contextlib.contextmanager
    def room_for_parts(self) -> Iterator[int]:
        """Yield the bytes of one file of a checkpoint, and leave the memory free that writing it takes."""
        largest_bytes = max((page.size_bytes for page in self.pages), default=0)
        part_bytes = max(self.pages.course.budget_bytes // _PARTS, largest_bytes)
        with self.watch.entered(), self.pages.room(2 * part_bytes):
            do_all_pending(self.pages)
            yield part_bytes

    @property
    def is_forked_copy(self) -> bool:
        """Whether another process made it, from which this one was forked. Its threads do not exist here."""
        return self._process != os.getpid()

    def end(self, *, discard: bool) -> None:
        """Bring everything back to the device, or drop what is elsewhere, and stop watching."""
        if self.is_forked_copy:
            self.pages.drop_all()
        elif discard:
            self._forget_updates()
            self.pages.drop_all()
        else:
            do_pending(list(self.pages))
            self._forget_updates()  # no update is due any more; this ends the thread that computed some
            self.watch.casts.forget()
            self.pages.bring_back()
        _open.discard(self)
        self._undo.close()
        self.watch.end()
        self.pages.copies.waterfall.close()


_open: "weakref.WeakSet[Managed]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End what nobody has closed, since threads and PyTorch's stack of modes must not outlive the interpreter.

    Bytes need no care, since they vanish with the process.
    """
    for managed in list(_open):
        if not managed.is_forked_copy:
            with contextlib.suppress(Exception):
                managed.end(discard=True)
