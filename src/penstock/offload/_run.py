"""The offloader: saved-tensor hooks around forward and backward, and what one cycle teaches for the next."""

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from penstock.arguments import checked
from penstock.devices import has_backend
from penstock.errors import BudgetError, DoubleBackwardError, PenstockWarning
from penstock.offload._coming import ComingState, num_changes
from penstock.offload._cycle import Cycle
from penstock.offload._functional import HooksBesideFunctional, is_wrapped
from penstock.offload._learn import CycleSettings, Learner
from penstock.offload._policy import Policy, Rules, SavedTensor, covers
from penstock.offload._problem import TINY_BYTES
from penstock.offload._saved import KeptTensor, Opaque, Packed, ParkedTensor, SavedEntry, WrappedTensor
from penstock.offload._scope import ModuleScope, is_compiled
from penstock.offload._statistics import OffloadStatistics
from penstock.state import account_of
from penstock.storages import id_of
from penstock.tiers import (
    Budget,
    Charges,
    DiskSpec,
    Event,
    EventLog,
    Footprint,
    Size,
    TierStatistics,
    Waterfall,
    gate,
    waterfall_for,
)  # fmt: skip
from penstock.units import format_bytes, parse_bytes

_active = threading.local()


@checked("penstock.offload.activations(model, disk='/nvme')")
def activations(
    model: nn.Module,
    *,
    disk: DiskSpec = None,
    host: Size | None = None,
    budget: Size | Budget | None = None,
    min_size: Size = "1MiB",
    modules: Sequence[str] | None = None,
    keep_last: Sequence[str] = (),
    checkpoint_inputs_only: bool = False,
    policy: Policy | None = None,
    max_in_flight: Size | None = None,
    min_saving: float = 0.05,
    max_stall: float = 0.10,
    verify: bool = False,
    strict: bool = False,
) -> "Offloader":
    """Return a context manager that offloads what autograd saves to host memory or disk, and fetches it in time.

    Make it once, and enter it around forward and backward of every step. The model does not change; gradients are
    bit-identical.

    >>> import torch
    >>> import penstock
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
    >>> offloader = penstock.offload.activations(model, disk=".")  # a directory on an SSD
    >>> for _ in range(3):
    ...     with offloader:
    ...         model(torch.ones(1024, 512)).sum().backward()
    >>> offloader.close()

    Args:
        model: the module whose forward runs inside; its parameters and buffers never move.
        disk: directory on an SSD, several, or a dict of directories and sizes.
        host: bytes of pinned host memory (CUDA only; on a CPU host memory is the device, and this warns).
        budget: device bytes that the step may take at its true peak, static bytes included; then no more is moved than
            the budget requires. Or a ``Budget``, which carries ``host`` and ``disk`` too. ``None``: the lowest peak
            that costs no stall.
        min_size: smaller storages are left alone.
        modules: park only from modules whose names match one of these patterns, such as ``"blocks.*"``.
        keep_last: modules whose tensors stay on the device.
        checkpoint_inputs_only: park only the inputs of ``torch.utils.checkpoint`` regions.
        policy: called for every tensor that the rules above would park; ``False`` keeps it.
        max_in_flight: most bytes on their way out at once; forward waits above it. ``None``: the value with the lowest
            peak, up to the larger of what the link carries in a tenth of a second and four of the largest storages, at
            least 128 MiB. With a budget, nothing is on its way in steps that are not planned yet, and a plan counts
            what is.
        min_saving: decline below this predicted share of the peak.
        max_stall: decline above this predicted share of the step.
        verify: compare a checksum on every fetch, and check every plan.
        strict: raise ``BudgetError`` if the budget was kept and cannot be kept any more, because something outside of
            this context has grown. Without it, that is said once with ``BudgetNotKeptWarning``, and training goes on.

    The first step is recorded. From the second on, a plan says how much is moved and when each fetch begins. On an
    accelerator the second step is recorded instead, since the first one is slow for many reasons. Without gradients
    (``torch.no_grad``) nothing is saved and nothing happens. Raises ``TypeError`` if ``model`` is no module,
    ``ValueError`` if no tier is given, a directory is main memory (on a CPU), or settings contradict each other,
    ``FileNotFoundError`` or ``PermissionError`` for a directory that cannot be used, and, after the first step,
    ``BudgetError`` for a budget below what the step needs. Method: SSDTrain (Wu et al., arXiv 2408.10013).
    """
    rules = Rules(
        min_bytes=parse_bytes(min_size),
        modules=modules,
        keep_last=keep_last,
        checkpoint_inputs_only=checkpoint_inputs_only,
        policy=policy,
    )
    account = account_of(budget, host, disk, "penstock.offload.activations(model, host='8GiB', disk='/nvme')")
    _check_budget(model, account, host)
    _check_patterns(model, modules)
    settings = CycleSettings(
        max_in_flight_bytes=None if max_in_flight is None else parse_bytes(max_in_flight),
        min_saving_share=_share("min_saving", min_saving),
        max_stall_share=_share("max_stall", max_stall),
        account=account,
        footprint=Footprint(tensors=_parameter_bytes(model)),
        verify=verify,
        strict=strict,
    )
    return Offloader(model, account.named("offload"), rules, settings)


