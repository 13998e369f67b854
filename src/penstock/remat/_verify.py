"""An independent check of a plan, from nothing but the order of its operators.

The planner simulates decisions. This file takes the resulting order as given, binds every input to the operator that
last made it, lets each copy live until its last read, and counts. The emitted graphs behave in the same way.
"""

from penstock.arguments import checked
from penstock.errors import InternalError
from penstock.remat._plan import RematPlan
from penstock.remat._problem import RematProblem


@checked("penstock.remat.verify(problem, plan)")
def verify(problem: RematProblem, plan: RematPlan) -> None:
    """Raise ``InternalError`` that names the first rule which ``plan`` breaks."""
    num_forward = problem.num_forward
    if plan.slots[:num_forward] != tuple(range(num_forward)):
        raise InternalError("forward does not run as captured")
    if [operator for operator in plan.slots if operator >= num_forward] != list(
        range(num_forward, len(problem.operators))
    ):
        raise InternalError("operators of backward do not each run once and in order")
    for index in set(plan.slots[num_forward:]):
        if index < num_forward and problem.operators[index].must_run_once:
            raise InternalError(f"{problem.operators[index].name} runs again: {problem.operators[index].must_run_once}")
    live = live_bytes(problem, plan)
    peak = max(live, default=0) + problem.static_bytes
    if peak > plan.peak_bytes:
        raise InternalError(f"predicted peak {plan.peak_bytes}, but the order of operators implies {peak}")


@checked("penstock.remat.live_bytes(problem, plan)")
def live_bytes(problem: RematProblem, plan: RematPlan) -> list[int]:
    """Return the bytes of the graph's storages while each slot runs, including workspaces.

    Raises ``InternalError`` if an operator reads a storage that is gone.
    """
    # Shares no code with `_simulate.py` on purpose, so that a mistake in one shows in the other.
    copies: list[list[int]] = []  # first slot, last slot, bytes
    current: dict[int, int] = {}
    for slot, index in enumerate(plan.slots):
        if slot == problem.num_forward:
            _leave_forward(problem, plan, current)
        for storage in problem.operators[index].inputs:
            if storage not in current:
                raise InternalError(
                    f"{problem.operators[index].name} reads {problem.storages[storage].name}, which is no longer there"
                )
            copies[current[storage]][1] = slot
        for storage in problem.operators[index].outputs:
            if slot < problem.num_forward or storage not in current or plan.is_dropped(problem, storage):
                current[storage] = len(copies)
            copies.append([slot, slot, problem.storages[storage].size_bytes])  # else a spare copy: it never left
    end = len(plan.slots) - 1
    for storage, copy in current.items():
        if problem.storages[storage].is_output:
            copies[copy][1] = end
    changes = [0] * (len(plan.slots) + 1)
    for first, last, size_bytes in _split_at_swaps(problem, plan, copies):
        changes[first] += size_bytes
        changes[last + 1] -= size_bytes
    held, live = 0, []
    for slot, index in enumerate(plan.slots):
        held += changes[slot]
        live.append(held + problem.operators[index].workspace_bytes)
    return live


def _leave_forward(problem: RematProblem, plan: RematPlan, current: dict[int, int]) -> None:
    """Drop what has to be recomputed, which is gone when backward begins."""
    for storage in list(current):
        if plan.is_dropped(problem, storage):
            del current[storage]


def _split_at_swaps(problem: RematProblem, plan: RematPlan, copies: list[list[int]]) -> list[list[int]]:
    """Remove the time away from the device from the lives of swapped storages."""
    split = []
    order = iter(copies)
    for slot, index in enumerate(plan.slots):
        for storage in problem.operators[index].outputs:
            first, last, size_bytes = next(order)
            if storage in plan.gone_slots and slot < problem.num_forward:
                gone, back = plan.gone_slots[storage], plan.fetch_slots[storage]
                if not first < gone < back <= last:
                    raise InternalError(
                        f"{problem.storages[storage].name} leaves at slot {gone} and returns at slot {back}, outside "
                        "of its lifetime"
                    )
                page_bytes = problem.swap_page_bytes
                edge_bytes = page_bytes + size_bytes % page_bytes if page_bytes else 0
                split += [
                    [first, gone - 1, size_bytes],
                    [gone, last, edge_bytes],
                    [back, last, size_bytes + page_bytes],
                ]
            else:
                split.append([first, last, size_bytes])
    return split
