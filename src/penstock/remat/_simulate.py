"""What a set of decisions costs: the order of operators with everything recomputed, its peak and its time.

The rules, shared with the compiled version in `native/remat.c`, which is 100 times faster and must agree bit for bit:

- Forward runs as it is. After its last use in forward a storage goes, unless it is kept; one that is swapped goes when
  its copy out has ended as well.
- Before a backward operator runs, what it needs and is absent is made: producers, their absent inputs' producers, and
  so on, up to storages that are there. They run in forward order. What was made on the way goes after its last use in
  there; what is to be held (see ``Decision``) stays.
- The lane out carries storages in the order in which they are made. The lane back is laid backwards from the times of
  need, each copy as late as possible, and a storage is resident from the operator during which its copy begins. Copies
  that would have to begin before backward does make the step wait: a stall. What could not have left before it comes
  back never leaves.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.native import load
from penstock.remat._problem import Decision, RematProblem

MAX_RECOMPUTE_FACTOR = 40
"""Decisions that run more than this many times the operators of the step count as infeasible."""
_ENDLESS, _NO_MEMORY = 1, 2


@dataclass(slots=True)
class Simulation:
    """The step as decided."""

    peak_bytes: int
    """Highest bytes of the graph's own storages and workspaces; static bytes come on top."""
    extra_s: float
    """Seconds beyond the plain step: recomputing and stalls."""
    stall_s: float
    """Of them, stalls."""
    slots: NDArray[np.int32]
    """Operators in the order in which they run; the first ``num_forward`` are forward."""
    live_bytes: NDArray[np.int64]
    """What is held while each of them runs, its workspace included."""
    gone: NDArray[np.int32]
    """Per storage, the first slot at which its device copy is gone; -1 where it does not leave."""
    fetch: NDArray[np.int32]
    """Per storage, the slot at which its copy back begins; -1 where it does not leave."""


class Graph:
    """A problem as flat arrays."""

    def __init__(self, problem: RematProblem, gap: int = 64):
        operators, storages = problem.operators, problem.storages
        self.problem = problem
        self.num_operators, self.num_storages = len(operators), len(storages)
        self.num_forward = problem.num_forward
        self.gap = gap
        """What is recomputed each time stays if it is needed again within so many operators."""
        self.durations_s = np.array([one.duration_s for one in operators], dtype=np.float64)
        self.step_s = float(np.cumsum(self.durations_s)[-1]) if operators else 0.0
        self.workspaces = np.array([one.workspace_bytes for one in operators], dtype=np.int64)
        self.sizes = np.array([one.size_bytes for one in storages], dtype=np.int64)
        self.producers = np.array([one.producer for one in storages], dtype=np.int32)
        self.is_output = np.array([one.is_output for one in storages], dtype=np.uint8)
        self.inputs = [tuple(dict.fromkeys(one.inputs)) for one in operators]
        self.outputs = [one.outputs for one in operators]
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
        self.buffers: _Buffers | None = None
        self.bandwidths = (problem.out_bandwidth_bytes_per_s, problem.in_bandwidth_bytes_per_s)
        self.page_bytes = problem.swap_page_bytes