class Offloader:
    """A context manager, made by ``activations``, for forward and backward of every step; ``close`` it at the end.

    It is wide because it joins parts that know nothing of each other: rules and scope say what may move, the learner
    plans, the cycle follows the plan, waterfalls move.
    """

    def __init__(self, model: nn.Module, account: Budget, rules: Rules, settings: CycleSettings):
        self.events = EventLog()
        """A log of all copies and stalls, for ``penstock.tiers.write_trace``."""
        self._model = model
        self._account = account
        self._rules = rules
        self._settings = settings
        self._waterfalls: dict[torch.device, Waterfall] = {}
        self._entries: weakref.WeakValueDictionary[int, SavedEntry] = weakref.WeakValueDictionary()
        self._learner = Learner(settings, ComingState(model))
        self._cycle: Cycle | None = None
        self._began_with = 0, 0
        """Uses of the cycle when it was last asked whether the weights have changed, and their changes at its start."""
        self._num_steps = 0
        self._num_tiny = 0
        """Number of tensors that were saved and are too small to be counted."""
        self._last: OffloadStatistics | None = None
        self._hooks: contextlib.ExitStack | None = None
        self._is_closed = False
        if is_compiled(model):
            self._learner.decline(
                "the model is one compiled region, which unpacks all its saved tensors before its backward starts. "
                "Compile its blocks instead (`for block in model.blocks: block.compile()`); to plan the "
                "whole graph, torch.compile(model, backend='penstock', options={'budget': '6GiB'})"
            )
        charges = Charges(account, "offload")
        charges.enter(settings.footprint)
        self._give_back = weakref.finalize(self, charges.give_back)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if has_backend(device):
            self._waterfall(device)  # so that unusable directories raise an error now
        self._scope = ModuleScope(model)  # last, since it adds hooks

    def __enter__(self) -> Self:
        if self._is_closed:
            raise ValueError("this offloader is closed; make a new one: penstock.offload.activations(model, ...)")
        if getattr(_active, "offloader", None) is not None:
            raise ValueError(
                "offloading contexts do not nest. Enter one offloader around forward and backward: "
                "`with offloader: loss = model(batch); loss.backward()`"
            )
        if self._hooks is not None:
            raise ValueError(
                "another thread has entered this offloader, and only one thread at a time can use it; make one for "
                "each thread: penstock.offload.activations(model, ...)"
            )
        self._scope.refresh()
        self._end_cycle(is_boundary=True)
        hooks = contextlib.ExitStack()
        hooks.enter_context(gate.computing())  # an interrupt during this wait leaves nothing behind
        _active.offloader, self._hooks = self, hooks
        if self._cycle is None and not self._learner.declined:
            self._learner.enter(next((parameter.device for parameter in self._model.parameters()), torch.device("cpu")))
        if not self._learner.declined:
            self._hooks.enter_context(HooksBesideFunctional(self._pack, self._unpack))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hooks is None or getattr(_active, "offloader", None) is not self:
            raise ValueError(
                "this offloader cannot be exited in a thread that has not entered it; use it around a step: "
                "`with offloader: ...`"
            )
        _active.offloader = None
        self._hooks.close()
        self._hooks = None
        if kind is not None and self._cycle is not None:
            self._cycle.end()
            self._cycle = None
        self._end_cycle(is_boundary=True)
        if self._cycle is None:
            self._learner.abort()
        if kind is None and self._finds_nothing():
            self._learner.warn(self._nothing())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an offloader cannot be copied or pickled, since it owns lanes and files; make another one: "
            "penstock.offload.activations(model, ...)"
        )

    def statistics(self) -> OffloadStatistics:
        """Return what the last finished step did; zeros before the first."""
        self._end_cycle()
        if self._last is None or self._learner.declined:
            return OffloadStatistics(
                num_steps=self._num_steps,
                saved_bytes=0,
                parked_bytes=0,
                fetched_bytes=0,
                forwarded_bytes=0,
                declined=self._learner.declined or (self._nothing() if self._finds_nothing() else ""),
            )
        return self._last

    def _finds_nothing(self) -> bool:
        """Whether all tensors that were ever saved are tiny."""
        return self._cycle is None and not self._num_steps and bool(self._num_tiny)

    def _nothing(self) -> str:
        return (
            f"all {self._num_tiny} tensors that were saved for backward are smaller than "
            f"{format_bytes(min(self._rules.min_bytes, TINY_BYTES))}; min_size=0 parks them too"
        )

    @property
    def budget(self) -> Budget:
        """The account that it charges, with the limits of the device, host memory and disks."""
        return self._account

    def tier_statistics(self) -> TierStatistics:
        """Return sums over the tiers since the offloader was made, for its first device."""
        return next(iter(self._waterfalls.values())).statistics()

    def trace(self) -> tuple[Event, ...]:
        """Return the events of all copies and stalls, as far as the log still has them."""
        return self.events.since()

    def close(self) -> None:
        """End the lanes, free the disk space and remove the module hooks. Graphs that wait for backward are lost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._learner.abort()
        self._scope.close()
        self._give_back()
        for waterfall in self._waterfalls.values():
            waterfall.close()

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import all of Dynamo here
    def _pack(self, tensor: torch.Tensor) -> Packed:
        start_s = time.perf_counter()
        packed = self._packed(tensor)
        if self._cycle is not None:
            self._cycle.hook_s += time.perf_counter() - start_s
        return packed

    def _packed(self, tensor: torch.Tensor) -> Packed:
        if hasattr(tensor, "trigger_wait"):
            tensor = tensor.trigger_wait()  # an AsyncCollectiveTensor, whose bytes may not have arrived yet
        if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._packed_part(getattr(tensor, name), tensor.layout) for name in names}
            return WrappedTensor(tensor, parts, context)
        if not _has_plain_bytes(tensor) or torch._C._current_graph_task_id() != -1:
            return KeptTensor(tensor)  # tensors saved during recomputation are used at once
        storage = tensor.untyped_storage()
        if self._scope.owns(storage):
            return KeptTensor(tensor)
        if storage.nbytes() < max(1, min(self._rules.min_bytes, TINY_BYTES)):
            self._num_tiny += 1
            return KeptTensor(tensor)
        if tensor._version and not tensor._is_view() and tensor.nbytes < storage.nbytes():
            return KeptTensor(tensor)  # unsafe_chunk, as in RNN cells: siblings have other version counters
        entry = self._entries.get(id_of(storage))
        if entry is None or entry.version != tensor._version or entry.cycle.is_over:
            entry = self._enter_storage(tensor, storage)
            if entry is None:
                return KeptTensor(tensor)
            self._entries[id_of(storage)] = entry
        if entry.handle is not None:
            return ParkedTensor(entry, tensor)
        kept = KeptTensor(tensor, entry)
        if entry.may_leave:
            entry.kept.add(kept)
        return kept

    def _packed_part(self, part: Any, layout: torch.layout) -> Packed | Opaque:  # any: what a wrapper is made of
        """Pack a part of a wrapper tensor. A DTensor lists its mesh, which is no tensor, among its parts.

        The offsets of a jagged batch stay the same objects, since they stand for its shape.
        """
        is_moved = isinstance(part, torch.Tensor) and (layout is not torch.jagged or part.is_floating_point())
        return self._packed(part) if is_moved else Opaque(part)

    def _enter_storage(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedEntry | None:
        """Return the entry of a storage seen for the first time; ``None`` for weights in another dtype."""
        if self._scope.is_weight_cast(tensor):
            return None
        self._end_cycle(is_boundary=self._has_stepped())
        waterfall = self._waterfall(tensor.device)
        seen = SavedTensor(
            module=self._scope.current,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            size_bytes=storage.nbytes(),
            is_checkpoint_input=_is_checkpoint_input(),
        )
        if self._cycle is None:
            has_gradients = any(parameter.grad is not None for parameter in self._model.parameters())
            self._cycle = self._learner.begin(
                self._waterfalls, (seen.size_bytes, seen.module, self._scope.given), has_gradients=has_gradients
            )
            self._began_with = 0, num_changes(self._model.parameters())
        must_keep = self._rules.keep_reason(seen)
        entry, reason = self._cycle.add(
            seen.size_bytes, seen.module, must_keep, StorageWeakRef(storage), tensor._version
        )
        if not reason:
            entry.handle = waterfall.park(storage, label=seen.module)
            if self._cycle.waits_for(entry.index):
                entry.handle.finish_out()
        return entry

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _unpack(self, packed: Packed) -> torch.Tensor:
        if _is_being_differentiated():
            raise DoubleBackwardError(
                "backward(create_graph=True) through offloaded activations is not supported: the second graph would "
                "keep every fetched tensor on the device. Compute higher derivatives outside of the context: "
                "`loss = model(batch); torch.autograd.grad(loss, ..., create_graph=True)` without `with offloader:`"
            )
        start_s = time.perf_counter()
        tensor = packed.unpack()
        if self._cycle is not None:
            self._cycle.hook_s += time.perf_counter() - start_s
        return tensor

    def _waterfall(self, device: torch.device) -> Waterfall:
        if device not in self._waterfalls:
            self._waterfalls[device] = waterfall_for(
                device,
                self._account,
                max_in_flight=self._settings.max_in_flight_bytes,
                verify=self._settings.verify,
                events=self.events,
            )
        return self._waterfalls[device]

    def _has_stepped(self) -> bool:
        """Whether the weights have changed since the cycle began, so that no backward of that step is to come.

        It is asked for the first storage saved after a use, since it looks at all parameters.
        """
        cycle, (num_needs, before) = self._cycle, self._began_with
        if cycle is None or cycle.num_needs == num_needs:
            return False
        self._began_with = cycle.num_needs, before
        return num_changes(self._model.parameters()) != before

    def _end_cycle(self, *, is_boundary: bool = False) -> None:
        """End the cycle if backward has come for all it saved, or for some of it and a context begins or ends.

        What is not asked for by then belongs to no cycle any more. A cycle without a backward teaches nothing; it ends
        with its context if nothing of it lives on.
        """
        cycle = self._cycle
        if cycle is None or torch._C._current_graph_task_id() != -1:
            return  # a context that recomputation enters ends nothing
        if cycle.num_needs and (cycle.is_drained or is_boundary):
            cycle.end()
            self._cycle = None
            self._num_steps += 1
            self._last = self._learner.finish(cycle, self._waterfalls, self._num_steps)
        elif cycle.is_drained and is_boundary:
            self._cycle = None
            self._learner.abort()


class OffloadedModule(nn.Module):
    """A module whose forward runs inside an offloader, made by ``wrap``. ``module`` is the wrapped module."""

    def __init__(self, module: nn.Module, offloader: Offloader):
        super().__init__()
        self.module = module
        self.offloader = offloader

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an offloaded module cannot be copied or pickled, since it owns lanes and files; use the module inside it, "
            "`offloaded.module`, or its state_dict()"
        )

    def forward(self, *arguments: object, **keywords: object) -> object:
        """Call the module with its activations offloaded. Backward may run later, in or outside of a context."""
        with self.offloader:
            return self.module(*arguments, **keywords)


@checked("penstock.offload.wrap(module, disk='/nvme')")
def wrap(module: nn.Module, **options: object) -> OffloadedModule:
    """Return ``module`` with its forward inside ``activations(module, **options)``, for training loops you cannot
    change.

    Parameters gain the prefix ``module.`` in ``state_dict``, as with DistributedDataParallel.
    """
    return OffloadedModule(module, activations(module, **options))  # type: ignore[arg-type]


def _is_being_differentiated() -> bool:
    """Whether backward runs with ``create_graph=True``. A custom function may enable gradients for itself."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    return not isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def _has_plain_bytes(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and not is_wrapped(tensor)
        and has_backend(tensor.device)
        and not tensor.is_quantized
        and not tensor.is_inference()
    )


