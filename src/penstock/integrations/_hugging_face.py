"""A callback that runs Hugging Face's Trainer under a byte budget, and its options for the command line.

A callback is told of steps, but it runs no code around them and is not told of exceptions. So it finds the Trainer that
calls it, and wraps methods of that one object: ``training_step``, which is forward and backward of a micro-batch,
``prediction_step``, the methods that save, and ``train``, so that hooks and threads are removed however training ends.
The model is not changed.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock import offload, remat
from penstock.arguments import check_fields, checked
from penstock.integrations._in_parts import saving_in_parts
from penstock.integrations._offloading import LoopOffloader, OffloadSummary, check_options
from penstock.tiers import Budget, DiskSpec, Size

if TYPE_CHECKING:
    from transformers import Trainer

Method = Literal["offload", "remat", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PenstockArguments:
    """Options of `PenstockCallback` for ``HfArgumentParser``: ``--penstock_budget 6GiB --penstock_disk /nvme``.

    Without budget, disk and host the callback does nothing, so that a script can always add it.
    """

    penstock_budget: str | None = field(default=None, metadata={"help": "device bytes at the true peak, such as 6GiB"})
    """Device bytes at the true peak; ``None``: the lowest peak that costs no stall."""
    penstock_disk: list[str] | None = field(default=None, metadata={"help": "directories on SSDs"})
    """Directories on SSDs."""
    penstock_host: str | None = field(default=None, metadata={"help": "bytes of pinned host memory (CUDA)"})
    """Bytes of pinned host memory (CUDA)."""
    penstock_method: Method = field(
        default="offload", metadata={"help": "offload activations, plan the step, or train what exceeds the device"}
    )
    """``"offload"``, ``"remat"`` for a planned step, or ``"training"`` for a model larger than the device."""
    penstock_modules: list[str] | None = field(
        default=None, metadata={"help": "offload only from modules of these names"}
    )
    """Names of the modules to offload from, such as ``model.layers.*``; ``None`` means all."""
    penstock_min_size: str | None = field(
        default=None, metadata={"help": "offload only storages of at least this size"}
    )
    """Size below which storages are not offloaded; ``None``: the default of ``offload.activations``."""
    penstock_max_in_flight: str | None = field(default=None, metadata={"help": "bytes on their way out at once"})
    """Most bytes on their way out at once; ``None``: the default of ``offload.activations``."""
    penstock_checkpoint_inputs_only: bool = field(
        default=False, metadata={"help": "offload only inputs of checkpointed regions"}
    )
    """Whether to park only the inputs of checkpointed regions, for use with gradient checkpointing."""

    def __post_init__(self) -> None:
        check_fields(self, "PenstockArguments(penstock_budget='6GiB', penstock_disk=['/nvme'])")

    def options(self) -> dict[str, Any]:  # any: keyword arguments
        """Return the keyword arguments of `PenstockCallback` that were given."""
        values = {option.name.removeprefix("penstock_"): getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, False, [])}


class PenstockCallback:
    """A ``TrainerCallback`` that trains under a byte budget.

    ``Trainer(model, args, ..., callbacks=[PenstockCallback(budget="6GiB", disk="/nvme")])``. Forward and backward of
    each micro-batch run inside one `offload.activations`. Losses and parameters are bit-identical to plain training.
    The Trainer's log gains ``penstock_parked_gib``, ``penstock_stall_share`` and, if it is known,
    ``penstock_peak_gib``; its last entry gains totals. However training ends, no hook, thread or file is left.

    Args:
        arguments: a `PenstockArguments` from the command line, instead of all others.
        budget: device bytes at the true peak of forward and backward, or a ``tiers.Budget``, which carries ``disk`` and
            ``host`` too; ``None``: the lowest peak that costs no stall. With ``"remat"`` a ``float`` is a share.
        disk: a directory on an SSD, several, or a dict of directories and sizes.
        host: bytes of pinned host memory (CUDA).
        method: ``"remat"`` compiles the model with the ``penstock`` backend instead. It recomputes what is cheap, and
            swaps if disk or host are given. The loss must be computed inside the model. ``"training"`` is for a model
            that is too large: parameters, gradients, optimizer state and activations leave the device
            (`offload.training`). The budget then holds from the first step to the last, checkpoints included. The
            Trainer moves the whole model to an accelerator unless ``place_model_on_device`` of its arguments, a
            property that a subclass overrides, is false.
        options: further options of ``offload.activations``, ``remat.optimize`` or ``offload.training``.

    Raises ``ImportError`` without transformers, ``TypeError`` for unknown options, and ``ValueError`` for options that
    contradict each other. When training begins it raises what ``offload.activations`` raises, and while it runs
    ``BudgetError`` for a budget below what the step needs.
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(_with_base(cls))  # type: ignore[arg-type]

    @checked("PenstockCallback(budget='6GiB', disk='/nvme')")
    def __init__(
        self,
        arguments: PenstockArguments | None = None,
        *,
        budget: Size | float | Budget | None = None,
        disk: DiskSpec = None,
        host: Size | None = None,
        method: Method = "offload",
        **options: object,
    ):
        settings = {"budget": budget, "disk": disk, "host": host, "method": method, **options}
        settings = {name: value for name, value in settings.items() if value is not None and (name, value) != _DEFAULT}
        if arguments is not None and settings:
            raise ValueError(f"give either PenstockArguments or {', '.join(settings)}, not both")
        self._options = arguments.options() if arguments is not None else settings
        self._method = self._options.pop("method", "offload")
        self._is_on = arguments is None or not self._options.keys().isdisjoint(("budget", "disk", "host"))
        self._check()
        self._wrapped: weakref.WeakSet[Trainer] = weakref.WeakSet()
        self._loop: LoopOffloader | None = None
        self._compiled: contextlib.ExitStack | None = None
        self._training: offload.Training | None = None
        self._is_saving = False
        self._summary: OffloadSummary | offload.TrainingStatistics | None = None

    def summary(self) -> OffloadSummary | offload.TrainingStatistics | None:
        """Return what the present or the last run did; ``None`` before training and for a planned step."""
        if self._training is not None:
            return self._training.statistics()
        return self._loop.summary() if self._loop is not None else self._summary

    def close(self, *, discard: bool = False) -> None:
        """Remove everything from the model and end the threads. Training does so itself when it ends.

        The exception is ``"training"`` with a model that does not fit: it stays where it is, and works, until you call
        this. Then all of it comes to the device, or with ``discard`` what is not there is left behind.
        """
        self._end()
        if self._training is not None:
            self._training.close(discard=discard)
            self._training = None

    def _end(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._summary = self._loop.summary()
            self._loop = None
        if self._compiled is not None:
            self._compiled.close()
            self._compiled = None
        if self._training is not None:
            self._summary = self._training.statistics()
            if self._training.is_entered:
                self._training.__exit__(RuntimeError, RuntimeError("training has ended in mid-step"), None)
            if self._training.fits:
                self._training.close()
                self._training = None

    def __reduce__(self) -> tuple[Callable[[], "PenstockCallback"], tuple[()]]:
        """Pickle the options only, so that another process, or a copy, begins anew."""
        if not self._is_on:
            return functools.partial(PenstockCallback, PenstockArguments()), ()
        return functools.partial(PenstockCallback, method=self._method, **self._options), ()  # type: ignore[arg-type]

    # Methods that the Trainer calls

    def on_init_end(self, *_: Any, **__: Any) -> None:  # any: the Trainer's own classes
        """Wrap the Trainer."""
        if self._is_on:
            self._wrap(_calling_trainer(self))

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Make the offloader or the training, or compile the model."""
        self.close()
        if not self._is_on:
            return
        trainer = _calling_trainer(self)
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer would run one process on {args.n_gpu} GPUs (DataParallel), which replicates the model in "
                "threads. Start one process per GPU, `torchrun --nproc-per-node ...`, or use one GPU: "
                "CUDA_VISIBLE_DEVICES=0"
            )
        self._wrap(trainer)
        if self._method == "remat":
            self._compile(trainer)
        elif self._method == "training":
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate wraps it
            options = {"device": args.device, **self._options}  # the Trainer may not have placed the model there
            self._training = offload.training(trainer.model, optimizer, **options)
        else:
            is_compiled = hasattr(trainer.model_wrapped, "_orig_mod")  # offloading declines this, and warns
            self._loop = LoopOffloader(trainer.model_wrapped if is_compiled else trainer.model, self._options)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin a step of a training."""
        if self._training is not None:
            self._training.__enter__()

    def on_step_end(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """End a step of a training; otherwise check whether the optimizer has state."""
        if self._training is not None:
            self._training.__exit__(None, None, None)
        if self._loop is not None and getattr(optimizer, "state", True):
            self._loop.optimizer_has_state()

    def on_log(self, _args: Any, state: Any, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Add figures to the Trainer's log of training."""
        figures = {}
        if self._training is not None and not logs.keys().isdisjoint(("loss", "train_runtime")):
            figures = self._training.statistics().figures()
        elif self._loop is None:
            return
        elif "train_runtime" in logs:
            figures = self._loop.summary().figures()
        elif "loss" in logs:
            figures = self._loop.figures()
        named = {f"penstock_{name}": value for name, value in figures.items()}
        logs.update(named)
        state.log_history[-1].update(named)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close."""
        self._end()

    # How it is done

    def _check(self) -> None:
        if self._method == "offload":
            check_options(offload.activations, 1, self._options)
        elif self._method == "remat":
            options = dict(self._options)
            if self._is_on and options.pop("budget", None) is None:
                raise ValueError("method='remat' requires a budget: PenstockCallback(budget='6GiB', method='remat')")
            options.pop("budget", None)
            check_options(remat.optimize, 3, options)
        elif self._method == "training":
            options = dict(self._options)
            if self._is_on and options.pop("budget", None) is None:
                raise ValueError(
                    "method='training' requires a budget: PenstockCallback(budget='22GiB', method='training', ...)"
                )
            options.pop("budget", None)
            check_options(offload.training, 3, options)
        else:
            raise ValueError(f"`method` must be 'offload', 'remat' or 'training', got {self._method!r}")

    def _wrap(self, trainer: Any) -> None:
        if trainer in self._wrapped:
            return
        self._wrapped.add(trainer)
        trainer.training_step = self._inside_offloader(trainer.training_step)
        trainer.prediction_step = self._inside_training(trainer.prediction_step)
        trainer.train = self._until_closed(trainer.train)
        for name in ("_save_checkpoint", "save_model"):
            setattr(trainer, name, self._in_parts(trainer, getattr(trainer, name)))
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)  # first, so that figures are in the log before others write it

    def _inside_offloader(self, training_step: Any) -> Any:  # any: bound methods of whatever subclass
        @functools.wraps(training_step)
        def step(*arguments: Any, **keywords: Any) -> Any:
            if self._loop is None:
                return training_step(*arguments, **keywords)
            with self._loop:
                return training_step(*arguments, **keywords)

        return step

    def _inside_training(self, prediction_step: Any) -> Any:  # any: bound methods of whatever subclass
        @functools.wraps(prediction_step)
        def step(*arguments: Any, **keywords: Any) -> Any:
            if self._training is None or self._training.is_entered:
                return prediction_step(*arguments, **keywords)
            with self._training:
                return prediction_step(*arguments, **keywords)

        return step

    def _in_parts(self, trainer: Any, save: Any) -> Any:  # any: bound methods of whatever subclass
        @functools.wraps(save)
        def save_in_parts(*arguments: Any, **keywords: Any) -> Any:
            if self._training is None or self._is_saving:  # one of them calls the other
                return save(*arguments, **keywords)
            self._is_saving = True
            try:
                with saving_in_parts(trainer.model, self._training):
                    return save(*arguments, **keywords)
            finally:
                self._is_saving = False

        return save_in_parts

    def _until_closed(self, train: Any) -> Any:
        @functools.wraps(train)
        def train_and_close(*arguments: Any, **keywords: Any) -> Any:
            try:
                return train(*arguments, **keywords)
            finally:
                self._end()

        return train_and_close

    def _compile(self, trainer: Any) -> None:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate wraps it
        self._compiled = contextlib.ExitStack()
        backend = remat.Backend(**{"as_eager": False, **self._options}, optimizer=optimizer)  # fewer graph breaks
        self._compiled.callback(backend.close)
        # a model that the user has compiled gets its own compiled call back
        self._compiled.callback(setattr, trainer.model, "_compiled_call_impl", trainer.model._compiled_call_impl)
        trainer.model.compile(backend=backend)


_DEFAULT = ("method", "offload")


@functools.cache
def _with_base(cls: type) -> type:
    """Return ``cls`` as a subclass of ``TrainerCallback``, which needs transformers to be imported."""
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError("PenstockCallback needs transformers: pip install 'penstock[hf]'") from error
    if issubclass(cls, TrainerCallback):
        return cls
    return type(cls.__name__, (cls, TrainerCallback), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _calling_trainer(callback: PenstockCallback) -> Any:  # any: a Trainer; its attributes are loosely typed
    """Return the Trainer whose method calls this callback now, since callbacks are not given it."""
    from transformers import Trainer

    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_code.co_varnames
        owner = frame.f_locals.get("self") if names[:1] == ("self",) else None
        if isinstance(owner, Trainer) and callback in owner.callback_handler.callbacks:
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError(
        "PenstockCallback works inside of transformers.Trainer: Trainer(..., callbacks=[PenstockCallback(...)]). For a "
        "loop of your own: with penstock.integrations.offloading(accelerator, model, disk='/nvme'): ..."
    )
