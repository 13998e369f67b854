"""Where to cut a model: into shards as large as the budget allows next to what is copied in and out while they compute.

The problem: atoms in order (what lies between two legal cuts), each with the tensors that it uses and the bytes that
its operators make. A shard needs its parameters, their gradients, the optimizer's state and its activations at once. At
the same time the next shard comes in and the previous one goes out. The aim is few shards with little between them.

The method: for several sizes of the part that is set aside for copies in and out, a shortest path over the legal cuts.
Its length counts the bytes across cuts and a constant per shard. Cost: the number of atoms times the atoms of a shard,
for each size. Guarantee: no budget is exceeded as far as the estimates are right. Pilot runs then measure every shard,
and their figures replace the estimates (`_pilot.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import BudgetError
from penstock.units import format_bytes

_SHARD_BYTES = 2**20
"""Cost of another shard, in bytes across a cut: its units take time of their own."""
_SHARES = tuple(1 / share for share in (3, 4, 5, 6, 8, 10, 12, 16, 24, 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomCost:
    """Bytes that one atom needs."""

    tensors: Mapping[str, int]
    """Parameters and buffers that it uses, with their bytes."""
    activation_bytes: int
    """Bytes that its operators make and backward may read."""
    crossing_bytes: int
    """Bytes of values across the cut after it."""
    label: str
    """Its part of the model, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """A model to cut for a device."""

    atoms: tuple[AtomCost, ...]
    """The atoms, in the order of forward."""
    trained: frozenset[str]
    """Tensors with gradients and optimizer state."""
    state_share: float
    """Bytes of optimizer state per byte of trained parameters: 2 for Adam."""
    budget_bytes: int
    """Budget of the smallest device that has to run it."""


def partition(problem: PartitionProblem) -> tuple[int, ...]:
    """Return the atoms that end a shard.

    Raises ``BudgetError`` that names the atom which does not fit the budget.
    """
    for num_others in (2, 1, 0):  # with memory for the next shard and the previous one, for the next only, for none
        paths = [
            path
            for share in (_SHARES if num_others else (1.0,))
            if (path := _shortest(problem, share * problem.budget_bytes, num_others)) is not None
        ]
        if paths:
            return min(paths)[1]
    most, worst = _largest_atom(problem)
    raise BudgetError(
        f"{problem.atoms[worst].label} alone takes about {format_bytes(most)} for parameters, gradients, optimizer "
        f"state and activations, more than the budget of {format_bytes(problem.budget_bytes)}; give about "
        f"budget={math.ceil(most)}, or take smaller batches (accumulate=)"
    )


def largest_atom_bytes(problem: PartitionProblem) -> float:
    """Return the estimated bytes of the largest atom by itself."""
    return _largest_atom(problem)[0]


def _largest_atom(problem: PartitionProblem) -> tuple[float, int]:
    return max((_Need(problem, index).add(index), index) for index in range(len(problem.atoms)))


def _shortest(problem: PartitionProblem, other_bytes: float, num_others: int) -> tuple[float, tuple[int, ...]] | None:
    """Find the cheapest cuts, or return ``None`` if there are none.

    Each shard moves at most ``other_bytes``, and leaves room for ``num_others`` others of that size.
    """
    atoms, limit = problem.atoms, problem.budget_bytes - num_others * other_bytes
    best: list[float] = [0.0] + [float("inf")] * len(atoms)
    before = [0] * (len(atoms) + 1)
    for first in range(len(atoms)):
        if best[first] == float("inf"):
            continue
        need = _Need(problem, first)
        for last in range(first, len(atoms)):
            if need.add(last) > limit or (num_others and need.moving_bytes > other_bytes):
                break
            is_end = last == len(atoms) - 1
            length = best[first] + _SHARD_BYTES + (0 if is_end else atoms[last].crossing_bytes)
            if length < best[last + 1]:
                best[last + 1], before[last + 1] = length, first
    if best[-1] == float("inf"):
        return None
    ends, end = [], len(atoms)
    while end:
        ends.append(end - 1)
        end = before[end]
    return best[-1], tuple(reversed(ends))


class _Need:
    """Bytes of a shard that begins at ``first``, as atoms are added to it."""

    def __init__(self, problem: PartitionProblem, first: int):
        self._problem = problem
        self._incoming = problem.atoms[first - 1].crossing_bytes if first else 0
        self._seen: set[str] = set()
        self._activation_bytes = 0
        self._waiting_bytes = 0.0
        self._gradient_bytes = 0

    @property
    def moving_bytes(self) -> float:
        """Bytes of parameters, state and activations, which come in for its backward."""
        return self._waiting_bytes + self._activation_bytes

    def add(self, index: int) -> float:
        """Add atom ``index`` as the shard's last, and return the bytes at the shard's peak."""
        atom = self._problem.atoms[index]
        for name, size in atom.tensors.items():
            if name not in self._seen:
                self._seen.add(name)
                self._waiting_bytes += size
                if name in self._problem.trained:
                    self._waiting_bytes += size * self._problem.state_share
                    self._gradient_bytes += size
        self._activation_bytes += atom.activation_bytes
        boundaries = 2 * (self._incoming + atom.crossing_bytes)
        return self._waiting_bytes + self._gradient_bytes + self._activation_bytes + boundaries


def merged(atoms: Sequence[AtomCost], most: int) -> tuple[list[AtomCost], list[int]]:
    """Merge ``atoms`` into at most ``most``, cut where the fewest bytes cross.

    Returns them, and the index of the last original atom in each.
    """
    if len(atoms) <= most:
        return list(atoms), list(range(len(atoms)))
    inner = sorted(range(len(atoms) - 1), key=lambda index: (atoms[index].crossing_bytes, index))[: most - 1]
    ends = [*sorted(inner), len(atoms) - 1]
    merged_atoms, first = [], 0
    for end in ends:
        part = atoms[first : end + 1]
        merged_atoms.append(
            AtomCost(
                tensors={name: size for atom in part for name, size in atom.tensors.items()},
                activation_bytes=sum(atom.activation_bytes for atom in part),
                crossing_bytes=part[-1].crossing_bytes,
                label=part[-1].label,
            )
        )
        first = end + 1
    return merged_atoms, ends
