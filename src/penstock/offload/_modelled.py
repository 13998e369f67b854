"""A cycle on a machine that is not available: the step runs on tensors without bytes, against a clock of operators.

Every operator advances the clock by the time that a `Machine` needs for its floating-point operations or its bytes.
Hooks see what autograd saves, as the offloader's do, so that the same planner can plan the cycle.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.arguments import checked
from penstock.machines import Machine, counted_flops
from penstock.offload._problem import TINY_BYTES, OffloadProblem, in_flight_bytes
from penstock.offload._recording import CycleTimes, Recording
from penstock.offload._scope import ModuleScope
from penstock.storages import id_of, storage_id


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """Declare the parameters of `torch.nn.functional.scaled_dot_product_attention`."""


_SIGNATURE = inspect.signature(_attention)
_FREE = {torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.empty, torch.ops.aten.empty_like}
"""Operators that, like views, take no time on a device."""


@checked("penstock.offload.modelled_cycle(model, lambda: model(batch).backward(), penstock.machines.MACHINES['h200'])")
def modelled_cycle(
    model: nn.Module,
    step: Callable[[], object],
    machine: Machine,
    *,
    to_disk: bool = False,
    is_staged: bool = False,
    min_size_bytes: int = 2**20,
    max_in_flight_bytes: int | None = None,
) -> OffloadProblem:
    """Return the problem that the offloader would plan if ``step``, a forward and backward of ``model``, ran on
    ``machine``.

    ``model`` and its inputs in ``step`` are on the ``"meta"`` device: `with torch.device("meta"): model = Model()`. The
    problem has only the saved storages, not what else is on the device. Storages go to host memory, or ``to_disk``:
    either directly, or through host memory (``is_staged``), which limits the bytes on their way.

    Raises ``ValueError`` for a model that is not on ``"meta"``, and whatever PyTorch raises if the step looks at
    numbers.
    """
    if any(parameter.device.type != "meta" for parameter in model.parameters()):
        raise ValueError("the model must be on the meta device: with torch.device('meta'): model = Model()")
    clock, scope = _OperatorClock(machine), ModuleScope(model)
    own = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    times_s: list[float] = []
    recording = Recording(lambda: times_s.append(clock.now_s))
    seen: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        storage = tensor.untyped_storage()
        if id_of(storage) in own or storage.nbytes() < max(1, min(min_size_bytes, TINY_BYTES)):
            return tensor, -1
        if id_of(storage) not in seen:
            must_keep = "kept: small" if storage.nbytes() < min_size_bytes else ""
            seen[id_of(storage)] = recording.pack(storage.nbytes(), scope.current, must_keep), storage
        return tensor, seen[id_of(storage)][0]

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, index = packed
        if index >= 0:
            recording.need(index)
        return tensor

    try:
        with clock, _Attention(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            step()
    finally:
        scope.close()
    rates = machine.lane_rates(to_disk=to_disk)
    if max_in_flight_bytes is None:
        sizes = [use.size_bytes for use in recording.uses if not use.must_keep]
        max_in_flight_bytes = in_flight_bytes(rates[0], max(sizes, default=0)) if is_staged else max(1, sum(sizes))
    first_s = times_s[0] if times_s else 0.0
    computed_s = [time_s - first_s for time_s in times_s]
    return recording.problem(
        CycleTimes(computed_s=computed_s, clock_s=computed_s, step_s=clock.now_s - first_s),
        rates,
        None,
        {"max_in_flight_bytes": max_in_flight_bytes},
    )


class _Attention(TorchFunctionMode):
    """A mode that computes attention as fused kernels do, which save no matrix of all pairs.

    PyTorch would save one for tensors on ``"meta"``.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            bound = _SIGNATURE.bind(*args, **kwargs)
            bound.apply_defaults()
            query, key, value, mask, dropout, is_causal, *_ = bound.arguments.values()
            if mask is None and query.shape[1:2] == key.shape[1:2] == value.shape[1:2] and query.dim() == 4:
                return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal)[0]
        return function(*args, **kwargs)


class _OperatorClock(TorchDispatchMode):
    """A clock that every operator advances."""

    def __init__(self, machine: Machine):
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_s = 0.0
        self._machine = machine

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket not in _FREE:
            self.now_s += operator_s(self._machine, function, args, kwargs or {}, result)
        return result


def operator_s(machine: Machine, function: Any, args: Any, kwargs: Any, made: Any) -> float:
    """Return the seconds that a PyTorch operator takes on ``machine``, by the sizes of its arguments and results."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs, made)) if isinstance(leaf, torch.Tensor)]
    flops = counted_flops(function, args, kwargs, made)
    floating = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return machine.operator_s(flops=flops, size_bytes=sum(tensor.nbytes for tensor in tensors), dtype=floating)