def _rows(rows: list[tuple[int, ...]] | list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    starts[1:] = np.cumsum([len(row) for row in rows])
    return starts, np.array([one for row in rows for one in row], dtype=np.int32)


def _dense(slots: dict[int, int], count: int) -> NDArray[np.int32]:
    dense = np.full(count, -1, dtype=np.int32)
    dense[list(slots)] = list(slots.values())
    return dense


class _CGraph(ctypes.Structure):
    """``Graph`` of `native/remat.c`."""

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
    _fields_ = (
        ("peak_bytes", ctypes.c_int64),
        ("extra_s", ctypes.c_double),
        ("stall_s", ctypes.c_double),
        ("num_slots", ctypes.c_int32),
    )


def simulate(graph: Graph, decisions: NDArray[np.uint8]) -> Simulation | None:
    """Plays the step with a ``Decision`` for every storage; ``None`` if it recomputes without end."""
    library = load("remat")
    return simulate_slowly(graph, decisions) if library is None else _simulate_compiled(library, graph, decisions)


def simulate_slowly(graph: Graph, decisions: NDArray[np.uint8]) -> Simulation | None:
    """The same in Python: the reference, and the way of a machine without a compiler."""
    return _Player(graph, decisions).play()


def _simulate_compiled(library: ctypes.CDLL, graph: Graph, decisions: NDArray[np.uint8]) -> Simulation | None:
    capacity = MAX_RECOMPUTE_FACTOR * graph.num_operators
    buffers = graph.buffers
    if buffers is None:
        buffers = graph.buffers = _Buffers(graph, capacity)
    buffers.decisions[:] = decisions
    outcome = library.penstock_simulate(*buffers.arguments)
    if outcome == _NO_MEMORY:
        raise MemoryError("no memory for the planner's simulation")
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
    """What the compiled simulation reads and writes; the results of one call live until the next."""

    def __init__(self, graph: Graph, capacity: int):
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
        written = [ctypes.c_void_p(one.ctypes.data) for one in (self.slots, self.live, self.gone, self.fetch)]
        given = ctypes.byref(self.graph), ctypes.c_void_p(self.decisions.ctypes.data), ctypes.c_int32(capacity)
        self.arguments = (*given, *written, ctypes.byref(self.result))


class _Player:
    def __init__(self, graph: Graph, decisions: NDArray[np.uint8]):
        self.graph = graph
        self.decisions = decisions
        self.slots: list[int] = []
        self.births = [-1] * graph.num_storages
        self.uses = [-1] * graph.num_storages
        """Slot of the last use of what stays (kept or swapped, outputs, backward's own)."""
        self.is_here = [False] * graph.num_storages
        self.intervals: list[tuple[int, int, int]] = []
        """First slot, last slot, bytes."""
        self.next_need = [0] * graph.num_storages

    def play(self) -> Simulation | None:
        graph = self.graph
        for index in range(graph.num_forward):
            self._forward(index)
        for index in range(graph.num_forward, graph.num_operators):
            if not self._backward(index):
                return None
        times_s = np.zeros(len(self.slots) + 1)
        times_s[1:] = np.cumsum(graph.durations_s[self.slots])
        stall_s, gone, fetch = self._lanes(times_s)
        self._close_intervals(gone, fetch)
        live = np.zeros(len(self.slots) + 1, dtype=np.int64)
        for first, last, size_bytes in self.intervals:
            live[first] += size_bytes
            live[last + 1] -= size_bytes
        live = np.cumsum(live)[:-1] + graph.workspaces[self.slots]
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

    def _stays(self, storage: int) -> bool:
        """Whether a forward storage is there all along, or comes back by itself."""
        graph = self.graph
        return bool(graph.is_output[storage]) or self.decisions[storage] in (Decision.KEEP, Decision.SWAP)

    def _forward(self, index: int) -> None:
        graph, slot = self.graph, len(self.slots)
        self.slots.append(index)
        for storage in graph.inputs[index]:
            self.uses[storage] = slot
        for storage in graph.outputs[index]:
            self.births[storage] = self.uses[storage] = slot
            self.is_here[storage] = self._stays(storage)
            if not self.is_here[storage]:
                self.intervals.append((slot, int(graph.last_forward[storage]), int(graph.sizes[storage])))

    def _backward(self, index: int) -> bool:
        graph = self.graph
        again = self._closure(index)
        if len(self.slots) + len(again) > MAX_RECOMPUTE_FACTOR * graph.num_operators:
            return False
        first = len(self.slots)
        last_user: dict[int, int] = {}
        for place, operator in enumerate([*again, index]):
            for storage in graph.inputs[operator]:
                last_user[storage] = first + place
        for operator in again:
            self._run(operator)
            for storage in graph.outputs[operator]:
                if self.is_here[storage]:
                    self._duplicate(storage)
                elif self._is_held(storage, index):
                    self.births[storage], self.is_here[storage] = len(self.slots) - 1, True
                else:
                    end = last_user.get(storage, len(self.slots) - 1)
                    self.intervals.append((len(self.slots) - 1, end, int(graph.sizes[storage])))
        self._run(index)
        slot = len(self.slots) - 1
        for storage in graph.outputs[index]:
            self.births[storage] = self.uses[storage] = slot
            self.is_here[storage] = True
        self._drop(index, slot)
        return True

    def _closure(self, index: int) -> list[int]:
        """Operators to run again before ``index``, in order."""
        graph, found = self.graph, set()
        stack = [one for one in graph.inputs[index] if not self.is_here[one]]
        while stack:
            producer = int(graph.producers[stack.pop()])
            if producer not in found:
                found.add(producer)
                stack += [one for one in graph.inputs[producer] if not self.is_here[one]]
        return sorted(found)

    def _run(self, operator: int) -> None:
        self.slots.append(operator)
        for storage in self.graph.inputs[operator]:
            self.uses[storage] = len(self.slots) - 1

    def _duplicate(self, storage: int) -> None:
        """Made once more beside another output that was wanted: goes at once, or takes the place of the one before."""
        slot, size_bytes = len(self.slots) - 1, int(self.graph.sizes[storage])
        if self._stays(storage):
            self.intervals.append((slot, slot, size_bytes))
        else:
            birth = self.births[storage]
            self.intervals.append((birth, max(birth, self.uses[storage]), size_bytes))
            self.births[storage] = slot

    def _is_held(self, storage: int, index: int) -> bool:
        """Whether what was recomputed for operator ``index`` stays for later ones."""
        needs = self.graph.needs[storage]
        if not needs or needs[-1] < index:
            return False
        if self.decisions[storage] == Decision.RECOMPUTE:
            return True
        place = self._advance(storage, index)
        return needs[place] - index <= self._gap(storage)

    def _gap(self, storage: int) -> int:
        """Within how many operators it has to be needed again to stay."""
        return 0 if self.decisions[storage] == Decision.RECOMPUTE_EVERY_TIME else self.graph.gap

    def _advance(self, storage: int, index: int) -> int:
        """Position of the first need that is not before operator ``index``."""
        needs = self.graph.needs[storage]
        while self.next_need[storage] < len(needs) - 1 and needs[self.next_need[storage]] < index:
            self.next_need[storage] += 1
        return self.next_need[storage]

    def _drop(self, index: int, slot: int) -> None:
        """What backward operator ``index`` was the last to need goes."""
        graph = self.graph
        for storage in graph.inputs[index]:
            if graph.producers[storage] >= graph.num_forward or self._stays(storage):
                continue
            needs = graph.needs[storage]
            if needs[-1] > index:
                if self.decisions[storage] == Decision.RECOMPUTE:
                    continue
                if needs[self._advance(storage, index + 1)] - index <= self._gap(storage):
                    continue
            if self.is_here[storage]:
                self.intervals.append((self.births[storage], slot, int(graph.sizes[storage])))
                self.is_here[storage] = False

    def _lanes(self, times_s: NDArray[np.float64]) -> tuple[float, dict[int, int], dict[int, int]]:
        graph = self.graph
        out, back = graph.bandwidths
        swapped = [
            one
            for one in range(graph.num_storages)
            if self.decisions[one] == Decision.SWAP and not graph.is_output[one] and self._first_use(one) >= 0
        ]
        left_s: dict[int, float] = {}
        free_s = 0.0
        for storage in sorted(swapped, key=lambda one: (self.births[one], one)):
            free_s = max(free_s, float(times_s[self.births[storage] + 1])) + float(graph.sizes[storage]) / out
            left_s[storage] = free_s
        stall_s, lane_s = 0.0, float("inf")
        gone: dict[int, int] = {}
        fetch: dict[int, int] = {}
        earliest_s = float(times_s[graph.num_forward])
        for storage in sorted(swapped, key=lambda one: (-self._first_use(one), one)):
            start_s = min(float(times_s[self._first_use(storage)]), lane_s) - float(graph.sizes[storage]) / back
            slot = max(graph.num_forward, int(np.searchsorted(times_s, start_s, side="right")) - 1)
            slot = min(slot, self._first_use(storage))
            leaves = int(np.searchsorted(times_s, left_s[storage], side="left"))
            leaves = max(leaves, int(graph.last_forward[storage]) + 1)
            if leaves < slot:
                gone[storage], fetch[storage] = leaves, slot
                stall_s = max(stall_s, earliest_s - start_s)
                lane_s = start_s
        return stall_s, gone, fetch

    def _first_use(self, storage: int) -> int:
        """The first slot of backward that reads a storage that stays; -1 if none does."""
        if not hasattr(self, "_first_uses"):
            self._first_uses = [-1] * self.graph.num_storages
            for slot in range(len(self.slots) - 1, self.graph.num_forward - 1, -1):
                for one in self.graph.inputs[self.slots[slot]]:
                    self._first_uses[one] = slot
        return self._first_uses[storage]

    def _close_intervals(self, gone: dict[int, int], fetch: dict[int, int]) -> None:
        graph, end = self.graph, len(self.slots) - 1
        for storage in range(graph.num_storages):
            size_bytes, birth = int(graph.sizes[storage]), self.births[storage]
            if graph.is_output[storage]:
                self.intervals.append((birth, end, size_bytes))
            elif graph.producers[storage] >= graph.num_forward or self.decisions[storage] == Decision.KEEP:
                self.intervals.append((birth, self.uses[storage], size_bytes))
            elif self.decisions[storage] == Decision.SWAP:
                if storage in gone:
                    self.intervals.append((birth, gone[storage] - 1, size_bytes))
                    page_bytes = graph.page_bytes
                    if page_bytes:
                        edge_bytes = page_bytes + size_bytes % page_bytes
                        self.intervals.append((gone[storage], self.uses[storage], edge_bytes))
                    self.intervals.append((fetch[storage], self.uses[storage], size_bytes + page_bytes))
                else:
                    self.intervals.append((birth, self.uses[storage], size_bytes))
