"""Training loops written with Hugging Face's Accelerate under a byte budget, without changes inside the loop."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock import offload
from penstock.arguments import checked, must_be
from penstock.integrations._offloading import LoopOffloader, check_options
from penstock.tiers import Budget, DiskSpec, Size

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
@checked("with offloading(accelerator, model, disk='/nvme')")
def offloading(
    accelerator: "Accelerator",
    model: nn.Module,
    *,
    budget: Size | Budget | None = None,
    disk: DiskSpec = None,
    host: Size | None = None,
    **options: object,
) -> Iterator[LoopOffloader]:
    """Offload the activations of ``model`` in all training inside the block.

    >>> with offloading(accelerator, model, budget="6GiB", disk="/nvme") as offloader:  # doctest: +SKIP
    ...     for batch in loader:
    ...         with accelerator.accumulate(model):
    ...             accelerator.backward(model(**batch).loss)
    ...             optimizer.step()
    ...             optimizer.zero_grad()

    Hooks are on while the model's forward runs with gradients. A loss computed outside of it is not parked; backward
    needs it first, so it would stay anyway. Losses and parameters are bit-identical to plain training. Nothing is left
    on model or accelerator after the block.

    Args:
        accelerator: the one whose ``backward`` the loop calls.
        model: what ``accelerator.prepare`` returned, or the model inside of it.
        budget: device bytes at the true peak of forward and backward, or a ``tiers.Budget``, which carries ``disk`` and
            ``host`` too; ``None``: the lowest peak that costs no stall.
        disk: a directory on an SSD, several, or a dict of directories and sizes.
        host: bytes of pinned host memory (CUDA).
        options: further options of ``offload.activations``.

    Yields a `LoopOffloader`. Its ``figures()`` are numbers of the last micro-batch for ``accelerator.log``, its
    ``summary()`` is an `OffloadSummary`. Raises what ``offload.activations`` raises, and ``TypeError`` for unknown
    options.
    """
    if not hasattr(accelerator, "unwrap_model"):
        example = "with offloading(accelerator, model, disk='/nvme')"
        raise must_be("accelerator", "an accelerate.Accelerator", accelerator, example)
    settings = {"budget": budget, "disk": disk, "host": host, **options}
    check_options(offload.activations, 1, settings)
    loop = LoopOffloader(accelerator.unwrap_model(model), settings)
    steps = _Steps(loop, accelerator)
    hooks = [
        model.register_forward_pre_hook(steps.enter),
        model.register_forward_hook(steps.leave, always_call=True),
    ]
    before = vars(accelerator).get("backward")  # set by another block
    accelerator.backward = steps.noted(accelerator.backward)
    try:
        yield loop
    finally:
        del accelerator.backward
        if before is not None:
            accelerator.backward = before
        for hook in hooks:
            hook.remove()
        steps.leave()  # the hook does not run after an interrupt inside of forward
        loop.close()


class _Steps:
    """The position in the loop: inside of forward, or after a backward that the optimizer's step follows."""

    def __init__(self, loop: LoopOffloader, accelerator: "Accelerator"):
        self._loop, self._accelerator = loop, accelerator
        self._is_inside = self._steps_next = False

    def enter(self, *_: object) -> None:
        if self._is_inside or not torch.is_grad_enabled():
            return
        if self._steps_next and not self._accelerator.optimizer_step_was_skipped:
            self._steps_next = False
            self._loop.optimizer_has_state()
        self._loop.__enter__()
        self._is_inside = True

    def leave(self, *_: object) -> None:
        if self._is_inside:
            self._is_inside = False
            self._loop.__exit__(None, None, None)

    def noted(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def backward_and_note(*arguments: object, **keywords: object) -> None:
            try:
                backward(*arguments, **keywords)
            except BaseException as error:
                self._loop.abort(error)
                raise
            if self._loop.note():  # otherwise it was another model's backward
                self._steps_next |= self._accelerator.sync_gradients

        return backward_and_note
