"""A model and its optimizer whose tensors are pages: what a training works with, from its beginning to its end."""

import atexit
import contextlib
import gc
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.devices import backend_of
from penstock.errors import BudgetError
from penstock.probe import held_bytes
from penstock.state import Pages, PageWatch, StepCache, Taken, UpdatedBy, Updates, do_all_pending, do_pending
from penstock.storages import id_or_zero
from penstock.tiers import Budget, Waterfall, waterfall_for
from penstock.training._made import check_optimizer, made, move, refuse_too_much
from penstock.units import format_bytes

_PARTS = 16
"""Divisor of the budget that gives the size of a checkpoint's files. A file is larger only if a single tensor is."""


class Managed:
    """A model, its optimizer, and everything that moves their tensors; `end` gives them back.

    It is wide because a training's life is here: it begins, hands over to a later one, and ends, with all its parts.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    taken: Taken
    updates: Updates

    def __init__(self, account: Budget, device: torch.device, *, updates_in_backward: bool, separable: bool):
        assert account.device_bytes is not None
        self.device, self.updates_in_backward = device, updates_in_backward
        self._separable = separable
        waterfall = waterfall_for(device, account, has_lane_memory=True)
        self.pages = Pages(waterfall, account.device_bytes, device)
        self.watch = PageWatch(self.pages, device)
        self._forget_updates: Callable[[], None] = lambda: None
        self._undo = contextlib.ExitStack()
        self._process = os.getpid()
        self.has_ended = False
        """Whether it has given everything back, or another one has taken it over."""
        weakref.finalize(self, _close_elsewhere, waterfall).atexit = False
        self.watch.begin()  # now, since parameters may leave the device from here on

    def begin(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        update: UpdatedBy,
    ) -> None:
        """Make the model and the optimizer, or move them to the device, and take them over.

        Parameters leave the device as more come. If this raises, call `end`.
        """
        course = self.pages.course
        gc.collect()  # a training that nobody has any more is closed
        self.make_others_leave()
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
        rivals = [other for other in _others(self) if other.has_any_of(self.model)]
        for rival in rivals:
            rival.begin_to_hand_over()
        self.taken = Taken(self.pages, self.model, self.device)
        refuse_too_much(
            self.model, self.optimizer, course.budget_bytes, self.pages.copies.waterfall, separable=self._separable
        )
        self.updates = Updates(
            self.optimizer,
            self.pages,
            self.taken,
            self.watch.casts,
            update=update,
            updates_in_backward=self.updates_in_backward,
            separable=self._separable,
        )
        self._take_over()
        for rival in rivals:
            rival.end_handing_over()
        self.pages.flush()
        course.others_bytes = held_bytes(self.device)
        if course.others_bytes > course.budget_bytes:
            raise BudgetError(
                f"`budget` must be more than {format_bytes(course.others_bytes)}, got "
                f"{format_bytes(course.budget_bytes)}: the device already holds that much that cannot be "
                "moved, because it does not belong to this model or its optimizer, or is too small"
            )
        _open.add(self)

    def recall(self, *settings: object) -> None:
        """Begin with the plan of an earlier run of the same training on this machine; ``settings`` tell it, too."""
        model = [
            (name, None if is_lazy(parameter) else parameter.shape, parameter.dtype, parameter.requires_grad)
            for name, parameter in self.model.named_parameters()
        ]
        machine = platform.node(), str(self.device), backend_of(self.device).name
        kinds = type(self.model).__qualname__, type(self.optimizer).__qualname__, self.updates.why_whole
        self.pages.replay.recall(StepCache((machine, kinds, settings, model)))

    def _take_over(self) -> None:
        """Make pages of parameters, gradients and states, now and whenever there are new ones."""
        self._forget_updates = self.updates.forget
        # PyTorch keeps these hooks where the garbage collector cannot see them
        self.taken.on_gradient = weakly(self._complete_in_backward if self.updates_in_backward else self._complete)
        for module in self.model.modules():
            vars(module)[_ANCHOR] = Anchor(self)
            self._undo.callback(_let_go, weakref.ref(module))
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

    def _complete_in_backward(self, parameter: torch.Tensor) -> None:
        """UpdatedBy a parameter whose gradient is complete."""
        self.updates.in_backward(parameter)

    def make_others_leave(self) -> None:
        """Let what other trainings have on the device leave it, except those in the middle of a step."""
        for other in _others(self):
            if other.device == self.device and not other.pages.course.is_in_step:
                other.pages.flush()

    def has_any_of(self, model: nn.Module) -> bool:
        """Whether a parameter of ``model`` is one of its pages."""
        return any(self.pages.find(id_or_zero(parameter)) is not None for parameter in model.parameters())

    def begin_to_hand_over(self) -> None:
        """Do what is due and let hooks go, since another training is about to take the pages, one by one.

        Raises ``ValueError`` in the middle of a step.
        """
        if self.pages.course.is_in_step:
            raise ValueError(
                "this model is in the middle of a step of another training; leave its `with training:` first, and "
                "close it: training.close()"
            )
        do_all_pending(self.pages)
        self._forget_updates()
        self.watch.casts.forget()
        self._undo.close()
        self.has_ended = True

    def end_handing_over(self) -> None:
        """Bring back what the other training has not taken, such as the states of another optimizer."""
        del self.updates, self.taken, self.optimizer, self.model
        gc.collect()
        self.pages.copies.sweep()
        self.end(discard=False)

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
        self.has_ended = True
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


_ANCHOR = "_penstock_training"
"""The attribute of modules that has an `Anchor`."""


class Anchor:
    """Keeps a training alive as long as a module of its model, whose parameters only it can bring back.

    Copies of the module have none, and pickles have ``False`` in its place.
    """

    def __init__(self, managed: Managed):
        self._managed = managed

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        return False

    def __copy__(self) -> bool:
        return False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return bool, ()


def _let_go(module: "weakref.ref[nn.Module]") -> None:
    anchored = module()
    if anchored is not None:
        vars(anchored).pop(_ANCHOR, None)


def weakly(method: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a function that calls a method of an object as long as the object lives."""
    held = weakref.WeakMethod(method)

    def call(tensor: torch.Tensor) -> None:
        living = held()
        if living is not None:
            living(tensor)

    return call


_open: "weakref.WeakSet[Managed]" = weakref.WeakSet()
"""All that have pages."""


def _others(managed: Managed) -> list[Managed]:
    """Return the other trainings of this process."""
    return [other for other in list(_open) if other is not managed and not other.is_forked_copy]


def _close_elsewhere(waterfall: Waterfall) -> None:
    """Close the tiers of a training that nobody has any more, in a thread, since collection may come at any time."""
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        threading.Thread(target=waterfall.close, name="penstock closing", daemon=True).start()


@atexit.register
def _end_all() -> None:
    """End what nobody has closed, since threads and PyTorch's stack of modes must not outlive the interpreter.

    Bytes need no care, since they vanish with the process.
    """
    for managed in list(_open):
        if not managed.is_forked_copy:
            with contextlib.suppress(Exception):
                managed.end(discard=True)
