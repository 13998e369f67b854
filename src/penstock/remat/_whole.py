"""Operators that are captured whole: forward and backward run as in eager PyTorch, with bit-identical results.

Tracing decomposes RNNs and the CTC loss into operators that round differently, or cannot trace them at all. For the
gradient of a product it uses another method, since it may not check whether a factor is 0. Here each is two operators
of our own. Forward runs the eager function and keeps its autograd graph, and backward runs that graph.

The inputs and outputs that the graph saves are passed to backward again, so the plan may drop and recompute them. What
it saves in addition lives in the ticket that forward returns (`_ticket.py`), which is a storage of its own in the plan.
"""

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from penstock.devices import kinds, random_forked
from penstock.remat import _rnn, _ticket
from penstock.storages import storage_id

_library = torch.library.Library("penstock", "DEF")
_library.define("whole(int recipe, Tensor[] inputs) -> Tensor[]")
_library.define("whole_random(int recipe, Tensor[] inputs) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(
    "whole_backward(int recipe, Tensor ticket, Tensor[] gradients, Tensor[] inputs, Tensor[] outputs) -> Tensor[]"
)
FORWARD = (torch.ops.penstock.whole.default, torch.ops.penstock.whole_random.default)
BACKWARD = torch.ops.penstock.whole_backward.default

_recipes: "weakref.WeakValueDictionary[int, Recipe]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def keep_whole(graph: fx.Graph) -> list["Recipe"]:
    """Rewrite a graph of Dynamo's, and return the list of its recipes, which tracing fills.

    The caller must keep the list as long as the graph runs.
    """
    recipes: list[Recipe] = []
    for node in graph.nodes:
        kind = _kind_of(node)
        if kind is not None:
            function = _METHODS[node.target] if node.op == "call_method" else node.target
            call = _Call(function, kind, recipes, is_random=kind.is_random(node), are_leaves=_are_leaves(node))
            node.op, node.target = "call_function", call
    return recipes


def is_whole(call: fx.Node) -> bool:
    """Whether a node is one half of an operator that is captured whole."""
    return call.target in FORWARD or call.target is BACKWARD


def is_opaque(value: fx.Node) -> bool:
    """Whether a node is the ticket of an operator that is captured whole, which can be dropped but not moved."""
    if value.target is not operator.getitem:
        return False
    made_by: fx.Node = value.args[0]  # type: ignore[assignment]
    return made_by.target in FORWARD and bool(value.args[1] == len(made_by.meta["val"]) - 1)


@dataclass(slots=True)
class _Shape:
    """Findings of an example run of a recipe."""

    outputs: "list[_Layout]"
    gradients: "list[_Layout | None]"
    """Layout per input that needs a gradient; ``None`` if it gets none."""
    saved_bytes: int
    """Bytes that the autograd graph saves in addition to inputs and outputs."""
    reads_inputs: tuple[int, ...]
    """Inputs that backward reads."""
    reads_outputs: tuple[int, ...]


@dataclass(slots=True, weakref_slot=True)
class Recipe:
    """One call of an eager function in a captured step, without its tensors."""

    function: Callable[..., Any]
    spec: Any  # a pytree's
    constants: list[Any]
    """Arguments as a flat list, without the tensors."""
    places: list[int]
    """Positions of the tensors in that list."""
    kind: "_WholeKind"
    needs_gradient: tuple[bool, ...] = ()
    """Per tensor, whether it needs a gradient."""
    are_leaves: tuple[bool, ...] = ()
    """Per tensor, whether it is a parameter, rather than a result of the step."""
    autocast: dict[str, tuple[bool, torch.dtype]] = field(default_factory=dict)
    """Autocast at the call: per type of device, whether it is on, and its dtype."""
    number: int = 0
    shape: _Shape | None = None

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _recipes[self.number] = self

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the function, and return its tensors."""
        flat = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        arguments, keywords = pytree.tree_unflatten(flat, self.spec)
        with ExitStack() as stack:
            for context in self._autocasts():
                stack.enter_context(context)
            return pytree.tree_leaves(self.function(*arguments, **keywords))

    def _autocasts(self) -> list[AbstractContextManager[Any]]:
        return [torch.autocast(device, dtype=dtype, enabled=is_on) for device, (is_on, dtype) in self.autocast.items()]

    def examples(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors like those given, with values that the function accepts."""
        tensors = [_example(tensor) for tensor in like]
        flat = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        self.kind.fill(*pytree.tree_unflatten(flat, self.spec)[0])
        return tensors


