"""A model whose parameters, gradients and optimizer state exceed the device, in the user's own loop."""

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from penstock.arguments import checked, must_be
from penstock.devices import backend_of, used_device
from penstock.errors import BudgetError
from penstock.offload._account import account_of
from penstock.offload._meter import Meter
from penstock.offload._operators import SMALL_BYTES, storage_id
from penstock.offload._page import Kind
from penstock.offload._pages import Pages
from penstock.offload._statistics import TrainingStatistics
from penstock.offload._watch import Watch, do_pending
from penstock.probe import can_record, held_bytes
from penstock.stepping import State, refuse_whole_optimizers, state_share, step_part
from penstock.tiers import Budget, DiskSpec, Size, waterfall_for
from penstock.units import format_bytes

_CALL = "penstock.offload.training(model, optimizer, budget='22GiB', host='96GiB', disk='/nvme')"


@checked(_CALL)
def training(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    budget: Size | Budget | None = None,
    *,
    host: Size | None = None,
    disk: DiskSpec = None,
    device: str | torch.device | None = None,
    update_in_backward: bool = False,
) -> "Training":
    """Train a model whose parameters, gradients and optimizer state exceed the device, in a loop of your own.

    >>> training = penstock.offload.training(model, optimizer, budget="22GiB", disk="/nvme")  # doctest: +SKIP
    >>> for batch in loader:  # doctest: +SKIP
    ...     with training:
    ...         loss = model(batch)
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> training.close()  # doctest: +SKIP

    Parameters, gradients and states of 16 KiB and more are on the device only while an operator works on them, and as
    long as the budget has room; else they are in host memory (on an accelerator, ``host``) or on ``disk``. Results are
    those of plain PyTorch to the bit. On a machine without an accelerator main memory is the device, and what leaves
    goes to disk.

    Args:
        model: on the device, or on the CPU to be trained there; its parameters are taken over at once. Or a function
            that makes it: then parameters leave while it runs, and the whole model is never on the device. It is
            ``training.model`` afterwards.
        optimizer: any of PyTorch's but L-BFGS, or your own, as long as it updates a parameter from that parameter, its
            gradient, its state and its group. It steps one parameter after the other. Or a function that makes it from
            the parameters; ``training.optimizer`` afterwards.
        budget: the true peak of the device in every step but the first of its kind, which is measured: bytes, a text
            such as ``"22GiB"``, or a `penstock.tiers.Budget`, which names all tiers.
        host: host memory below an accelerator.
        disk: a directory on an SSD, several, or a dict of directories and sizes.
        device: where to train; by default where the model is, or, where a function makes it, on the accelerator that
            this process uses, else on the CPU. A model that is elsewhere is moved there a parameter at a time.
        update_in_backward: update each parameter as soon as its gradient is complete, so that gradients never leave the
            device. With this you promise one backward per step, followed by ``optimizer.step()``, without clipping,
            scaling or accumulation; results are the same then.

    Raises ``TypeError`` and ``ValueError`` for arguments that cannot be used, ``FileNotFoundError`` or
    ``PermissionError`` for a directory that cannot, and ``BudgetError`` where tiers have no room for parameters,
    gradients and optimizer state, or, after a first step, where an operator needs more than the budget. Inside of a
    step ``TierReadError`` where bytes cannot be read back: begin again from the last checkpoint. What cannot be
    written stays on the device, is said once (`TierDegradedWarning`), and the step goes on.
    """
    account = account_of(budget, host, disk, _CALL)
    if account.device_bytes is None:
        raise ValueError(f"`budget` is needed: the bytes of the device that a step may take: {_CALL}")
    if isinstance(optimizer, nn.Module):
        raise must_be("optimizer", "a torch.optim.Optimizer", optimizer, _CALL)
    if isinstance(model, nn.Module):
        where = _device_of(model)
        if device is not None:
            where = backend_of(device).device
    else:
        where = used_device() if device is None else backend_of(device).device
    return Training(model, optimizer, account, where, update_in_backward=update_in_backward)


