"""Costs of a captured step's operators on the device: seconds and workspace.

Every distinct operator (target, and shapes, strides, dtypes and constants of its arguments) runs alone on tensors made
for it. Its time is the median of a few warm runs; its workspace is the bytes that it takes in addition to its results.
Generators are restored.

`Costs` remembers measurements. An operator on other sizes is not timed again: its time is that of the nearest sizes,
scaled by floating-point operations if PyTorch counts them, else by bytes. Its workspace is measured in one run, unless
operators of that kind have had none so far.
"""

import functools
import math
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from penstock.devices import backend_of, is_accelerator, random_forked
from penstock.machines import Machine, counted_flops
from penstock.probe import can_record, record_memory
from penstock.remat import _whole
from penstock.remat._as_eager import function_of
from penstock.remat._capture import JointGraph, device_of, taken_from, tensors_of
from penstock.storages import storage_id
from penstock.tiers import generators_held

_MAX_RUNS = 5
_ENOUGH_S = 0.2
"""Total seconds of runs after which an operator is not run again."""
_OVERHEAD_FLOPS, _OVERHEAD_BYTES = 250_000, 50_000
"""Work of a core in the time that starting an operator takes."""
_UNKNOWN_BYTES_PER_S = 5e9
"""Assumed speed of operators that cannot run alone, since they read the values of their arguments."""


class _Sample(NamedTuple):
    work: float
    duration_s: float
    workspace_bytes: int


class Costs:
    """Measured costs of operators, for steps that share operators or run them on other sizes."""

    def __init__(self) -> None:
        self._exact: dict[Any, tuple[float, int]] = {None: (0.0, 0)}  # any: keys are nested
        self._samples: dict[Any, list[_Sample]] = {}

    def measure(self, captured: JointGraph) -> tuple[list[float], list[int], bool]:
        """Return seconds and workspace bytes of each operator, in order, and whether some times were only scaled."""
        keys = [None if call.op == "placeholder" else _key(call) for call in captured.calls]
        fresh = {
            key: call
            for key, call in zip(keys, captured.calls, strict=True)
            if key is not None and key not in self._exact
        }
        scaled = {key: sample for key, call in fresh.items() if (sample := self._scaled(call)) is not None}
        with generators_held(), random_forked(device_of(call) for call in fresh.values()), torch.no_grad():
            runs = {
                key: _Run(call, is_timed=key not in scaled)
                for key, call in fresh.items()
                if key not in scaled or scaled[key].workspace_bytes
            }
            workspaces = {key: _workspace_bytes(run) for key, run in runs.items()}
        costs = dict(self._exact)
        for key, call in fresh.items():
            if key in scaled:
                costs[key] = (scaled[key].duration_s, workspaces.get(key, 0))
            else:
                costs[key] = self._exact[key] = (runs[key].seconds, workspaces.get(key, 0))
                self._samples.setdefault(_target(call), []).append(_Sample(_work(call), *costs[key]))
        return [costs[key][0] for key in keys], [costs[key][1] for key in keys], bool(scaled)

    def _scaled(self, call: fx.Node) -> _Sample | None:
        samples = self._samples.get(_target(call))
        if not samples:
            return None
        work = _work(call)
        nearest = min(samples, key=lambda sample: abs(math.log(sample.work / work)))
        duration_s = nearest.duration_s * work / nearest.work
        return _Sample(work, duration_s, max(sample.workspace_bytes for sample in samples))


class ModelledCosts(Costs):
    """Modeled costs of operators on a machine that is not here.

    They are the longer of computing and moving bytes, without workspaces.
    """

    def __init__(self, machine: Machine):
        super().__init__()
        self._machine = machine

    def measure(self, captured: JointGraph) -> tuple[list[float], list[int], bool]:
        seconds = [0.0 if call.op == "placeholder" else self._seconds(call) for call in captured.calls]
        return seconds, [0] * len(seconds), False

    def _seconds(self, call: fx.Node) -> float:
        floating = [tensor.dtype for node in (call, *call.all_input_nodes) for tensor in tensors_of(node)]
        dtype = next((kind for kind in floating if kind.is_floating_point), torch.float32)
        return self._machine.operator_s(flops=_flops(call), size_bytes=_bytes_of(call), dtype=dtype)


