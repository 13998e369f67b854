"""Forward and backward of captured graphs, emitted by their plans, with the tiers and trials that these need."""

from penstock.remat import _aot, _swap
from penstock.remat._debug import checked
from penstock.remat._emit import SLOTS, emit
from penstock.remat._piece import PlannedHalves, Variant
from penstock.remat._plan import RematPlan
from penstock.remat._settings import PlanSettings
from penstock.remat._trial import CompiledPlan


class Emitter:
    """A maker of halves for one step."""

    def __init__(self, settings: PlanSettings):
        self._settings = settings
        self.tiers: _swap.Tiers | None = None
        """The tiers of swaps, once a plan has some."""
        self.trials: list[CompiledPlan] = []
        """Plans that Inductor has to compile, each of which is tried once."""

    def halves(self, variant: Variant, plan: RematPlan, allowed_bytes: int) -> PlannedHalves:
        """Return both halves of a variant by a plan for it.

        ``allowed_bytes`` limits what they may take in addition to the static bytes, if Inductor compiles them.
        """
        captured, problem = variant.captured, variant.problem
        assert captured is not None and problem is not None
        if plan.gone_slots and self.tiers is None:
            self.tiers = _swap.Tiers(captured.device, self._settings.account, verify=self._settings.verify)
        forward, backward = emit(captured, problem, plan, self.tiers.number if self.tiers else None)
        if self._settings.verify:
            runners = [checked(module, module.meta[SLOTS], problem, plan) for module in (forward, backward)]
            return PlannedHalves(plan, *runners)
        run_forward, run_backward = _aot.boxed(forward), _aot.boxed(backward)
        if self._settings.compiler == "inductor":
            trial = CompiledPlan(forward, backward, captured.num_forward_outputs, allowed_bytes, problem)
            self.trials.append(trial)
            run_forward = trial.runner(run_forward, is_backward=False)
            run_backward = trial.runner(run_backward, is_backward=True)
        return PlannedHalves(plan, run_forward, run_backward)

    def close(self) -> None:
        """End the lanes of swaps."""
        if self.tiers is not None:
            self.tiers.close()
