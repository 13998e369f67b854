"""What each operator of a captured step costs on the device: seconds and workspace.

Every distinct operator (target, and shapes, strides, dtypes and constants of its arguments) is run alone on tensors
made for it: the median of a few warm runs, and the bytes it takes beside its results. Generators are left as they were.
"""

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from penstock.errors import InternalError
from penstock.probe import can_record, peak_bytes, record_memory
from penstock.remat._as_eager import function_of
from penstock.remat._capture import Captured, device_of, taken_from, tensors_of
from penstock.tiers import generators_held

_MAX_RUNS = 5
_ENOUGH_S = 0.2
"""An operator is not run again once its runs have taken so long together."""
_MARK_BYTES = 1_000_003
"""Allocations of about this size separate operators in the record of memory: its clock is not good enough for that."""


def measure(captured: Captured) -> tuple[list[float], list[int]]:
    """Seconds and workspace bytes of each operator of ``captured``, in its order."""
    keys = [None if call.op == "placeholder" else _key(call) for call in captured.calls]
    distinct = {key: call for key, call in zip(keys, captured.calls, strict=True) if key is not None}
    costs: dict[Any, tuple[float, int]] = {None: (0.0, 0)}  # any: a key of nested arguments
    devices = [device for device in {device_of(call) for call in distinct.values()} if device.type == "cuda"]
    with generators_held(), torch.random.fork_rng(devices), torch.no_grad():
        durations_s = {key: _seconds(*_runnable(call)) for key, call in distinct.items()}
        workspaces = _workspaces(distinct)
    costs |= {key: (durations_s[key], workspaces[key]) for key in distinct}
    return [costs[key][0] for key in keys], [costs[key][1] for key in keys]


def _workspaces(distinct: dict[Any, fx.Node]) -> dict[Any, int]:
    """Bytes that each operator takes at its peak beside its results; 0 where a profiler of somebody else runs."""
    found: dict[Any, int] = dict.fromkeys(distinct, 0)
    on_cpu: list[Any] = []
    for key, call in distinct.items():
        if device_of(call).type == "cuda":
            run, device = _runnable(call)
            found[key] = max(0, peak_bytes(run, device=device).activation_bytes - _made_bytes(call))
        else:
            on_cpu.append(key)
    if not on_cpu or not can_record("cpu"):
        return found
    mark_bytes = _MARK_BYTES + max(map(_made_bytes, distinct.values()))  # no operator makes a storage of that size
    with record_memory("cpu", this_thread_only=True) as recording:  # differences are all that matters
        for key in on_cpu:
            run, _ = _runnable(distinct[key])
            torch.empty(mark_bytes, dtype=torch.uint8)
            run()
            torch.empty(mark_bytes, dtype=torch.uint8)
    held = [recording.report.start_bytes, *(size for _, size in recording.report.timeline)]
    marks = [at for at in range(1, len(held)) if held[at] - held[at - 1] == mark_bytes]
    if len(marks) != 2 * len(on_cpu):
        raise InternalError(f"{len(marks)} marks between {len(on_cpu)} operators in the record of memory")
    for key, begin, end in zip(on_cpu, marks[::2], marks[1::2], strict=True):
        taken = held[begin + 1 : end]  # the mark itself is gone again
        found[key] = max(0, max(taken) - taken[0] - _made_bytes(distinct[key]))
    return found


def _made_bytes(call: fx.Node) -> int:
    taken, value = taken_from(call), call.meta.get("val")
    tensors = tensors_of(call)
    if taken is not None and value is not None:
        tensors = [one for at, one in enumerate(value) if at in taken and isinstance(one, torch.Tensor)]
    made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(made.values())


def _runnable(call: fx.Node) -> tuple[Callable[[], Any], torch.device]:
    """The operator on tensors made for it."""
    arguments, keywords = pytree.tree_map(_real, (call.args, call.kwargs), is_leaf=lambda one: isinstance(one, fx.Node))
    return functools.partial(function_of(call), *arguments, **keywords), device_of(call)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median of a few runs, after one that warms up."""
    run()
    taken_s: list[float] = []
    while len(taken_s) < _MAX_RUNS and sum(taken_s) < _ENOUGH_S:
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            taken_s.append(start.elapsed_time(end) / 1e3)
        else:
            start_s = time.perf_counter()
            run()
            taken_s.append(time.perf_counter() - start_s)
    return median(taken_s)


def _real(argument: Any) -> Any:
    """A tensor like a fake one. Indices are 0, which every table has."""
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta["val"]
    if isinstance(value, torch.Tensor):
        length = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        made = torch.empty(max(0, length) if value.numel() else 0, dtype=value.dtype, device=value.device)
        made = made.uniform_(0.1, 0.9) if made.is_floating_point() else made.zero_()
        return made.as_strided(value.shape, value.stride())
    return value


def _key(call: fx.Node) -> Any:
    def part(one: Any) -> Any:
        if isinstance(one, fx.Node):
            value = one.meta["val"]
            if isinstance(value, torch.Tensor):
                return tuple(value.shape), value.stride(), value.dtype, value.device
            return str(value)
        return repr(one)

    leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=lambda one: isinstance(one, fx.Node))
    return call.target, tuple(map(part, leaves)), str(spec), frozenset(taken_from(call) or ())
