"""Debug mode, which runs a planned graph node by node and compares resident bytes with the plan."""

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from penstock.errors import InternalError
from penstock.remat._accumulate import deliver
from penstock.remat._aot import Runner, boxed_function
from penstock.remat._emit import IS_STATIC, TAKEN
from penstock.remat._plan import RematPlan
from penstock.remat._problem import RematProblem, Storage
from penstock.remat._ticket import held_bytes
from penstock.remat._verify import live_bytes
from penstock.storages import id_of


def checked(module: fx.GraphModule, slots: dict[str, int], problem: RematProblem, plan: RematPlan) -> Runner:
    """Return a boxed runner of ``module`` that raises ``InternalError`` at a node with other bytes than planned.

    ``slots`` maps each node that represents an operator to its slot in the plan. As in the plan, storages of the
    graph's inputs that the caller also holds (parameters, the batch) do not count.
    """
    expected = live_bytes(problem, plan)

    def runner(arguments: list[Any]) -> Any:
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        static: dict[int, torch.UntypedStorage] = {}
        for node, value in zip(inputs, arguments, strict=True):
            if "primals" in node.name or IS_STATIC in node.meta:
                static |= _storages(value)
        return _Checker(module, slots, problem, plan, expected, static).boxed_run(arguments)

    return boxed_function(runner)


class _Checker(fx.Interpreter):
    """An interpreter that counts the bytes of all reachable storages after each node."""

    def __init__(
        self,
        module: fx.GraphModule,
        slots: dict[str, int],
        problem: RematProblem,
        plan: RematPlan,
        expected: list[int],
        static: dict[int, torch.UntypedStorage],
    ):
        super().__init__(module)
        self._slots, self._problem, self._plan, self._expected = slots, problem, plan, expected
        self._static = static  # the storages themselves, since identities are reused
        self._returned_bytes = 0

    def run_node(self, node: fx.Node) -> Any:
        """Run a node, and check the held bytes before the inputs that die with it are freed."""
        result = super().run_node(node)
        if node.op == "get_attr" or IS_STATIC in node.meta:
            self._static |= _storages(result)
        slot = self._slots.get(node.name)
        if slot is not None:
            taken = node.meta[TAKEN]
            self._check(node, slot, result if taken is None else [result[index] for index in taken])
        if node.target is deliver:  # a gradient that was not added exists from here on
            returned = _storages(result)
            self._returned_bytes += sum(storage.nbytes() for storage in returned.values())
            self._static |= returned
        return result

    def _check(self, node: fx.Node, slot: int, result: Any) -> None:
        held: dict[int, torch.UntypedStorage] = {}
        for value in (*self.env.values(), result):
            held |= _storages(value)
        actual = sum(held_bytes(storage) for key, storage in held.items() if key not in self._static)
        expected = self._expected[slot] - self._problem.operators[self._plan.slots[slot]].workspace_bytes
        if not expected - self._unseen_bytes(slot) <= actual <= expected:
            raise InternalError(f"after {node.name} (slot {slot}) {actual} bytes are held, but {expected} were planned")

    def _unseen_bytes(self, slot: int) -> int:
        """Return bytes that the plan counts but that handles or the caller may hold instead of the graph."""
        storages = self._problem.storages
        edges = 3 * self._problem.swap_page_bytes  # an upper bound
        unseen = sum(storages[swapped].size_bytes + edges for swapped in self._plan.gone_slots)
        unseen += self._returned_bytes  # until they are read for the last time
        if slot >= self._problem.num_forward:
            from_forward = [
                storage
                for storage in storages
                if storage.producer < self._problem.num_forward or self._is_tangent(storage)
            ]
            unseen += sum(storage.size_bytes for storage in from_forward if storage.is_output)
        return unseen

    def _is_tangent(self, storage: Storage) -> bool:
        return self._problem.operators[storage.producer].target == "tangent"


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in ``value``, by identity."""
    storages = [leaf.untyped_storage() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return {id_of(storage): storage for storage in storages}
