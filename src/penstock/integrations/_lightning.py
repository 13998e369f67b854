"""Lightning's Trainer under a byte budget: a callback.

Lightning tells callbacks of exceptions and interrupts too, so that entering at a batch's start and leaving at its end
is safe. Forward, backward and the optimizer's step, which is where Lightning calls them, lie inside; the cycle ends
where backward does.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, Self

from penstock import offload
from penstock.arguments import checked
from penstock.integrations._offloading import LoopOffloader, OffloadSummary, check_options
from penstock.tiers import Budget, DiskSpec, Size


class LightningOffload:
    """A ``Callback`` of Lightning's: trains under a byte budget.

    ``Trainer(callbacks=[LightningOffload(budget="6GiB", disk="/nvme")])``. Each batch's forward and backward run inside
    one `offload.activations`; losses and parameters are those of plain training, bit for bit. ``penstock/parked_gib``,
    ``penstock/stall_share`` and, where it is known, ``penstock/peak_gib`` are logged as steps, and Lightning's console
    log has a summary at the end. When training ends, in whatever way, no hook, thread or file is left. Works with
    ``lightning.pytorch`` and ``pytorch_lightning``, whichever is imported.

    Args:
        budget: device bytes at the true peak of forward and backward, or a ``tiers.Budget``, which carries ``disk``
            and ``host`` too; ``None``: the lowest peak that costs no stall.
        disk: a directory on an SSD, several, or a dict of directories and sizes.
        host: bytes of pinned host memory (CUDA).
        logs: whether to call ``pl_module.log`` after each batch.
        options: further ones of ``offload.activations``; names of modules are those of the LightningModule.

    Raises ``ImportError`` without Lightning and ``TypeError`` for unknown options; when training begins what
    ``offload.activations`` raises; and while it runs ``BudgetError`` for a budget below what a step needs.
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
        **options: object,
    ):
        self._options = {"budget": budget, "disk": disk, "host": host, **options}
        check_options(offload.activations, 1, self._options)
        self._logs = logs
        self._loop: LoopOffloader | None = None
        self._is_inside = False
        self._summary: OffloadSummary | None = None

    def __reduce__(self) -> tuple[Callable[[], "LightningOffload"], tuple[()]]:
        """For ``strategy="ddp_spawn"``; the other process begins anew."""
        return functools.partial(LightningOffload, logs=self._logs, **self._options), ()  # type: ignore[arg-type]

    def summary(self) -> OffloadSummary | None:
        """What the run did, or the last one; ``None`` before training."""
        return self._loop.summary() if self._loop is not None else self._summary

    # What Lightning calls

    def on_train_start(self, _trainer: Any, pl_module: Any) -> None:  # any: either Lightning's classes
        """Makes the offloader."""
        self._close()
        self._loop = LoopOffloader(pl_module, self._options)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Enters the offloader."""
        if self._loop is not None:
            self._leave()  # a batch that another hook skipped has no end
            self._loop.__enter__()
            self._is_inside = True

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        """Ends the cycle, before the optimizer allocates anything."""
        if self._loop is not None:
            self._loop.note()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Leaves the offloader and logs what it did."""
        if self._loop is None:
            return
        self._leave()
        if any(one.state for one in trainer.optimizers):
            self._loop.optimizer_has_state()
        if self._logs:
            for name, value in self._loop.figures().items():
                pl_module.log(f"penstock/{name}", value, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Closes, and says what was done."""
        if self._loop is not None:
            self._close()
            if trainer.is_global_zero:
                logging.getLogger(type(trainer).__module__).info(str(self._summary))

    def on_exception(self, _trainer: Any, _pl_module: Any, exception: BaseException) -> None:
        """Closes."""
        self._close(exception)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Closes, where training never came to its end."""
        self._close()

    def _leave(self, error: BaseException | None = None) -> None:
        if self._is_inside and self._loop is not None:
            self._is_inside = False
            self._loop.__exit__(type(error) if error else None, error, None)

    def _close(self, error: BaseException | None = None) -> None:
        if self._loop is not None:
            self._leave(error)
            self._loop.close()
            self._summary = self._loop.summary()
            self._loop = None


def _with_base(cls: type) -> type:
    """``cls`` as a ``Callback`` of the Lightning that the program has imported, or of both."""
    names = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    try:
        bases = [importlib.import_module(name).Callback for name in names or ["lightning.pytorch"]]
    except ImportError as error:
        raise ImportError("LightningOffload needs Lightning: pip install 'penstock[lightning]'") from error
    new = [base for base in bases if not issubclass(cls, base)]
    return type(cls.__name__, (cls, *new), {"__module__": cls.__module__, "__doc__": cls.__doc__}) if new else cls
