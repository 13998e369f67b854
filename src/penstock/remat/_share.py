"""A step's share of the budget, which may be an account that others also use."""

import weakref
from dataclasses import replace

from penstock import tiers
from penstock.remat._decision import Decision
from penstock.remat._plan import RematPlan, plan_of
from penstock.remat._problem import RematProblem
from penstock.remat._settings import PlanSettings
from penstock.tiers import Charges, Footprint

WITHOUT_LIMIT = 2**62
"""Bytes of a budget that has no limit."""


class Share:
    """The bytes that a step may take and that it has charged."""

    def __init__(self, settings: PlanSettings):
        self._settings = settings
        self._charges: Charges | None = None
        self._footprint = Footprint()
        self._largest_bytes = 0
        """The largest peak of a step without a plan so far. A budget may be a share of it."""

    @property
    def is_relative(self) -> bool:
        """Whether the budget is a share of what a step without a plan takes."""
        return isinstance(self._settings.budget, float)

    @property
    def device_bytes(self) -> int | None:
        """Bytes of the device that the account has in all; ``None`` if there is no such number."""
        return None if self.is_relative else self._settings.account().device_bytes

    def budget_bytes(self, problem: RematProblem, parameters: dict[int, int]) -> int:
        """Return the bytes that a step with these parameters may take."""
        budget = self._settings.budget
        if isinstance(budget, float):
            keep_all = plan_of(problem, [Decision.KEEP] * len(problem.storages)).peak_bytes
            # a smaller batch, such as the last, may take the same bytes
            self._largest_bytes = max(self._largest_bytes, keep_all)
            return int(budget * self._largest_bytes)
        own = replace(self._footprint, tensors={**self._footprint.tensors, **parameters})
        if self._charges is not None:  # the account's charges for plans of other shapes are this step's own
            self._charges.enter(own, force=True)
        room_bytes = self._settings.account().step_room_bytes(own)
        return WITHOUT_LIMIT if room_bytes is None else max(0, room_bytes)

    def take(self, problem: RematProblem, plan: RematPlan, parameters: dict[int, int]) -> None:
        """Charge the account with what the step takes. Plans of one step share what exists between them."""
        if not isinstance(self._settings.budget, tiers.Budget):
            return
        if self._charges is None:
            self._charges = Charges(self._settings.budget, "remat")
            weakref.finalize(self, self._charges.give_back)
        before = self._footprint
        together = Footprint(
            tensors={**before.tensors, **parameters},
            held_bytes=max(before.held_bytes, problem.static_bytes - sum(parameters.values())),
            step_bytes=max(before.step_bytes, plan.peak_bytes - problem.static_bytes),
        )
        self._charges.enter(together)
        self._footprint = together

    def give_back(self) -> None:
        """Return all of it to the account."""
        if self._charges is not None:
            self._charges.give_back()