@dataclass(frozen=True, slots=True)
class _WholeKind:
    """A kind of function that is kept whole."""

    is_random: Callable[[fx.Node], bool]
    fill: Callable[..., None]
    """A function that writes acceptable values into arguments like those of a step."""
    data_at: int | None = None
    """For an RNN, the index of its data among its arguments."""


class _Call:
    """A replacement of the function in Dynamo's graph."""

    def __init__(
        self,
        function: Callable[..., Any],
        kind: _WholeKind,
        recipes: list[Recipe],
        *,
        is_random: bool,
        are_leaves: Sequence[bool],
    ):
        self.function, self.kind, self.recipes, self.is_random = function, kind, recipes, is_random
        self.are_leaves = are_leaves
        self.__name__ = getattr(function, "__name__", "whole")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        values = pytree.tree_leaves((arguments, keywords))
        leaves = {id(value) for value, is_leaf in zip(values, self.are_leaves, strict=True) if is_leaf}
        run = functools.partial(self._run, leaves)
        hidden_at = None if keywords else _hidden_at(self.kind, arguments)
        if hidden_at is None:
            return run(*arguments, **keywords)
        assert self.kind.data_at is not None
        self.is_random = False  # only between layers
        return _rnn.layer_by_layer(run, hidden_at, self.kind.data_at, arguments)

    def _run(self, leaves: set[int], /, *arguments: Any, **keywords: Any) -> Any:
        flat, spec = pytree.tree_flatten((arguments, keywords))
        places = [index for index, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        tensors = [flat[place] for place in places]
        constants = [None if isinstance(value, torch.Tensor) else value for value in flat]
        recipe = Recipe(self.function, spec, constants, places, self.kind, autocast=_autocast_now())
        self.recipes.append(recipe)
        needs = tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors)
        recipe.needs_gradient = needs
        recipe.are_leaves = tuple(id(tensor) in leaves for tensor in tensors)
        outputs = _Function.apply(recipe, self.is_random, *tensors)  # type: ignore[no-untyped-call]
        return outputs[0] if len(outputs) == 1 else outputs


def _are_leaves(call: fx.Node) -> list[bool]:
    """Return, per argument in a flat list, whether it is a parameter."""
    arguments = pytree.tree_leaves((call.args, call.kwargs))
    return [
        isinstance(argument, fx.Node) and isinstance(argument.meta.get("example_value"), nn.Parameter)
        for argument in arguments
    ]


def _autocast_now() -> dict[str, tuple[bool, torch.dtype]]:
    return {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in kinds()
        if torch.is_autocast_enabled(device)
    }