class Training:
    """Made by `training`. Enter it around each step; ``close`` it at the end."""

    model: nn.Module
    """As it was given, or made."""
    optimizer: torch.optim.Optimizer
    """As it was given, or made."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        account: Budget,
        device: torch.device,
        *,
        update_in_backward: bool,
    ):
        assert account.device_bytes is not None
        self._device, self._updates_in_backward = device, update_in_backward
        self._waterfall = waterfall_for(device, account)
        self._pages = Pages(self._waterfall, account.device_bytes, device)
        self._num_steps = 0
        self._last: tuple[dict[Kind, int], dict[Kind, int]] = ({}, {})
        self._before = self._last
        self._measured_peak_bytes: int | None = None
        self._meter: Meter | None = None
        self._is_entered = self._is_closed = False
        self._num_whole = 0
        self._updated: set[int] = set()
        """Parameters that this backward has updated."""
        self._hooked: set[int] = set()
        self._undo = contextlib.ExitStack()
        self._thread = threading.get_ident()
        self._watch = Watch(self._pages, device)
        try:
            self._watch.begin()  # now, since whoever reads a parameter anywhere reads what may be elsewhere
        except ValueError:
            self._waterfall.close()
            raise
        try:
            self.model, self.optimizer = self._made(model, optimizer)
            self._move()
            self._names = {id(one): name for name, one in self.model.named_parameters()}
            self._in_optimizer = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
            self._refuse_too_much(account.device_bytes)
            self._take_over_all()
            self._adopt_states()
            self._replace_step()
            for handle in (
                self.model.register_state_dict_pre_hook(self._refuse_state_dict),
                self.optimizer.register_state_dict_pre_hook(self._refuse_state_dict),
                self.optimizer.register_load_state_dict_pre_hook(lambda *_: do_pending(list(self._pages))),
                self.optimizer.register_load_state_dict_post_hook(lambda _: self._adopt_states()),
            ):
                self._undo.callback(handle.remove)
            self._pages.flush()
            self._pages.others_bytes = held_bytes(device)
            if self._pages.others_bytes > account.device_bytes:
                raise BudgetError(
                    f"`budget` must be more than {format_bytes(self._pages.others_bytes)}, got "
                    f"{format_bytes(account.device_bytes)}: that is what is on the device already, which is not of "
                    "this model or its optimizer, or too small to be moved"
                )
        except BaseException:
            self.close(discard=not isinstance(model, nn.Module))
            raise

    def __enter__(self) -> Self:
        if self._is_closed:
            raise ValueError(f"this training is closed; make another: {_CALL}")
        if self._thread != threading.get_ident():
            raise ValueError("a training is entered in the thread that made it, which alone looks at operators")
        if self._is_entered:
            raise ValueError("this training is entered already; enter it once around a step: with training: ...")
        self._is_entered = True
        self._take_over_all()  # some may be new, or have other storages now
        self._pages.begin_step()
        if self._pages.wants_measure and can_record(self._device):
            if self._device.type == "cpu":
                self._pages.flush()  # the profiler does not report the freeing of what was there before it
            self._meter = Meter(self._pages, self._device)
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
                f"{format_bytes(self._pages.budget_bytes)}: no tensor of this step has 16 KiB, and smaller ones stay"
            )

    @contextlib.contextmanager
    @checked("with training.whole(model.head)")
    def whole(self, module: nn.Module | None = None) -> Iterator[None]:
        """Everything that ``module`` has, or the whole model with its optimizer, is on the device inside.

        Whatever the budget says, and free to be read and written in any way: ``state_dict``, ``torch.save``,
        ``save_pretrained``, ``numpy``.
        """
        if self._is_closed:
            yield
            return
        wanted = None if module is None else {storage_id(one) for one in module.parameters()}
        do_pending(list(self._pages) if wanted is None else [one for one in self._pages if one.identity in wanted])
        with self._pages.lock:
            pages = [page for page in self._pages if wanted is None or page.identity in wanted]
            added = set(pages) - self._pages.pinned
            self._pages.pinned |= added
        self._num_whole += 1
        try:
            for page in pages:
                self._pages.need([page], [page])
            yield
        finally:
            self._num_whole -= 1
            with self._pages.lock:
                self._pages.pinned -= added

    def park(self) -> None:
        """All of it leaves the device now, for whoever else needs the memory until the next step."""
        if not self._is_closed:
            self._pages.flush()

    def statistics(self) -> TrainingStatistics:
        """What it did so far."""
        return TrainingStatistics(
            num_steps=self._num_steps,
            state_bytes=sum(page.size_bytes for page in self._pages),
            num_parameters=sum(one.numel() for one in self.model.parameters()),
            fetched_bytes=sum(self._pages.fetched_bytes.values()),
            parked_bytes=sum(self._pages.parked_bytes.values()),
            step_fetched={kind.value: size for kind, size in self._last[0].items()},
            step_parked={kind.value: size for kind, size in self._last[1].items()},
            written_to_disk_bytes=self._waterfall.statistics().written_to_disk_bytes,
            stall_s=self._pages.stall_s,
            held_bytes=self._pages.held_bytes(),
            measured_peak_bytes=self._measured_peak_bytes,
        )

    @checked("training.close()")
    def close(self, *, discard: bool = False) -> None:
        """Brings everything back to the device, whatever the budget says, and takes no more care of it.

        ``discard``: leaves behind what is not there, for a model that would not fit. Save it before, a part at a time:
        ``with training.whole(module): torch.save(module.state_dict(), path)``.
        """
        if self._is_closed:
            return
        if self._is_entered:
            self.__exit__(RuntimeError, RuntimeError("closed in mid-step"), None)
        if discard:
            self._pages.drop_all()
        else:
            do_pending(list(self._pages))
            self._pages.bring_back()
        self._is_closed = True
        self._undo.close()
        self._watch.end()
        self._waterfall.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a training has lanes and files, which cannot be copied or pickled; make another: {_CALL}")

    # What is taken care of

    def _made(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both, made within the budget where they are functions: what they make leaves as they go on."""
        self._pages.others_bytes = held_bytes(self._device)
        self._pages.begin_step()
        try:
            if not isinstance(model, nn.Module):
                model = model()
                if not isinstance(model, nn.Module):
                    raise TypeError(f"`model` returned {type(model).__name__}, not a torch.nn.Module: {_CALL}")
                if _device_of(model) != self._device:
                    raise ValueError(
                        f"`model` made a model on {_device_of(model)}, and `device` is {self._device}; make it there: "
                        "with torch.device('cuda'): return Model()"
                    )
            if not isinstance(optimizer, torch.optim.Optimizer):
                optimizer = optimizer(model.parameters())
                if not isinstance(optimizer, torch.optim.Optimizer):
                    raise TypeError(f"`optimizer` returned {type(optimizer).__name__}, not a torch optimizer: {_CALL}")
            refuse_whole_optimizers(optimizer, _CALL)
        finally:
            self._pages.end_step((), is_whole=False)
        return model, optimizer

    def _move(self) -> None:
        """Parameters and buffers that are elsewhere come to the device, and leave it as more come."""
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
        """Raise ``BudgetError`` where parameters, gradients and states find no room in all tiers together."""
        own = sum(one.nbytes for one in self.model.parameters())
        trained = [one for one in self.model.parameters() if one.requires_grad]
        trained_bytes = sum(one.nbytes for one in trained)
        states = int(trained_bytes * state_share(self.optimizer, trained, self.optimizer.state))
        below = sum(tier.capacity_bytes - tier.used_bytes for tier in self._waterfall.tiers)
        if own + trained_bytes + states > device_bytes + below:
            raise BudgetError(
                f"training takes {format_bytes(own)} of parameters, {format_bytes(trained_bytes)} of gradients and "
                f"{format_bytes(states)} of optimizer state, and there are {format_bytes(device_bytes)} on the device "
                f"and {format_bytes(below)} below it. Give more room: {_CALL}"
            )

    def _take_over_all(self) -> None:
        for one in self.model.parameters():
            page = self._pages.find(storage_id(one))
            if page is None:
                self._take_over(one)
            elif page.kind is not Kind.PARAMETER:
                page.call(self._name(one), Kind.PARAMETER)
            if one.requires_grad and id(one) not in self._hooked:
                self._hooked.add(id(one))
                hook = self._update_in_backward if self._updates_in_backward else self._adopt_gradient
                self._undo.callback(one.register_post_accumulate_grad_hook(hook).remove)
                if one.grad is not None:
                    self._adopt_gradient(one)

    def _take_over(self, parameter: nn.Parameter) -> None:
        """Makes its storage one that can be emptied, shared as it was."""
        if _is_wrapper(parameter) or parameter.device != self._device or parameter.layout is not torch.strided:
            return
        storage = parameter.untyped_storage()
        if storage.nbytes() < SMALL_BYTES or self._pages.is_left_alone(storage):
            return
        if not storage.resizable():  # such as one that NumPy or a file gave
            sharing = [one for one in self.model.parameters() if storage_id(one) == storage._cdata]
            own = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
            own.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))  # type: ignore[call-overload]
            for one in sharing:
                view = torch.empty(0, dtype=one.dtype, device=storage.device)
                view.set_(own.untyped_storage(), one.storage_offset(), one.size(), one.stride())  # type: ignore[call-overload]
                one.data = view
            storage = own.untyped_storage()
        self._pages.begin(storage, Kind.PARAMETER, self._name(parameter))

    def _adopt_gradient(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._adopt(gradient, Kind.GRADIENT, f"gradient of {self._name(parameter)}")

    def _adopt_states(self) -> None:
        for parameter, state in self.optimizer.state.items():
            self._adopt_state(parameter, state)

    def _adopt_state(self, parameter: torch.Tensor, state: State) -> None:
        for field, value in state.items():
            if isinstance(value, torch.Tensor):
                self._adopt(value, Kind.STATE, f"{field} of {self._name(parameter)}")

    def _adopt(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        page = self._pages.find(storage_id(tensor))
        if page is not None:
            if page.kind is Kind.OTHER:
                page.call(name, kind)
            return
        if tensor.device != self._device or tensor.layout is not torch.strided or _is_wrapper(tensor):
            return
        storage = tensor.untyped_storage()
        if SMALL_BYTES <= storage.nbytes() == tensor.nbytes and storage.resizable():
            self._pages.begin(storage, kind, name)

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.setdefault(id(parameter), f"a parameter {tuple(parameter.shape)}")

    # How the optimizer steps

    def _replace_step(self) -> None:
        optimizer, own = self.optimizer, self.optimizer.__dict__.get("step")
        inner = self._step

        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            del self
            return inner(closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler that was here before warns otherwise
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

        def give_back() -> None:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own  # type: ignore[method-assign]

        self._undo.callback(give_back)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """The optimizer's step, one parameter after the other."""
        loss, optimizer = None, self.optimizer
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        for page in list(self._pages):
            if page.pending is not None:  # of a weight that nobody wanted since the last step
                page.pending()
        settings = [_settings(group) for group in optimizer.param_groups]
        is_scaled = (
            getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
        )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if is_scaled or not self._defer(parameter, settings):
                    self._update(parameter)
        self._updated.clear()
        for hook in list(optimizer._optimizer_step_post_hooks.values()):
            hook(optimizer, (), {})
        return loss

    def _defer(self, parameter: torch.Tensor, settings: list[dict[str, Any]]) -> bool:
        """Leaves the update until somebody wants the weight, its gradient or its state: forward fetches it anyway."""
        gradient, page = parameter.grad, self._pages.find(storage_id(parameter))
        own = None if gradient is None else self._pages.find(storage_id(gradient))
        if page is None or own is None:  # nobody would notice who works on it
            return False
        state = self.optimizer.state.setdefault(parameter, {})  # in the order of parameters, as ever
        of_state = (self._pages.find(storage_id(one)) for one in state.values() if isinstance(one, torch.Tensor))
        pages = [page, own, *(one for one in of_state if one is not None)]
        if any(one.pending is not None for one in pages):  # several parameters share memory
            return False
        data = parameter.data
        torch.autograd.graph.increment_version(parameter)

        def update() -> None:
            for one in pages:
                one.pending = None
            calm = torch.inference_mode(False), torch.no_grad(), torch.autocast(self._device.type, enabled=False)
            with calm[0], calm[1], calm[2]:
                before = parameter.grad, parameter.data
                is_other = storage_id(parameter) != page.identity
                if is_other:  # somebody put other numbers in its place meanwhile
                    parameter.grad, parameter.data = None, data
                parameter.grad = gradient
                try:
                    self._update(parameter, state, settings)
                finally:
                    parameter.grad = None
                    if is_other:
                        parameter.data = before[1]
                    parameter.grad = before[0]

        for one in pages:
            one.pending = update
        return True

    def _update(
        self, parameter: torch.Tensor, state: State | None = None, settings: list[dict[str, Any]] | None = None
    ) -> None:
        known = self.optimizer.state.get(parameter)
        state = known if state is None else state
        states = {parameter: {} if state is None else state}
        (after,) = step_part(self.optimizer, [parameter], states, groups=settings, runs_hooks=False).values()
        if known is not state:
            return  # it has another one by now
        if after:
            self.optimizer.state[parameter] = after
            self._adopt_state(parameter, after)
        elif known is not None and not known:
            del self.optimizer.state[parameter]

    def _update_in_backward(self, parameter: torch.Tensor) -> None:
        """Its gradient is complete, as the user has promised, and nobody looks at it."""
        if id(parameter) not in self._in_optimizer:
            return
        if id(parameter) in self._updated:
            raise RuntimeError(
                f"{self._name(parameter)} got a second gradient in one step, after its update. update_in_backward=True "
                "is for one backward per step, in which each parameter gets its gradient once: leave it out, and go on "
                "from the last checkpoint"
            )
        self._updated.add(id(parameter))
        with torch.no_grad():
            self._update(parameter)
        parameter.grad = None

    def _refuse_state_dict(self, *_: Any) -> None:
        if not self._num_whole and not self._is_closed:
            raise ValueError(
                "parameters and optimizer states may be in another tier now. Take them where all of them are on the "
                "device: with training.whole(): torch.save(model.state_dict(), path)"
            )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a group says now; its list of parameters is its own."""
    kept = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in group.items()}
    return kept | {"params": list(group["params"])}


def _device_of(model: nn.Module) -> torch.device:
    devices = {one.device for one in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(
            f"the model's parameters have to be on one device, not on {sorted(map(str, devices)) or 'none'}: "
            "model.to('cuda')"
        )
    wrapped = next((name for name, one in model.named_parameters() if _is_sharded(one)), None)
    if wrapped is not None:
        raise ValueError(
            f"{wrapped} is sharded over several processes (a DTensor); give the model as it was before fully_shard"
        )
    (device,) = devices
    return device


def _is_sharded(tensor: torch.Tensor) -> bool:
    return type(tensor.data).__name__ == "DTensor"


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is made of other tensors and has no bytes of its own."""
    return hasattr(tensor, "__tensor_flatten__")
