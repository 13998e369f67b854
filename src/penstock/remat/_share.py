"""A step's share of the budget, which may be an account that others also use."""

import itertools
import weakref
from dataclasses import replace

import torch

from penstock import tiers
from penstock.remat._decision import Decision
from penstock.remat._plan import plan_of
from penstock.remat._problem import RematProblem
from penstock.remat._settings import PlanSettings
from penstock.tiers import Charges, Footprint

WITHOUT_LIMIT = 2**62
"""Bytes of a budget that has no limit."""
_shares: "weakref.WeakSet[Share]" = weakref.WeakSet()
_clock = itertools.count(1)


class Share:
    """The bytes that a step may take and that it has charged."""

    def __init__(self, settings: PlanSettings):
        self._settings = settings
        self._charges: Charges | None = None
        self._footprint = Footprint()
        self._largest_bytes = 0
        """The largest peak of a step without a plan so far. A budget may be a share of it."""
        self.device: torch.device | None = None
        """The device of its last step."""
        self.begun = (0, 0)
        """When its last two steps began, by the clock of all steps."""
        _shares.add(self)

    def begin_step(self, device: torch.device) -> None:
        """Note that a step begins on ``device``."""
        self.device, self.begun = device, (self.begun[1], next(_clock))

    @property
    def is_relative(self) -> bool:
        """Whether the budget is a share of what a step without a plan takes."""
        return isinstance(self._settings.budget, float)

    @property
    def is_charged(self) -> bool:
        """Whether the budget is an account that others may use."""
        return isinstance(self._settings.budget, tiers.Budget)

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of the device that its own budget allows; ``None`` if there is no such number."""
        return None if self.is_relative else self._settings.account.device_bytes

    @property
    def device_bytes(self) -> int | None:
        """Bytes of the device that the process may hold in all; ``None`` if there is no such number.

        Of compiled modules whose steps take turns or nest, as a GAN's do, the smallest number counts.
        """
        if self.limit_bytes is None:
            return None
        since = self.begun[0]
        nested = [share for share in list(_shares) if share.device == self.device and share.begun[1] > since > 0]
        return min([self.limit_bytes, *(share.limit_bytes for share in nested if share.limit_bytes is not None)])

    def others_bytes(self) -> int:
        """Return what the account says that others hold between steps."""
        if not self.is_charged:
            return 0
        with self._settings.account.account as account:
            return account.standing_bytes(without=self._footprint)

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
        account, limit_bytes = self._settings.account, self.device_bytes
        room_bytes = account.step_room_bytes(own)
        if room_bytes is None or limit_bytes is None or account.device_bytes is None:
            return WITHOUT_LIMIT
        return max(0, room_bytes - (account.device_bytes - limit_bytes))

    def take(self, static_bytes: int, step_bytes: int, parameters: dict[int, int]) -> None:
        """Charge the account with what the step takes. Plans of one step share what exists between them."""
        if self._charges is None:
            self._charges = Charges(self._settings.account, "remat")
            weakref.finalize(self, self._charges.give_back)
        before = self._footprint
        together = Footprint(
            tensors={**before.tensors, **parameters},
            held_bytes=max(before.held_bytes, static_bytes - sum(parameters.values())),
            step_bytes=max(before.step_bytes, step_bytes),
        )
        self._charges.enter(together)
        self._footprint = together

    def give_back(self) -> None:
        """Return all of it to the account."""
        self.begun = (0, 0)
        if self._charges is not None:
            self._charges.give_back()