class _Function(torch.autograd.Function):
    """The function that AOTAutograd traces."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, is_random: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *outputs, ticket = FORWARD[is_random](recipe.number, list(tensors))
        assert recipe.shape is not None
        ctx.recipe = recipe
        ctx.num_tensors = len(tensors)
        ctx.set_materialize_grads(True)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        read = [tensors[index] for index in recipe.shape.reads_inputs] + [
            outputs[index] for index in recipe.shape.reads_outputs
        ]
        ctx.save_for_backward(ticket, *read)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ticket, *read = ctx.saved_tensors
        recipe, shape = ctx.recipe, ctx.recipe.shape
        inputs, outputs = read[: len(shape.reads_inputs)], read[len(shape.reads_inputs) :]
        floating = [
            gradient for gradient, like in zip(gradients, shape.outputs, strict=True) if like.dtype.is_floating_point
        ]
        results = iter(BACKWARD(recipe.number, ticket, floating, inputs, outputs))
        has = iter(shape.gradients)
        return (
            None,
            None,
            *[next(results) if needs and next(has) is not None else None for needs in recipe.needs_gradient],
        )


class _Graph:
    """The autograd graph of one forward."""

    def __init__(self, recipe: Recipe, saved: "_SavedTensors", begins: list[Any], ends: list[Any]):
        self.recipe, self.saved = recipe, saved
        self.begins = begins
        """Edges at which gradients of inputs come out."""
        self.ends = ends
        """Edges at which gradients of floating-point outputs go in."""
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes that are saved in addition to inputs and outputs."""
        return self.saved.held_bytes

    def backward(
        self, gradients: Sequence[torch.Tensor], now: dict[tuple[str, int], torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return gradients of the inputs that need one. ``now`` has the inputs and outputs that are saved."""
        if not self.begins:
            return []
        with self._lock:
            self.saved.now = now
            try:
                return list(
                    torch.autograd.grad(self.ends, self.begins, gradients, retain_graph=True, allow_unused=True)
                )
            finally:
                self.saved.now = {}


class _SavedTensors:
    """Tensors that an autograd graph saved.

    The graph refers to this object, so it must not refer to the graph: both would leak.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self.now: dict[tuple[str, int], torch.Tensor] = {}
        """Inputs and outputs, while backward runs."""
        self.held_bytes = 0
        self._places = {
            storage_id(tensor): ("input", index, int(tensor.storage_offset())) for index, tensor in enumerate(inputs)
        }
        self._tokens: list[_Token] = []

    def pack(self, tensor: torch.Tensor) -> "_Token":
        """Replace a saved tensor by a token. Autograd calls it as a hook."""
        token = _Token(tensor.detach())
        self._tokens.append(token)
        return token

    def unpack(self, token: "_Token") -> torch.Tensor:
        """Return the tensor of a token. Autograd calls it as a hook."""
        return token.tensor if token.tensor is not None else token.on(self.now[token.kind, token.at])

    def seal(self, outputs: Sequence[torch.Tensor]) -> None:
        """Release inputs and outputs."""
        places = {
            storage_id(tensor): ("output", index, int(tensor.storage_offset())) for index, tensor in enumerate(outputs)
        }
        places |= self._places
        own: dict[int, int] = {}
        for token in self._tokens:
            assert token.tensor is not None
            if storage_id(token.tensor) in places:
                token.leave(*places[storage_id(token.tensor)])
            else:
                own[storage_id(token.tensor)] = token.tensor.untyped_storage().nbytes()
        self.held_bytes = sum(own.values())

    def read(self, kind: str) -> tuple[int, ...]:
        """Return which inputs or outputs are saved."""
        return tuple(sorted({token.at for token in self._tokens if token.kind == kind}))


class _Token:
    """One saved tensor."""

    __slots__ = ("_layout", "at", "kind", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor: torch.Tensor | None = tensor
        self.kind, self.at = "", 0
        self._layout: tuple[Any, ...] = ()

    def leave(self, kind: str, index: int, offset: int) -> None:
        """Release the tensor. Only its place and layout stay."""
        assert self.tensor is not None
        self.kind, self.at = kind, index
        self._layout = (self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset() - offset)
        self.tensor = None

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor, as a view of ``base``."""
        shape, stride, offset = self._layout
        return base.as_strided(shape, stride, base.storage_offset() + offset)


class _EnterGraph(torch.autograd.Function):
    """An operator through which a tensor enters the graph.

    The node of a leaf holds the leaf; this node holds nothing.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


def _entry(anchor: torch.Tensor, tensor: torch.Tensor, *, is_leaf: bool) -> torch.Tensor:
    """Return the tensor of which a gradient is needed.

    Autocast casts a parameter only once for all its uses, and so sums its gradients in half precision, if it is a leaf.
    Here it is therefore a leaf, too. Its node holds it, which does no harm, since parameters stay anyway.
    """
    if is_leaf:
        return tensor.detach().requires_grad_()
    return cast("torch.Tensor", _EnterGraph.apply(anchor, tensor))  # type: ignore[no-untyped-call]


def run_forward(number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run forward, and return the outputs and a ticket for the graph."""
    recipe = _recipes[number]
    saved = _SavedTensors(inputs)
    edge = torch.autograd.graph.get_gradient_edge
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        entries = [
            _entry(anchor, tensor, is_leaf=is_leaf and bool(recipe.autocast)) if needs else tensor.detach()
            for tensor, needs, is_leaf in zip(inputs, recipe.needs_gradient, recipe.are_leaves, strict=True)
        ]
        begins = [edge(entry) for entry, needs in zip(entries, recipe.needs_gradient, strict=True) if needs]
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            results = recipe.call(entries)
        ends = [edge(result) for result in results if result.is_floating_point()] if begins else []
    outputs = [result.detach() for result in results]
    saved.seal(outputs)
    return [*outputs, _ticket.issue(_Graph(recipe, saved, begins, ends))]


def run_backward(
    number: int,  # noqa: ARG001
    ticket: torch.Tensor,
    gradients: list[torch.Tensor],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> list[torch.Tensor]:
    graph: _Graph = _ticket.thing_of(ticket)
    shape = graph.recipe.shape
    assert shape is not None
    now = {("input", index): tensor for index, tensor in zip(shape.reads_inputs, inputs, strict=True)}
    now |= {("output", index): tensor for index, tensor in zip(shape.reads_outputs, outputs, strict=True)}
    return [gradient for gradient in graph.backward(gradients, now) if gradient is not None]


def _fake_forward(number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    recipe = _recipes[number]
    if recipe.shape is None:
        recipe.shape = _in_a_thread(lambda: _shape_of(recipe, inputs))
    size_bytes = max(_ticket.TICKET_BYTES, recipe.shape.saved_bytes)
    return [*map(_empty, recipe.shape.outputs), torch.empty(size_bytes, dtype=torch.uint8, device=inputs[0].device)]


def _fake_backward(
    number: int,
    ticket: torch.Tensor,  # noqa: ARG001
    gradients: list[torch.Tensor],  # noqa: ARG001
    inputs: list[torch.Tensor],  # noqa: ARG001
    outputs: list[torch.Tensor],  # noqa: ARG001
) -> list[torch.Tensor]:
    shape = _recipes[number].shape
    assert shape is not None
    return [_empty(layout) for layout in shape.gradients if layout is not None]


def _shape_of(recipe: "Recipe", like: Sequence[torch.Tensor]) -> "_Shape":
    """Run a recipe on examples, and return its findings."""
    with random_forked(tensor.device for tensor in like):
        inputs = recipe.examples(like)
        *outputs, ticket = run_forward(recipe.number, inputs)
        graph: _Graph = _ticket.thing_of(ticket)
        recipe.shape = _Shape(
            outputs=[_Layout.of(output) for output in outputs],
            gradients=[],
            saved_bytes=graph.held_bytes,
            reads_inputs=graph.saved.read("input"),
            reads_outputs=graph.saved.read("output"),
        )
        ends = [torch.ones_like(output) for output in outputs if output.is_floating_point()]
        now = {("input", index): inputs[index] for index in recipe.shape.reads_inputs}
        now |= {("output", index): outputs[index] for index in recipe.shape.reads_outputs}
        gradients = graph.backward(ends, now)
    recipe.shape.gradients = [None if gradient is None else _Layout.of(gradient) for gradient in gradients]
    return recipe.shape


def _in_a_thread(run: Callable[[], "_Shape"]) -> "_Shape":
    """Run it in a thread without tracing, since modes, autocast and excluded dispatch keys belong to a thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def runnable(call: fx.Node) -> Callable[[], Any] | None:
    """Return a whole operator on examples, to be measured; ``None`` for any other operator."""
    if call.target in FORWARD:
        number, like = cast("tuple[int, list[fx.Node]]", call.args)
        inputs = _recipes[number].examples([node.meta["val"] for node in like])
        return functools.partial(run_forward, number, inputs)
    if call.target is not BACKWARD:
        return None
    number, ticket = cast("tuple[int, fx.Node]", call.args[:2])
    made_by = cast("fx.Node", ticket.args[0])
    own = runnable(made_by)
    assert isinstance(own, functools.partial)
    *results, ticket = own()
    shape = _recipes[number].shape
    assert shape is not None
    ends = [torch.ones_like(result) for result in results if result.is_floating_point()]
    return functools.partial(
        run_backward,
        number,
        ticket,
        ends,
        [own.args[1][index] for index in shape.reads_inputs],
        [results[index] for index in shape.reads_outputs],
    )


class _Layout(NamedTuple):
    """A tensor's layout, without its bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Layout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _empty(layout: _Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)


def _example(like: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device)
    return tensor.uniform_(-0.1, 0.1) if tensor.is_floating_point() else tensor.fill_(1)


def _hidden_at(kind: _WholeKind, arguments: Sequence[Any]) -> int | None:
    """Return the index of the hidden states, for an RNN that may run layer by layer; else ``None``."""
    if kind.data_at is None:
        return None
    data, second = arguments[kind.data_at : kind.data_at + 2]
    is_packed = isinstance(second, torch.Tensor) and not second.is_floating_point()
    hidden_at = kind.data_at + 1 + is_packed
    return hidden_at if data.device.type == "cpu" and arguments[hidden_at + 3] > 1 else None


def _fill_rnn(data: torch.Tensor, *arguments: Any) -> None:
    """Fill the sizes of a packed batch: the number of rows of each step, which must add up to all rows."""
    batch_sizes = arguments[0]
    if isinstance(batch_sizes, torch.Tensor) and not batch_sizes.is_floating_point():
        rows, steps = data.shape[0], batch_sizes.shape[0]
        hidden = arguments[1][0] if isinstance(arguments[1], tuple | list) else arguments[1]
        widest = hidden.shape[1]
        for step in range(steps):  # as many as possible first: never rising, at least one each
            batch_sizes[step] = taken = min(widest, rows - (steps - step - 1))
            rows -= taken


def _fill_packed_rnn(_: str, data: torch.Tensor, *arguments: Any) -> None:
    _fill_rnn(data, *arguments)


def _fill_ctc(log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *_: Any) -> None:
    """Fill in the greatest lengths that the arguments allow."""
    if isinstance(input_lengths, torch.Tensor):
        input_lengths.fill_(log_probs.shape[0])
    if isinstance(target_lengths, torch.Tensor):
        num_sequences = max(1, target_lengths.numel())
        longest = targets.shape[-1] if targets.dim() == 2 else targets.shape[0] // num_sequences
        target_lengths.fill_(min(longest, log_probs.shape[0]))
        if targets.dim() == 1 and target_lengths.dim():
            target_lengths[0] += targets.shape[0] - int(target_lengths.sum())
    log_probs.fill_(-3.0)


def _drops(node: fx.Node) -> bool:
    """Whether an RNN uses dropout between its layers, and so draws random numbers."""
    arguments = [argument for argument in node.args if isinstance(argument, float)]
    return any(number > 0 for number in arguments)


def _nothing(_: fx.Node) -> bool:
    return False


def _as_it_is(*_: Any) -> None:
    """Leave the arguments unchanged: any values will do."""


_METHODS: dict[str, Callable[..., Any]] = {"prod": torch.prod, "cumprod": torch.cumprod}
"""Functions that are also methods of tensors."""

_KINDS: dict[Any, _WholeKind] = {
    **{
        function: _WholeKind(_drops, _fill_rnn, 0)
        for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    },
    _rnn.PACKED_RNN: _WholeKind(_drops, _fill_packed_rnn, 1),
    **{function: _WholeKind(_nothing, _as_it_is) for function in _METHODS.values()},
    torch.ctc_loss: _WholeKind(_nothing, _fill_ctc),
    torch.nn.functional.ctc_loss: _WholeKind(_nothing, _fill_ctc),
}


def _kind_of(node: fx.Node) -> _WholeKind | None:
    if node.op == "call_method" and node.target in _METHODS:
        return _KINDS[_METHODS[str(node.target)]]
    return _KINDS.get(node.target) if node.op == "call_function" else None


for _key_name in ("CPU", "CUDA", "XPU", "PrivateUse1"):
    for _name in ("whole", "whole_random"):
        _library.impl(_name, run_forward, _key_name)
    _library.impl("whole_backward", run_backward, _key_name)
for _name in ("whole", "whole_random"):
    torch.library.register_fake(f"penstock::{_name}", _fake_forward, lib=_library)
torch.library.register_fake("penstock::whole_backward", _fake_backward, lib=_library)
