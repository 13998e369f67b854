"""Conversion of a captured graph and a plan to two graphs: forward, and backward with every recomputation in its place.

A value is bound to the node that computed it last. A storage that is recomputed twice is therefore two nodes, and each
is freed after its own last use. Views are rebuilt where they are read. A swapped storage leaves forward as a ticket
(`_swap.py`). A prefetch calls it back, and it is received where backward first needs it.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import InternalError
from penstock.remat import _accumulate, _swap
from penstock.remat._as_eager import function_of
from penstock.remat._capture import JointGraph, accumulate, device_of, is_random, is_view, taken_from, tensors_of
from penstock.remat._plan import RematPlan
from penstock.remat._problem import RematProblem
from penstock.remat._ticket import TICKET_BYTES

IS_STATIC = "penstock_is_static"
"""Key in the ``meta`` of an emitted node whose value counts among the plan's static bytes, or is a ticket."""
TAKEN = "penstock_taken"
"""Key in a node's ``meta``: which of several results the captured graph uses."""
SLOTS = "penstock_slots"
"""Key in the ``meta`` of an emitted module: per node that represents an operator, its slot in the plan."""


def emit(
    captured: JointGraph, problem: RematProblem, plan: RematPlan, tiers: int | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward as AOTAutograd expects them. Forward also returns the first arguments of backward.

    ``tiers`` is the number of the tiers for swaps, if any.
    """
    return _Emitter(captured, problem, plan, tiers).emit()


class _Side:
    """One graph while it is being made, with its values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.bound: dict[fx.Node, fx.Node] = {}
        """Per captured node, the node of this graph that computed its value last."""
        self.slots: dict[str, int] = {}
        """Per node that represents an operator, by name, its slot in the plan."""

    def bind_input(self, node: fx.Node) -> None:
        """Make a placeholder for an input of the captured graph."""
        self.bound[node] = self.graph.placeholder(node.name)
        self.bound[node].meta = dict(node.meta)

    def module(self, owner: nn.Module) -> fx.GraphModule:
        """Return the finished graph as a module, with the attributes of ``owner``."""
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)  # this output is not used: it dies with the tuple of the others
        module = fx.GraphModule(owner, self.graph)
        module.meta[SLOTS] = self.slots
        return module


class _Handover:
    """The values that forward hands over to backward."""

    def __init__(self, backward: _Side, tangents: Sequence[fx.Node]):
        self._graph = backward.graph
        self._tangents = frozenset(backward.bound[node] for node in tangents)
        self._placeholders: dict[fx.Node, fx.Node] = {}
        """Forward's nodes in order, with their placeholders in backward."""

    @property
    def values(self) -> list[fx.Node]:
        """The nodes of forward that hold the values, in the order in which backward takes them."""
        return list(self._placeholders)

    def received(self, value: fx.Node) -> fx.Node:
        """Return backward's placeholder for a value of forward, which forward then also returns."""
        if value in self._placeholders:
            return self._placeholders[value]
        nodes = self._graph.nodes
        first = next((node for node in nodes if node.op != "placeholder" or node in self._tangents), None)
        with self._graph.inserting_before(first) if first is not None else self._graph.inserting_after(None):
            placeholder = self._graph.placeholder(f"saved_{value.name}")
        placeholder.meta = dict(value.meta)
        self._placeholders[value] = placeholder
        return placeholder


class _Swaps:
    """The tickets of swapped storages, and the calls that move them."""

    def __init__(self, plan: RematPlan, tiers: int | None, handover: _Handover):
        self._tiers, self._handover = tiers, handover
        self._starts, self._ends = _by_slot(plan.fetch_slots), _by_slot(plan.gone_slots)
        """Per slot, the storages whose copy back starts before it, and those whose copy out has to end before it."""
        self._parked: dict[int, fx.Node] = {}
        """Per swapped storage, the node of its ticket in forward."""

    def park(self, side: _Side, storage: int, value: fx.Node) -> None:
        """Let forward park a storage as soon as it is made."""
        self._parked[storage] = side.graph.call_function(_swap.park, (value, self._tiers))
        self._parked[storage].meta |= {"val": _ticket_value(), IS_STATIC: True}

    def in_forward(self, side: _Side, slot: int) -> None:
        """Emit what precedes a slot of forward: waits for the copies out whose memory it needs."""
        for storage in self._ends.get(slot, ()):
            side.graph.call_function(_swap.finish, (self._parked[storage],))

    def in_backward(self, side: _Side, slot: int) -> None:
        """Emit what precedes a slot of backward: waits for copies out, and the starts of copies back."""
        for storage in self._ends.get(slot, ()):
            side.graph.call_function(_swap.finish, (self._ticket(storage),))
        for storage in self._starts.get(slot, ()):
            side.graph.call_function(_swap.prefetch, (self._ticket(storage),))

    def fetched(self, side: _Side, storage: int, like: fx.Node) -> fx.Node:
        """Return the node of backward that receives a storage, with the value of the captured node ``like``."""
        node = side.graph.call_function(_swap.fetch, (self._ticket(storage),))
        node.meta = dict(like.meta)
        return node

    def _ticket(self, storage: int) -> fx.Node:
        return self._handover.received(self._parked[storage])


