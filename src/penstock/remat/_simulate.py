"""Simulation of a set of decisions: the order of operators with all recomputation, its peak and its time.

The compiled version in `native/remat.c` follows the same rules. It is 30 times faster and must agree bit for bit.

- Forward runs as it is. A storage is dropped after its last use in forward, unless it is kept. A swapped storage also
  has to wait for the end of its copy out.
- Before a backward operator runs, the absent storages that it needs are made: their producers run, the producers of
  their absent inputs, and so on, up to storages that exist. They run in forward order. A storage that was made only for
  this is dropped after its last use there. A storage that has to be held (see ``Decision``) stays.
- The lane out copies storages in the order in which they are made. The lane back is planned backwards from the times of
  need, each copy as late as possible, and a storage is resident from the operator during which its copy begins. If a
  copy would have to begin before backward, the step waits: a stall. A storage that could not leave before it has to
  come back never leaves.
"""

import ctypes
import functools
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.native import load
from penstock.remat._decision import NUMBERS_OF_C, Decision, Outcome
from penstock.remat._problem import RematProblem

MAX_RECOMPUTE_FACTOR = 40
"""Factor of the step's operators above which decisions count as infeasible."""
_ENDLESS, _NO_MEMORY = int(Outcome.ENDLESS), int(Outcome.NO_MEMORY)
_RECOMPUTE, _RECOMPUTE_PER_USE, _SWAP = map(int, (Decision.RECOMPUTE, Decision.RECOMPUTE_PER_USE, Decision.SWAP))


@dataclass(slots=True)
class Simulation:
    """Result of a simulated step."""

    peak_bytes: int
    """Highest bytes of the graph's own storages and workspaces, without static bytes."""
    extra_s: float
    """Seconds beyond the plain step: recomputation and stalls."""
    stall_s: float
    """Part of these seconds that is stalls."""
    slots: NDArray[np.int32]
    """Operators in the order in which they run; the first ``num_forward`` are forward."""
    live_bytes: NDArray[np.int64]
    """Bytes held while each of them runs, including its workspace."""
    gone: NDArray[np.int32]
    """Per storage, the first slot without its device copy; -1 if it does not leave."""
    fetch: NDArray[np.int32]
    """Per storage, the slot at which its copy back begins; -1 if it does not leave."""


class FlatProblem:
    """A problem as flat arrays. Nothing in it changes.

    It is wide because C reads each column of operators and storages as an array of its own.
    """

    def __init__(self, problem: RematProblem, gap: int = 64):
        operators, storages = problem.operators, problem.storages
        self.problem = problem
        self.num_operators, self.num_storages = len(operators), len(storages)
        self.num_forward = problem.num_forward
        self.gap = gap
        """A storage that is recomputed each time stays if it is needed again within this many operators."""
        self.durations_s = np.array([operator.duration_s for operator in operators], dtype=np.float64)
        # cumsum adds in order, as C does. np.sum adds pairwise, which rounds differently.
        self.step_s = float(np.cumsum(self.durations_s)[-1]) if operators else 0.0
        self.workspaces = np.array([operator.workspace_bytes for operator in operators], dtype=np.int64)
        self.sizes = np.array([storage.size_bytes for storage in storages], dtype=np.int64)
        self.producers = np.array([storage.producer for storage in storages], dtype=np.int32)
        self.is_output = np.array([storage.is_output for storage in storages], dtype=np.uint8)
        self.inputs = [tuple(dict.fromkeys(operator.inputs)) for operator in operators]
        self.outputs = [operator.outputs for operator in operators]
        self.input_starts, self.input_ids = _rows(self.inputs)
        self.output_starts, self.output_ids = _rows(self.outputs)
        self.last_forward = self.producers.copy()
        self.needs: list[list[int]] = [[] for _ in storages]
        for index, inputs in enumerate(self.inputs):
            for storage in inputs:
                if index < self.num_forward:
                    self.last_forward[storage] = index
                elif self.producers[storage] < self.num_forward:
                    self.needs[storage].append(index)
        self.need_starts, self.need_ids = _rows(self.needs)
        self.last_needs = np.array([needs[-1] if needs else -1 for needs in self.needs], dtype=np.int32)
        is_forward = self.producers < self.num_forward
        self.births = np.where(is_forward, self.producers, np.int32(-1))
        """Slots of birth when forward has run; -1 for storages of backward."""
        self.uses = np.where(is_forward, self.last_forward, np.int32(-1))
        """Slots of the last use when forward has run."""
        self.bandwidths = (problem.out_bandwidth_bytes_per_s, problem.in_bandwidth_bytes_per_s)
        self.page_bytes = problem.swap_page_bytes
        self._of_thread = threading.local()

    @functools.cached_property
    def rows(self) -> "_Rows":
        """The same as lists, for Python."""
        return _Rows(self)

    @property
    def buffers(self) -> "_Buffers":
        """The memory of this thread's compiled simulations."""
        buffers: _Buffers | None = getattr(self._of_thread, "buffers", None)
        if buffers is None:
            buffers = self._of_thread.buffers = _Buffers(self, MAX_RECOMPUTE_FACTOR * self.num_operators)
        return buffers


