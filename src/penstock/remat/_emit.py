"""Conversion of a captured graph and a plan to two graphs: forward, and backward with every recomputation in its place.

A value is bound to the node that computed it last. A storage that is recomputed twice is therefore two nodes, and each
is freed after its own last use. Views are rebuilt where they are read. A swapped storage leaves forward as a ticket
(`_swap.py`). A prefetch calls it back, and it is received where backward first needs it.
"""

import operator
from typing import Any

import torch
from torch import fx

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
    captured: JointGraph, problem: RematProblem, plan: RematPlan, owner: torch.nn.Module, tiers: int | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward as AOTAutograd expects them. Forward also returns the first arguments of backward.

    ``owner`` has the attributes to which ``get_attr`` nodes refer. ``tiers`` is the number of the tiers for swaps, if
    any.
    """
    return _Emitter(captured, problem, plan, owner, tiers).emit()


class _Side:
    """One graph while it is being made, with its values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.bound: dict[fx.Node, fx.Node] = {}
        self.slots: dict[str, int] = {}


class _Emitter:
    def __init__(
        self, captured: JointGraph, problem: RematProblem, plan: RematPlan, owner: torch.nn.Module, tiers: int | None
    ):
        self.captured, self.problem, self.plan, self.owner, self.tiers = captured, problem, plan, owner, tiers
        self.forward, self.backward = _Side(), _Side()
        self.saved: list[fx.Node] = []
        """Values that forward hands over to backward: forward's nodes, in order."""
        self.handed_over: dict[fx.Node, fx.Node] = {}
        """The same values with their placeholders in backward."""
        self.parked: dict[int, fx.Node] = {}
        """Per swapped storage, the node of its ticket in forward."""
        self.tickets: dict[int, fx.Node] = {}
        """The same for backward."""
        self.states: dict[fx.Node, fx.Node] = {}
        """Per random operator that runs again, the node of the generator's state in forward."""
        self.leaves = [node for node in captured.primals if any(one.target is accumulate for one in node.users)]
        """Primals whose gradients backward itself adds to theirs."""
        self.values_on: dict[int, list[fx.Node]] = {}
        for node, storage in captured.storage_of.items():
            self.values_on.setdefault(storage, []).append(node)
        again = plan.slots[problem.num_forward :]
        self.runs_again = {captured.calls[one] for one in again if one < problem.num_forward}

    def emit(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Emit forward as captured, then backward as planned."""
        num_forward = self.problem.num_forward
        begins, ends = _by_slot(self.plan.fetch_slots), _by_slot(self.plan.gone_slots)
        for node in self.captured.primals:
            self.forward.bound[node] = _placeholder(self.forward.graph, node)
        for node in self.captured.tangents:
            self.backward.bound[node] = _placeholder(self.backward.graph, node)
        if self.leaves:
            others = [node for node in self.captured.primals if node not in self.leaves and tensors_of(node)]
            given = [self.forward.bound[node] for node in (*self.leaves, *others)]
            self.of_leaves = self.forward.graph.call_function(_accumulate.leaves, (len(self.leaves), *given))
            self.of_leaves.meta |= {"val": _ticket_value(), IS_STATIC: True}
        for slot, index in enumerate(self.plan.slots[:num_forward]):
            for storage in ends.get(slot, ()):
                self.forward.graph.call_function(_swap.finish, (self.parked[storage],))
            self._run(self.forward, index, slot)
            for storage in self.problem.operators[index].outputs:
                if storage in self.plan.gone_slots:
                    value = self._value(self.forward, self.captured.values[storage])
                    self.parked[storage] = self.forward.graph.call_function(_swap.park, (value, self.tiers))
                    self.parked[storage].meta |= {"val": _ticket_value(), IS_STATIC: True}
        for slot, index in enumerate(self.plan.slots[num_forward:], num_forward):
            for storage in ends.get(slot, ()):
                self.backward.graph.call_function(_swap.finish, (self._ticket(storage),))
            for storage in begins.get(slot, ()):
                self.backward.graph.call_function(_swap.prefetch, (self._ticket(storage),))
            self._run(self.backward, index, slot)
        results = [self._value(self.forward, node) for node in self.captured.forward_outputs]
        gradients = [self._value(self.backward, node) for node in self.captured.gradients]
        self.backward.graph.output(tuple(gradients))
        self.forward.graph.output((*results, *self.saved))
        for side in (self.forward, self.backward):
            side.graph.lint()
        return self._module(self.forward), self._module(self.backward)

    def _module(self, side: _Side) -> fx.GraphModule:
        for node in reversed(side.graph.nodes):
            if node.target is operator.getitem and not node.users:
                side.graph.erase_node(node)  # this output is not used: it dies with the tuple of the others
        module = fx.GraphModule(self.owner, side.graph)
        module.meta[SLOTS] = side.slots
        return module

    def _run(self, side: _Side, index: int, slot: int) -> None:
        """Emit an operator of the problem, and bind its results anew."""
        call = self.captured.calls[index]
        if call.op == "placeholder":
            return  # a tangent, which is an argument of backward
        is_again = side is self.backward and index < self.problem.num_forward
        if is_random(call) and is_again:
            arguments = fx.node.map_arg(call.args, lambda one: self._value(side, one))
            keywords = fx.node.map_arg(call.kwargs, lambda one: self._value(side, one))
            state = self._saved(self.states[call])
            made = side.graph.call_function(
                _swap.replaying(function_of(call), str(device_of(call))), (state, *arguments), keywords
            )
        elif call.target is accumulate:
            leaf, gradient = call.all_input_nodes
            arguments = (self._saved(self.of_leaves), self.leaves.index(leaf), self._value(side, gradient))
            made = side.graph.call_function(_accumulate.deliver, arguments)
        else:
            made = side.graph.node_copy(call, lambda one: self._value(side, one))
            made.target = function_of(call)
            notes_state = call in self.runs_again
            if is_random(call):
                made.target = _swap.drawing(made.target, str(device_of(call)), notes_state=notes_state)
            if is_random(call) and notes_state:
                state = side.graph.call_function(_swap.state_before)
                state.meta |= {"val": torch.empty(0, dtype=torch.uint8, device="meta"), IS_STATIC: True}
                self.states[call] = state
        made.meta = dict(call.meta) | {TAKEN: taken_from(call)}
        side.slots[made.name] = slot
        for storage in self.problem.operators[index].outputs:
            if not is_again or self.plan.is_dropped(self.problem, storage):
                for node in self.values_on[storage]:
                    side.bound.pop(node, None)  # the storage and its views, as made earlier
        if not isinstance(call.meta.get("val"), list | tuple):
            side.bound[call] = made
            return
        for user in call.users:
            if user.target is operator.getitem and not (is_again and self._never_went(user)):
                side.bound[user] = side.graph.node_copy(user, lambda _: made)

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
            side.bound[node] = self._made(side, node)
        return side.bound[node]

    def _made(self, side: _Side, node: fx.Node) -> fx.Node:
        if node.op == "get_attr" or (node.op == "call_function" and (is_view(node) or not tensors_of(node))):
            made = side.graph.node_copy(node, lambda one: self._value(side, one))
            if made.target is torch.ops.aten.view.default and side is self.backward:
                made.target = torch.ops.aten.reshape.default  # gradients may have other strides than the traced ones
            return made
        if node.target is operator.getitem and is_view(node.all_input_nodes[0]):
            return side.graph.node_copy(node, lambda one: self._value(side, one))
        if node in self.captured.changed:  # the caller overwrites it before backward
            copied = self.forward.graph.call_function(torch.ops.aten.clone.default, (self.forward.bound[node],))
            copied.meta = {"val": node.meta["val"], IS_STATIC: True}
            return self._saved(copied)
        storage = self.captured.storage_of.get(node)
        if side is self.forward or (storage is not None and self.plan.is_dropped(self.problem, storage)):
            raise InternalError(f"the plan needs {node.name} where it is neither kept nor computed")
        if storage in self.plan.gone_slots:
            received = side.graph.call_function(_swap.fetch, (self._ticket(storage),))
            received.meta = dict(node.meta)
            return received
        return self._saved(self.forward.bound[node])

    def _ticket(self, storage: int) -> fx.Node:
        if storage not in self.tickets:
            self.tickets[storage] = self._saved(self.parked[storage])
        return self.tickets[storage]

    def _saved(self, value: fx.Node) -> fx.Node:
        """Return backward's placeholder for a value of forward, which forward then also returns."""
        if value in self.handed_over:
            return self.handed_over[value]
        graph = self.backward.graph
        first = next((one for one in graph.nodes if one.op != "placeholder" or one in self._tangents()), None)
        with graph.inserting_before(first) if first is not None else graph.inserting_after(None):
            made = graph.placeholder(f"saved_{value.name}")
        made.meta = dict(value.meta)
        self.saved.append(value)
        self.handed_over[value] = made
        return made

    def _tangents(self) -> set[fx.Node]:
        return {self.backward.bound[node] for node in self.captured.tangents}


def _ticket_value() -> torch.Tensor:
    return torch.empty(TICKET_BYTES, dtype=torch.uint8, device="meta")


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    return made


def _by_slot(slots: dict[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for storage, slot in sorted(slots.items()):
        found.setdefault(slot, []).append(storage)
    return found