class _LeafGradients:
    """The primals whose gradients backward itself adds to theirs."""

    def __init__(self, captured: JointGraph, forward: _Side, handover: _Handover):
        self._handover = handover
        self._nodes = [node for node in captured.primals if any(user.target is accumulate for user in node.users)]
        if self._nodes:
            others = [node for node in captured.primals if node not in self._nodes and tensors_of(node)]
            inputs = [forward.bound[node] for node in (*self._nodes, *others)]
            self._ticket = forward.graph.call_function(_accumulate.leaves, (len(self._nodes), *inputs))
            self._ticket.meta |= {"val": _ticket_value(), IS_STATIC: True}

    def deliver(self, side: _Side, leaf: fx.Node, gradient: fx.Node) -> fx.Node:
        """Emit the addition of a gradient to that of a leaf, and return its node."""
        arguments = (self._handover.received(self._ticket), self._nodes.index(leaf), gradient)
        return side.graph.call_function(_accumulate.deliver, arguments)


class _Emitter:
    """The conversion of one captured graph by one plan."""

    def __init__(self, captured: JointGraph, problem: RematProblem, plan: RematPlan, tiers: int | None):
        self.captured, self.problem, self.plan = captured, problem, plan
        self.forward, self.backward = _Side(), _Side()
        for node in captured.primals:
            self.forward.bind_input(node)
        for node in captured.tangents:
            self.backward.bind_input(node)
        self.handover = _Handover(self.backward, captured.tangents)
        self.swaps = _Swaps(plan, tiers, self.handover)
        # Eager training adds each gradient where it is made. Returned together at the end they may be the peak.
        self.leaves = _LeafGradients(captured, self.forward, self.handover)
        self.states: dict[fx.Node, fx.Node] = {}
        """Per random operator that runs again, the node of the generator's state in forward."""
        self.values_on: dict[int, list[fx.Node]] = {}
        """Per storage, the captured nodes whose values lie on it."""
        for node, storage in captured.storage_of.items():
            self.values_on.setdefault(storage, []).append(node)
        backward = plan.slots[problem.num_forward :]
        self.runs_again = {captured.calls[index] for index in backward if index < problem.num_forward}

    def emit(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Emit forward as captured, then backward as planned."""
        forward, backward, num_forward = self.forward, self.backward, self.problem.num_forward
        for slot, index in enumerate(self.plan.slots[:num_forward]):
            self.swaps.in_forward(forward, slot)
            self._run(forward, index, slot)
            for storage in self.problem.operators[index].outputs:
                if storage in self.plan.gone_slots:
                    self.swaps.park(forward, storage, self._value(forward, self.captured.values[storage]))
        for slot, index in enumerate(self.plan.slots[num_forward:], num_forward):
            self.swaps.in_backward(backward, slot)
            self._run(backward, index, slot)
        results = [self._value(forward, node) for node in self.captured.forward_outputs]
        gradients = [self._value(backward, node) for node in self.captured.gradients]
        backward.graph.output(tuple(gradients))
        forward.graph.output((*results, *self.handover.values))  # only now is known what backward takes
        for side in (forward, backward):
            side.graph.lint()
        return forward.module(self.captured.owner), backward.module(self.captured.owner)

    def _run(self, side: _Side, index: int, slot: int) -> None:
        """Emit an operator of the problem, and bind its results anew."""
        call = self.captured.calls[index]
        if call.op == "placeholder":
            return  # a tangent, which is an argument of backward
        is_again = side is self.backward and index < self.problem.num_forward
        node = self._called(side, call, is_again=is_again)
        node.meta = dict(call.meta) | {TAKEN: taken_from(call)}
        side.slots[node.name] = slot
        for storage in self.problem.operators[index].outputs:
            if not is_again or self.plan.is_dropped(self.problem, storage):
                for value in self.values_on[storage]:
                    side.bound.pop(value, None)  # the storage and its views, as made earlier
        if not isinstance(call.meta.get("val"), list | tuple):
            side.bound[call] = node
            return
        for user in call.users:
            if user.target is operator.getitem and not (is_again and self._never_went(user)):
                side.bound[user] = side.graph.node_copy(user, lambda _: node)

    def _called(self, side: _Side, call: fx.Node, *, is_again: bool) -> fx.Node:
        """Return the node that runs an operator on the values of this side."""
        if is_random(call):
            return self._replayed(side, call) if is_again else self._drawn(side, call)
        if call.target is accumulate:
            leaf, gradient = call.all_input_nodes
            return self.leaves.deliver(side, leaf, self._value(side, gradient))
        node = side.graph.node_copy(call, functools.partial(self._value, side))
        node.target = function_of(call)
        return node

    def _drawn(self, side: _Side, call: fx.Node) -> fx.Node:
        """Return the node of a random operator, which notes the generator's state if it runs again later."""
        notes_state = call in self.runs_again
        node = side.graph.node_copy(call, functools.partial(self._value, side))
        node.target = _swap.drawing(function_of(call), str(device_of(call)), notes_state=notes_state)
        if notes_state:
            state = side.graph.call_function(_swap.state_before)
            state.meta |= {"val": torch.empty(0, dtype=torch.uint8, device="meta"), IS_STATIC: True}
            self.states[call] = state
        return node

    def _replayed(self, side: _Side, call: fx.Node) -> fx.Node:
        """Return the node of a random operator that runs again, from the state that forward noted."""
        arguments = fx.node.map_arg(call.args, functools.partial(self._value, side))
        keywords = fx.node.map_arg(call.kwargs, functools.partial(self._value, side))
        state = self.handover.received(self.states[call])
        function = _swap.replaying(function_of(call), str(device_of(call)))
        return side.graph.call_function(function, (state, *arguments), keywords)

    def _never_went(self, node: fx.Node) -> bool:
        """Whether a value that is made again together with another one still exists."""
        storage = self.captured.storage_of.get(node)
        return storage is not None and not self.plan.is_dropped(self.problem, storage)

    def _value(self, side: _Side, node: fx.Node | Any) -> Any:
        """Return the node of ``side`` with the value of a captured node.

        Views are rebuilt, and values of forward handed over.
        """
        if not isinstance(node, fx.Node):
            return node
        if node not in side.bound:
            side.bound[node] = self._rebuilt(side, node)
        return side.bound[node]

    def _rebuilt(self, side: _Side, node: fx.Node) -> fx.Node:
        """Return the node of ``side`` with a value that it has not bound: a view, or a value of forward."""
        if node.op == "get_attr" or (node.op == "call_function" and (is_view(node) or not tensors_of(node))):
            view = side.graph.node_copy(node, functools.partial(self._value, side))
            if view.target is torch.ops.aten.view.default and side is self.backward:
                view.target = torch.ops.aten.reshape.default  # gradients may have other strides than the traced ones
            return view
        if node.target is operator.getitem and is_view(node.all_input_nodes[0]):
            return side.graph.node_copy(node, functools.partial(self._value, side))
        if node in self.captured.changed:  # the caller overwrites it before backward
            copy = self.forward.graph.call_function(torch.ops.aten.clone.default, (self.forward.bound[node],))
            copy.meta = {"val": node.meta["val"], IS_STATIC: True}
            return self.handover.received(copy)
        storage = self.captured.storage_of.get(node)
        if side is self.forward or (storage is not None and self.plan.is_dropped(self.problem, storage)):
            raise InternalError(f"the plan needs {node.name} where it is neither kept nor computed")
        if storage is not None and storage in self.plan.gone_slots:
            return self.swaps.fetched(side, storage, node)
        return self.handover.received(self.forward.bound[node])


def _ticket_value() -> torch.Tensor:
    return torch.empty(TICKET_BYTES, dtype=torch.uint8, device="meta")


def _by_slot(slots: dict[int, int]) -> dict[int, list[int]]:
    """Return the storages per slot, from the slot per storage."""
    storages: dict[int, list[int]] = {}
    for storage, slot in sorted(slots.items()):
        storages.setdefault(slot, []).append(storage)
    return storages