def _is_checkpoint_input() -> bool:
    """Whether the tensor being saved is an input of a checkpointed region: then a frame of checkpoint.py saves it."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _check_budget(model: nn.Module, account: Budget, host: Size | None) -> None:
    parameters = list(model.parameters())
    if host is not None and all(parameter.device.type == "cpu" for parameter in parameters):
        warnings.warn(
            "host=... is ignored for a model on the CPU, where host memory is the device itself; disk=... is used",
            PenstockWarning,
            stacklevel=4,
        )
    static_bytes = sum(_parameter_bytes(model).values())
    if account.device_bytes is not None and account.device_bytes < static_bytes:
        raise BudgetError(
            f"the budget of {format_bytes(account.device_bytes)} cannot be met: this model needs at least "
            f"{static_bytes} bytes ({format_bytes(static_bytes)}) because its parameters and gradients alone take "
            "that much, and offloading moves only activations"
        )


def _check_patterns(model: nn.Module, modules: Sequence[str] | None) -> None:
    """Raise ``ValueError`` if no module matches ``modules``, since then nothing would be offloaded, without a word.

    Modules to keep may be missing.
    """
    names = [name for name, _ in model.named_modules()]
    if modules is not None and not any(covers(pattern, name) for pattern in modules for name in names):
        shown = ", ".join([*(repr(name) for name in names[1:5]), "..."]) if names[1:] else "no submodules"
        raise ValueError(
            f"`modules` must match modules of the model, got {list(modules)}, and the model has {shown}: "
            "penstock.offload.activations(model, modules=['blocks.*'])"
        )


def _parameter_bytes(model: nn.Module) -> dict[int, int]:
    """Return the bytes of each parameter with its gradient, by ``id``."""
    return {id(parameter): parameter.nbytes * (2 if parameter.requires_grad else 1) for parameter in model.parameters()}


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be a share between 0 and 1, such as 0.05, got {value!r}")
    return float(value)
