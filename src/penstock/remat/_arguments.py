"""Arguments of Dynamo's graphs: the kinds that need a capture of their own, and the storages behind them.

Dynamo makes a graph with symbols for sizes that change, and passes their values as arguments. A captured graph has
numbers instead.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.devices import kinds
from penstock.remat import _dynamo
from penstock.storages import id_of

_FURTHER_GRADIENTS = 3
"""Limit of separate further gradients of a tensor between graphs.

If it is used more often, some of its gradients are added within the graph.
"""


@dataclass(frozen=True, slots=True)
class KnownArguments:
    """The kind of arguments for which a variant is made."""

    devices: frozenset[torch.device]
    """Devices of the tensors."""
    shapes: str
    """Shapes of the tensors, without parameters, as text."""
    times: tuple[int, ...]
    """How often each argument is passed: never if it is a number, else see `_times`."""

    @staticmethod
    def of(arguments: Sequence[Any], numbers: frozenset[int]) -> "KnownArguments":
        """Describe the arguments of a call; those at ``numbers`` represent numbers."""
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        devices = frozenset(tensor.device for tensor in tensors)
        shapes = ", ".join(
            f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
            for tensor in tensors
            if not isinstance(tensor, nn.Parameter)
        )
        for kind in kinds():
            if torch.is_autocast_enabled(kind) and any(device.type == kind for device in devices):
                shapes += f" under autocast to {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"
        times = tuple(0 if index in numbers else _times(argument) for index, argument in enumerate(arguments))
        return KnownArguments(devices, shapes, times)

    def passed(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments that the variant takes. Repetitions are aliases, each with a gradient of its own."""
        return [
            argument.view_as(argument) if number else argument
            for argument, count in zip(arguments, self.times, strict=True)
            for number in range(count)
        ]

    def repeated(self) -> list[range]:
        """Return, for each argument that is passed several times, the positions of its repetitions."""
        ends = itertools.accumulate(self.times)
        return [range(end - count, end) for end, count in zip(ends, self.times, strict=True) if count > 1]

    def each_once(self) -> "KnownArguments":
        """Return the same arguments, but none is passed several times."""
        return replace(self, times=tuple(min(count, 1) for count in self.times))


def _times(argument: Any) -> int:
    """Return how often an argument is passed. A tensor between graphs is passed once more for each separate gradient.

    Otherwise the gradients of several uses would be added to each other before they meet those of other graphs. Eager
    PyTorch adds them one by one, the latest use first, and so does autograd if each belongs to an argument of its own.
    """
    is_between = isinstance(argument, torch.Tensor) and argument.requires_grad and not argument.is_leaf
    return 1 + _FURTHER_GRADIENTS if is_between else 1


def for_arguments(module: fx.GraphModule, arguments: Sequence[Any], times: Sequence[int]) -> fx.GraphModule:
    """Return the graph with numbers in place of inputs that represent them, and unused inputs for further gradients."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    places = module.graph.find_nodes(op="placeholder")
    for node, argument, count in zip(places, arguments, times, strict=True):
        if count:
            copies[node] = graph.node_copy(node)
            for number in range(1, count):
                graph.placeholder(f"{node.target}_{number}").meta = dict(node.meta)
        else:
            copies[node] = argument.item() if isinstance(argument, torch.Tensor) else argument
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target == "item" and not isinstance(copies[node.args[0]], fx.Node):
            copies[node] = copies[node.args[0]]
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


_KERNELS = [
    getattr(torch.backends.cuda, f"{kernel}_sdp_enabled") for kernel in ("flash", "mem_efficient", "math", "cudnn")
]
"""Switches of the kernels among which `torch.nn.attention.sdpa_kernel` chooses, on CPUs too."""


def kind_of(arguments: Sequence[Any], numbers: frozenset[int]) -> Any:
    """Return a key of everything that a captured graph depends on."""
    shown: list[Any] = []
    first: dict[int, int] = {}
    for index, argument in enumerate(arguments):
        if index in numbers:
            number = argument.item() if isinstance(argument, torch.Tensor) else argument
            shown.append((number, math.copysign(1, number)) if isinstance(number, float) else number)
        elif isinstance(argument, torch.Tensor):
            strided = argument.layout is torch.strided
            shown.append(
                (
                    tuple(argument.shape),
                    argument.stride() if strided else argument.layout,
                    argument.dtype,
                    argument.device,
                    argument.requires_grad,
                    argument.is_leaf,
                    type(argument),
                )
            )
            if not isinstance(argument, nn.Parameter) and strided:
                key = storage_of(argument)[0]
                if first.setdefault(key, index) != index:
                    shown.append((first[key], arguments[first[key]].storage_offset(), argument.storage_offset()))
        else:
            shown.append(type(argument))
    modes = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in kinds())
    kernels = [is_enabled() for is_enabled in _KERNELS]
    return tuple(shown), torch.is_grad_enabled(), modes, torch.is_inference_mode_enabled(), *kernels


def floats_of(kind: Any) -> list[float]:
    """Return the floats among the arguments of a kind."""
    return [shown[0] for shown in kind[0] if _is_float(shown)]


def without_floats(kind: Any) -> Any:
    """Return a key that is equal for kinds that differ only in their floats."""
    return tuple(float if _is_float(shown) else shown for shown in kind[0]), *kind[1:]


def _is_float(shown: Any) -> bool:
    return isinstance(shown, tuple) and isinstance(shown[0], float)


def number_places(module: fx.GraphModule) -> frozenset[int]:
    """Return the positions of arguments that are numbers, or tensors that represent a number of the caller's."""
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(index for index, node in enumerate(places) if _dynamo.is_number(node))


def storage_of(value: Any) -> tuple[int, int]:
    """Return identity and bytes of a tensor's storage; zeros for anything else."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0, 0
    storage = value.untyped_storage()
    return id_of(storage), storage.nbytes()


def weak_storage(value: Any) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's storage."""
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return StorageWeakRef(value.untyped_storage()) if is_strided else None