class _Run:
    """An operator on tensors made for it, which live only while it runs."""

    def __init__(self, call: fx.Node, *, is_timed: bool):
        self.call, self.device = call, device_of(call)
        self.seconds = _bytes_of(call) / _UNKNOWN_BYTES_PER_S
        """The median of a few runs, after one for warming up; an estimate for an operator that cannot run."""
        self.works = False
        """Whether it accepts such tensors. Some operators read the values and refuse them."""
        for self._filler in (0, 1):
            try:
                run = self.made()
                run()
                self.works = True
                if is_timed:
                    self.seconds = _median_s(run, self.device)
                break
            except (RuntimeError, IndexError, ValueError):
                continue

    def made(self) -> Callable[[], Any]:
        """Return the operator on fresh tensors."""
        return _runnable(self.call, self._filler)


def _median_s(run: Callable[[], Any], device: torch.device) -> float:
    taken_s: list[float] = []
    backend = backend_of(device if is_accelerator(device) else "cpu")
    while len(taken_s) < _MAX_RUNS and sum(taken_s) < _ENOUGH_S:
        taken_s.append(backend.seconds(run))
    return median(taken_s)


def _runnable(call: fx.Node, filler: int) -> Callable[[], Any]:
    whole = _whole.runnable(call)
    if whole is not None:
        return whole
    real = functools.partial(_real, filler=filler)
    arguments, keywords = pytree.tree_map(
        real, (call.args, call.kwargs), is_leaf=lambda argument: isinstance(argument, fx.Node)
    )
    return functools.partial(function_of(call), *arguments, **keywords)


def _workspace_bytes(run: _Run) -> int:
    """Return the bytes that an operator takes at its peak in addition to its results; 0 where nothing counts them."""
    device = run.device if is_accelerator(run.device) else "cpu"  # also for what is traced on 'meta'
    if not run.works or not can_record(device):
        return 0
    operator = run.made()
    with record_memory(device, this_thread_only=True) as recording:  # only differences matter
        operator()
    return max(0, recording.report.activation_bytes - _made_bytes(run.call))


def _made_bytes(call: fx.Node) -> int:
    taken, value = taken_from(call), call.meta.get("val")
    tensors = tensors_of(call)
    if taken is not None and value is not None:
        tensors = [result for index, result in enumerate(value) if index in taken and isinstance(result, torch.Tensor)]
    sizes = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def _work(call: fx.Node) -> float:
    """Return floating-point operations, or bytes if PyTorch does not count them, plus the overhead of a start."""
    flops = _flops(call)
    return _OVERHEAD_FLOPS + flops if flops else _OVERHEAD_BYTES + _bytes_of(call)


def _flops(call: fx.Node) -> float:
    """Return floating-point operations; 0 if PyTorch does not count them."""
    arguments, keywords = fx.node.map_arg((call.args, call.kwargs), lambda node: node.meta.get("val"))
    return counted_flops(call.target, arguments, keywords, call.meta.get("val"))


def _bytes_of(call: fx.Node) -> float:
    return float(sum(tensor.nbytes for node in (call, *call.all_input_nodes) for tensor in tensors_of(node)))


def _real(argument: Any, filler: int) -> Any:
    """Return a tensor like a fake one.

    Indices are ``filler``: 0, which every table has, or 1, for operators whose first index is 1.
    """
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta["val"]
    if isinstance(value, torch.Tensor):
        length = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        tensor = torch.empty(max(0, length) if value.numel() else 0, dtype=value.dtype, device=value.device)
        tensor = tensor.uniform_(0.1, 0.9) if tensor.is_floating_point() else tensor.fill_(filler)
        return tensor.as_strided(value.shape, value.stride())
    return value


def _target(call: fx.Node) -> Any:
    """Return a key of operators that cost the same, except for sizes."""
    return call.target, tuple(tensor.dtype for tensor in tensors_of(call)), tuple(sorted(taken_from(call) or ()))


def _key(call: fx.Node) -> Any:
    def part(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta["val"]
            if isinstance(value, torch.Tensor):
                return tuple(value.shape), value.stride(), value.dtype, value.device
            return str(value)
        return repr(argument)

    leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=lambda argument: isinstance(argument, fx.Node))
    return call.target, tuple(map(part, leaves)), str(spec), frozenset(taken_from(call) or ())