class _Rows:
    """A graph as lists, which Python reads several times faster than arrays, plus what no decision changes."""

    def __init__(self, graph: FlatProblem):
        self.inputs, self.outputs = graph.inputs, graph.outputs
        self.producers: list[int] = graph.producers.tolist()
        self.sizes: list[int] = graph.sizes.tolist()
        self.births: list[int] = graph.births.tolist()
        self.uses: list[int] = graph.uses.tolist()
        kept = graph.is_output.astype(bool) | (graph.producers >= graph.num_forward)
        self.forward_inputs = [[storage for storage in inputs if not kept[storage]] for inputs in graph.inputs]
        """Inputs of each operator that may leave in backward."""


def _rows(rows: list[tuple[int, ...]] | list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    starts[1:] = np.cumsum([len(row) for row in rows])
    return starts, np.array([number for row in rows for number in row], dtype=np.int32)


def _dense(slots: dict[int, int], count: int) -> NDArray[np.int32]:
    dense = np.full(count, -1, dtype=np.int32)
    dense[list(slots)] = list(slots.values())
    return dense


class _CGraph(ctypes.Structure):
    """``Graph`` of `native/remat.c`, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_operators", "num_storages", "num_forward", "gap")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "durations_s",
                "workspaces",
                "sizes",
                "producers",
                "last_forward",
                "births",
                "uses",
                "last_needs",
                "input_starts",
                "input_ids",
                "output_starts",
                "output_ids",
                "need_starts",
                "need_ids",
                "is_output",
            )
        ),
        *((name, ctypes.c_double) for name in ("step_s", "out_bandwidth", "back_bandwidth")),
        ("page_bytes", ctypes.c_int64),
    )


class _CResult(ctypes.Structure):
    """``Result`` of `native/remat.c`, field by field."""

    _fields_ = (
        ("peak_bytes", ctypes.c_int64),
        ("extra_s", ctypes.c_double),
        ("stall_s", ctypes.c_double),
        ("num_slots", ctypes.c_int32),
    )


def simulate(graph: FlatProblem, decisions: NDArray[np.uint8]) -> Simulation | None:
    """Simulate the step with a ``Decision`` for every storage; ``None`` if it recomputes endlessly."""
    library = load("remat", numbers=NUMBERS_OF_C)
    return simulate_slowly(graph, decisions) if library is None else _simulate_compiled(library, graph, decisions)


def simulate_slowly(graph: FlatProblem, decisions: NDArray[np.uint8]) -> Simulation | None:
    """Simulate the step in Python: the reference, and the only way without compiled libraries."""
    return _StepPlayer(graph, decisions).play()


def _simulate_compiled(library: ctypes.CDLL, graph: FlatProblem, decisions: NDArray[np.uint8]) -> Simulation | None:
    buffers = graph.buffers
    buffers.decisions[:] = decisions
    outcome = library.penstock_simulate(*buffers.arguments)
    if outcome == _NO_MEMORY:
        raise MemoryError("not enough memory for the planner's simulation")
    if outcome == _ENDLESS:
        return None
    result = buffers.result
    return Simulation(
        peak_bytes=result.peak_bytes,
        extra_s=result.extra_s,
        stall_s=result.stall_s,
        slots=buffers.slots[: result.num_slots],
        live_bytes=buffers.live[: result.num_slots],
        gone=buffers.gone[:-1],
        fetch=buffers.fetch[:-1],
    )


class _Buffers:
    """Inputs and outputs of one thread's compiled simulations. The results of one are valid until the next."""

    def __init__(self, graph: FlatProblem, capacity: int):
        self.slots = np.empty(capacity + graph.num_operators + 1, dtype=np.int32)
        self.live = np.empty(capacity + graph.num_operators + 2, dtype=np.int64)
        self.decisions = np.empty(graph.num_storages, dtype=np.uint8)
        self.gone = np.empty(graph.num_storages + 1, dtype=np.int32)
        self.fetch = np.empty(graph.num_storages + 1, dtype=np.int32)
        self.result = _CResult()
        values: list[object] = []
        for name, kind, *_ in _CGraph._fields_:
            if name in ("out_bandwidth", "back_bandwidth"):
                values.append(graph.bandwidths[name == "back_bandwidth"])
            else:
                value = getattr(graph, name)
                values.append(value.ctypes.data if kind is ctypes.c_void_p else value)
        self.graph = _CGraph(*values)
        written = [ctypes.c_void_p(array.ctypes.data) for array in (self.slots, self.live, self.gone, self.fetch)]
        inputs = ctypes.byref(self.graph), ctypes.c_void_p(self.decisions.ctypes.data), ctypes.c_int32(capacity)
        self.arguments = (*inputs, *written, ctypes.byref(self.result))


class _StepPlayer:
    """One simulation in Python. It uses plain lists and numbers, since the planner runs tens of thousands of them."""

    def __init__(self, graph: FlatProblem, decisions: NDArray[np.uint8]):
        self.graph, self.rows = graph, graph.rows
        self.decisions: list[int] = decisions.tolist()
        forward = graph.producers < graph.num_forward
        stays = graph.is_output.astype(bool) | (decisions == Decision.KEEP) | (decisions == Decision.SWAP)
        self.leaves = forward & ~stays
        self.stays: list[bool] = stays.tolist()
        """Whether a forward storage exists all the time, or comes back by itself."""
        self.is_here: list[bool] = (forward & stays).tolist()
        self.slots = list(range(graph.num_forward))
        self.births, self.uses = self.rows.births.copy(), self.rows.uses.copy()
        """Slots of birth and last use of storages that stay (kept or swapped, outputs, those of backward)."""
        self.next_need = [0] * graph.num_storages
        self.live = [0] * (graph.num_forward + 2)
        """Bytes that come at each slot, minus those that go; two entries ahead of ``slots``."""

    def play(self) -> Simulation | None:
        graph = self.graph
        for index in range(graph.num_forward, graph.num_operators):
            if not self._backward(index):
                return None
        times_s = np.zeros(len(self.slots) + 1)
        times_s[1:] = np.cumsum(graph.durations_s[self.slots])
        stall_s, gone, fetch = self._lanes(times_s)
        live = self._held(gone, fetch) + graph.workspaces[self.slots]
        extra_s = float(times_s[-1]) - graph.step_s + stall_s
        return Simulation(
            peak_bytes=int(live.max(initial=0)),
            extra_s=extra_s,
            stall_s=stall_s,
            slots=np.array(self.slots, dtype=np.int32),
            live_bytes=live,
            gone=_dense(gone, graph.num_storages),
            fetch=_dense(fetch, graph.num_storages),
        )

    # Simulating only from the first operator that a change of decisions affects would help annealing. It was left out,
    # because it needs the state before each operator.

    def _backward(self, index: int) -> bool:
        """Run an operator of backward; ``False`` if that exceeds the limit of operators."""
        rows, births, uses, is_here = self.rows, self.births, self.uses, self.is_here
        inputs = rows.inputs[index]
        absent = [storage for storage in inputs if not is_here[storage]]
        again = self._closure(absent) if absent else absent
        if len(self.slots) + len(again) > MAX_RECOMPUTE_FACTOR * self.graph.num_operators:
            return False
        if again:
            self._run_again(again, index)
        slot = len(self.slots)
        self.slots.append(index)
        self.live.append(0)
        for storage in inputs:
            uses[storage] = slot
        for storage in rows.outputs[index]:
            births[storage] = uses[storage] = slot
            is_here[storage] = True
        for storage in rows.forward_inputs[index]:
            if is_here[storage] and not self.stays[storage] and self._goes(storage, index):
                self._hold(births[storage], slot, storage)
                is_here[storage] = False
        return True

    def _closure(self, stack: list[int]) -> list[int]:
        """Return the operators that have to run again to make absent storages, in order."""
        inputs, producers, is_here = self.rows.inputs, self.rows.producers, self.is_here
        operators = set()
        while stack:
            producer = producers[stack.pop()]
            if producer not in operators:
                operators.add(producer)
                stack += [storage for storage in inputs[producer] if not is_here[storage]]
        return sorted(operators)

    def _run_again(self, again: list[int], index: int) -> None:
        inputs, uses, is_here = self.rows.inputs, self.uses, self.is_here
        first = len(self.slots)
        last_user: dict[int, int] = {}
        for slot, operator in enumerate([*again, index], first):
            for storage in inputs[operator]:
                last_user[storage] = slot
        self.slots += again
        self.live += [0] * len(again)
        for slot, operator in enumerate(again, first):
            for storage in inputs[operator]:
                uses[storage] = slot
            for storage in self.rows.outputs[operator]:
                if is_here[storage]:
                    self._duplicate(storage, slot)
                elif self._is_held(storage, index):
                    self.births[storage], is_here[storage] = slot, True
                else:
                    self._hold(slot, last_user.get(storage, slot), storage)

    def _hold(self, first: int, last: int, storage: int) -> None:
        size_bytes = self.rows.sizes[storage]
        self.live[first] += size_bytes
        self.live[last + 1] -= size_bytes

    def _duplicate(self, storage: int, slot: int) -> None:
        """Count a storage that is made again together with another output that is needed.

        It is dropped at once, or replaces the earlier one.
        """
        if self.stays[storage]:
            self._hold(slot, slot, storage)
        else:
            birth = self.births[storage]
            self._hold(birth, max(birth, self.uses[storage]), storage)
            self.births[storage] = slot

    def _is_held(self, storage: int, index: int) -> bool:
        """Whether a storage that was recomputed for operator ``index`` stays for later ones."""
        needs = self.graph.needs[storage]
        if not needs or needs[-1] < index:
            return False
        return self.decisions[storage] == _RECOMPUTE or self._advance(storage, index) - index <= self._gap(storage)

    def _goes(self, storage: int, index: int) -> bool:
        """Whether backward operator ``index`` was the last one to need it, for now."""
        if self.graph.needs[storage][-1] <= index:
            return True
        if self.decisions[storage] == _RECOMPUTE:
            return False
        return self._advance(storage, index + 1) - index > self._gap(storage)

    def _gap(self, storage: int) -> int:
        """Return the number of operators within which it has to be needed again to stay."""
        return 0 if self.decisions[storage] == _RECOMPUTE_PER_USE else self.graph.gap

    def _advance(self, storage: int, index: int) -> int:
        """Return the first need that is not before operator ``index``."""
        needs, place = self.graph.needs[storage], self.next_need[storage]
        while place < len(needs) - 1 and needs[place] < index:
            place += 1
        self.next_need[storage] = place
        return needs[place]

    def _lanes(self, times_s: NDArray[np.float64]) -> tuple[float, dict[int, int], dict[int, int]]:
        graph, sizes = self.graph, self.rows.sizes
        out, back = graph.bandwidths
        first_uses = self._first_uses() if _SWAP in self.decisions else {}
        swapped = [
            storage
            for storage, decision in enumerate(self.decisions)
            if decision == _SWAP and storage in first_uses and not graph.is_output[storage]
        ]
        left_s: dict[int, float] = {}
        free_s = 0.0
        for storage in sorted(swapped, key=lambda storage: (self.births[storage], storage)):
            free_s = max(free_s, float(times_s[self.births[storage] + 1])) + float(sizes[storage]) / out
            left_s[storage] = free_s
        stall_s, lane_s = 0.0, float("inf")
        gone: dict[int, int] = {}
        fetch: dict[int, int] = {}
        earliest_s = float(times_s[graph.num_forward])
        for storage in sorted(swapped, key=lambda storage: (-first_uses[storage], storage)):
            start_s = min(float(times_s[first_uses[storage]]), lane_s) - float(sizes[storage]) / back
            slot = max(graph.num_forward, int(np.searchsorted(times_s, start_s, side="right")) - 1)
            slot = min(slot, first_uses[storage])
            leaves = int(np.searchsorted(times_s, left_s[storage], side="left"))
            leaves = max(leaves, int(graph.last_forward[storage]) + 1)
            if leaves < slot:
                gone[storage], fetch[storage] = leaves, slot
                stall_s = max(stall_s, earliest_s - start_s)
                lane_s = start_s
        return stall_s, gone, fetch

    def _first_uses(self) -> dict[int, int]:
        """Return, per storage, the first slot of backward that reads it."""
        first_uses: dict[int, int] = {}
        inputs = self.rows.inputs
        for slot in range(len(self.slots) - 1, self.graph.num_forward - 1, -1):
            for storage in inputs[self.slots[slot]]:
                first_uses[storage] = slot
        return first_uses

    def _held(self, gone: dict[int, int], fetch: dict[int, int]) -> NDArray[np.int64]:
        """Return the bytes of storages at each slot."""
        graph, live = self.graph, np.array(self.live, dtype=np.int64)

        def hold(which: NDArray[np.bool_], first: NDArray[np.int32], last: NDArray[np.int32]) -> None:
            np.add.at(live, first[which], graph.sizes[which])
            np.subtract.at(live, last[which] + 1, graph.sizes[which])

        births, uses = np.array(self.births, dtype=np.int32), np.array(self.uses, dtype=np.int32)
        uses[graph.is_output.astype(bool)] = len(self.slots) - 1
        moved = [storage for storage in gone if graph.producers[storage] < graph.num_forward]
        is_moved = np.zeros(graph.num_storages, dtype=bool)
        is_moved[moved] = True
        hold(self.leaves, graph.producers, graph.last_forward)
        hold(~self.leaves & ~is_moved, births, uses)
        for storage in moved:
            size_bytes, page_bytes = self.rows.sizes[storage], graph.page_bytes
            edge_bytes = page_bytes + size_bytes % page_bytes if page_bytes else 0
            live[births[storage]] += size_bytes
            live[gone[storage]] += edge_bytes - size_bytes
            live[fetch[storage]] += size_bytes + page_bytes
            live[uses[storage] + 1] -= size_bytes + page_bytes + edge_bytes
        return np.cumsum(live)[: len(self.slots)]
