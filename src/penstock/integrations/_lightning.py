"""A callback that runs Lightning's Trainer under a byte budget.

Lightning also tells callbacks of exceptions and interrupts, so it is safe to enter a context at a batch's start and
leave it at the end. Forward, backward and the optimizer's step, which Lightning calls in between, are inside. The cycle
ends with backward.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import torch

from penstock import offload
from penstock.arguments import checked
from penstock.integrations._offloading import LoopOffloader, OffloadSummary, check_options
from penstock.tiers import Budget, DiskSpec, Size


class LightningOffload:
    """A Lightning ``Callback`` that trains under a byte budget.

    ``Trainer(callbacks=[LightningOffload(budget="6GiB", disk="/nvme")])``. Forward and backward of each batch run
    inside one `offload.activations`. Losses and parameters are bit-identical to plain training.
    ``penstock/parked_gib``, ``penstock/stall_share`` and, if it is known, ``penstock/peak_gib`` are logged at each
    step, and Lightning's console log has a summary at the end. However training ends, no hook, thread or file is left.
    Works with ``lightning.pytorch`` and ``pytorch_lightning``, whichever is imported.

    Args:
        budget: device bytes at the true peak of forward and backward, or a ``tiers.Budget``, which carries ``disk`` and
            ``host`` too; ``None``: the lowest peak that costs no stall.
        disk: a directory on an SSD, several, or a dict of directories and sizes.
        host: bytes of pinned host memory (CUDA).
        logs: whether to call ``pl_module.log`` after each batch.
        method: ``"training"`` is for a model that is too large: parameters, gradients, optimizer state and activations
            leave the device (`offload.training`), and checkpoints are written one tensor at a time. It needs a budget,
            which is that of the whole step, and exactly one optimizer. Afterwards a model that does not fit stays where
            it is, and works; ``close`` brings it back to the device.
        options: further options of ``offload.activations``, where names of modules are those of the LightningModule, or
            of ``offload.training``.

    Raises ``ImportError`` without Lightning and ``TypeError`` for unknown options. When training begins it raises what
    ``offload.activations`` raises, and while it runs ``BudgetError`` for a budget below what a step needs.

    The class is wide because Lightning calls a callback by one method per moment of training, and 13 of them matter.
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(_with_base(cls))

    @checked("LightningOffload(budget='6GiB', disk='/nvme')")
    def __init__(
        self,
        *,
        budget: Size | Budget | None = None,
        disk: DiskSpec = None,
        host: Size | None = None,
        logs: bool = True,
        method: Literal["offload", "training"] = "offload",
        **options: object,
    ):
        self._options = {"budget": budget, "disk": disk, "host": host, **options}
        if method == "training":
            check_options(
                offload.training, 3, {name: value for name, value in self._options.items() if name != "budget"}
            )
            if budget is None:
                raise ValueError(
                    "method='training' requires a budget: LightningOffload(budget='22GiB', method='training', ...)"
                )
        else:
            check_options(offload.activations, 1, self._options)
        self._method: Literal["offload", "training"] = method
        self._logs = logs
        self._loop: LoopOffloader | None = None
        self._training: offload.Training | None = None
        self._undo: Callable[[], None] = lambda: None
        self._is_inside = False
        self._summary: OffloadSummary | offload.TrainingStatistics | None = None

    def __reduce__(self) -> tuple[Callable[[], "LightningOffload"], tuple[()]]:
        """Pickle the options only, for ``strategy="ddp_spawn"``; the other process begins anew."""
        settings = {"logs": self._logs, "method": self._method, **self._options}
        return functools.partial(LightningOffload, **settings), ()  # type: ignore[arg-type]

    def summary(self) -> OffloadSummary | offload.TrainingStatistics | None:
        """Return what the present or the last run did; ``None`` before training."""
        if self._training is not None:
            return self._training.statistics()
        return self._loop.summary() if self._loop is not None else self._summary

    def close(self, *, discard: bool = False) -> None:
        """Remove everything from the model. Training does so itself when it ends, unless the model does not fit then.

        ``discard`` leaves behind what is not on the device of such a model.
        """
        self._close()
        if self._training is not None:
            self._summary = self._training.statistics()
            self._training.close(discard=discard)
            self._training = None

    # Methods that Lightning calls

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # any: either Lightning's classes
        """Make the offloader or the training."""
        self.close()
        if self._method == "offload":
            self._loop = LoopOffloader(pl_module, self._options)
            return
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers must return one optimizer for a training, got {len(trainer.optimizers)}; "
                "give one with several parameter groups: AdamW([{'params': ..., 'lr': ...}, ...])"
            )
        options = {"device": pl_module.device, **self._options}
        self._training = offload.training(pl_module, trainer.optimizers[0], **options)
        self._undo = _save_in_parts(trainer.strategy.checkpoint_io)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Enter the offloader or the training."""
        self._leave()  # a batch that another hook skipped has no end
        self._enter(self._loop or self._training)

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Enter a training, whose budget also holds here."""
        self._leave()
        self._enter(self._training)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Leave the training."""
        self._leave()

    def on_test_batch_start(self, *_: Any, **__: Any) -> None:
        """Enter a training, as for validation."""
        self.on_validation_batch_start()

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        """Leave the training, as for validation."""
        self._leave()

    def on_predict_batch_start(self, *_: Any, **__: Any) -> None:
        """Enter a training, as for validation."""
        self.on_validation_batch_start()

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        """Leave the training, as for validation."""
        self._leave()

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        """End the cycle before the optimizer allocates anything."""
        if self._loop is not None:
            self._loop.note()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Leave the offloader or the training, and log what it did."""
        self._leave()
        if self._loop is not None and any(optimizer.state for optimizer in trainer.optimizers):
            self._loop.optimizer_has_state()
        if self._logs:
            for name, value in self._figures().items():
                pl_module.log(f"penstock/{name}", value, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Close, and log what was done."""
        if self._loop is not None or self._training is not None:
            self._close()
            if trainer.is_global_zero:
                logging.getLogger(type(trainer).__module__).info(str(self._summary))

    def on_exception(self, _trainer: Any, _pl_module: Any, exception: BaseException) -> None:
        """Close after an error."""
        self._close(exception)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Close if training never reached its end."""
        self._close()

    def _figures(self) -> dict[str, float]:
        if self._training is not None:
            return self._training.statistics().figures()
        return {} if self._loop is None else self._loop.figures()

    def _enter(self, entered: LoopOffloader | offload.Training | None) -> None:
        if entered is not None:
            entered.__enter__()
            self._is_inside = True

    def _leave(self, error: BaseException | None = None) -> None:
        entered = self._loop or self._training
        if self._is_inside and entered is not None:
            self._is_inside = False
            entered.__exit__(type(error) if error else None, error, None)

    def _close(self, error: BaseException | None = None) -> None:
        self._leave(error)
        self._undo()
        self._undo = lambda: None
        if self._loop is not None:
            self._loop.close()
            self._summary = self._loop.summary()
            self._loop = None
        if self._training is not None:
            self._summary = self._training.statistics()
            if self._training.fits:
                self._training.close()
                self._training = None


def _save_in_parts(plugin: Any) -> Callable[[], None]:  # any: a CheckpointIO
    """Make Lightning write checkpoints straight into a file; otherwise it would first build all of one in memory."""
    if type(plugin).__name__ != "TorchCheckpointIO":
        return lambda: None
    save = plugin.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(checkpoint: dict[str, Any], path: Any, *rest: Any, **options: Any) -> None:
        if "://" in str(path):
            save(checkpoint, path, *rest, **options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.draft")
        try:
            torch.save(checkpoint, draft)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    plugin.save_checkpoint = save_checkpoint
    return lambda: delattr(plugin, "save_checkpoint")


def _with_base(cls: type) -> type:
    """Return ``cls`` as a ``Callback`` of the Lightning that the program has imported, or of both."""
    names = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    try:
        bases = [importlib.import_module(name).Callback for name in names or ["lightning.pytorch"]]
    except ImportError as error:
        raise ImportError("LightningOffload needs Lightning: pip install 'penstock[lightning]'") from error
    new = [base for base in bases if not issubclass(cls, base)]
    return type(cls.__name__, (cls, *new), {"__module__": cls.__module__, "__doc__": cls.__doc__}) if new else cls
