"""A remat plan over time. `penstock.remat` is imported only when there is a plan to show: it loads the compiler."""

from typing import TYPE_CHECKING

from penstock.arguments import checked

if TYPE_CHECKING:
    from penstock.remat import RematPlan, RematProblem


@checked("penstock.report.plan_timeline(planned.problem, planned.plan)")
def plan_timeline(problem: "RematProblem", plan: "RematPlan") -> list[tuple[float, int]]:
    """Return memory over the operators of a step: seconds since its beginning, and bytes held on the device.

    Times are those of the operators alone, as the plan counts them, without waits for copies.
    """
    from penstock.remat import live_bytes

    live = live_bytes(problem, plan)  # raises for a wrong problem or plan
    now_s, timeline = 0.0, []
    for index, held in zip(plan.slots, live, strict=True):
        timeline.append((now_s, held + problem.static_bytes))
        now_s += problem.operators[index].duration_s
    return timeline


@checked("penstock.report.plan_marks(planned.problem, planned.plan)")
def plan_marks(problem: "RematProblem", plan: "RematPlan") -> dict[str, list[float]]:
    """Return when operators are recomputed and storages leave and come back, in seconds of ``plan_timeline``."""
    times_s = [time_s for time_s, _ in plan_timeline(problem, plan)]
    marks = {
        "recomputed": [slot for slot, index in enumerate(plan.slots) if slot >= problem.num_forward > index],
        "swapped out": sorted(plan.gone_slots.values()),
        "called back": sorted(plan.fetch_slots.values()),
    }
    return {name: [times_s[slot] for slot in slots] for name, slots in marks.items() if slots}
