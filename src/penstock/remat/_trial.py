"""Trials of compiled steps, which are accepted only after one was measured.

Inductor may hold at the same time what the plan keeps apart.
"""

from typing import Any

import torch
from torch import fx

from penstock import probe
from penstock.devices import is_accelerator, random_forked
from penstock.errors import CompilerDeclinedWarning
from penstock.remat import _accumulate
from penstock.remat._aot import Runner, boxed_function
from penstock.remat._capture import device_of, tensors_of
from penstock.remat._inductor import compiled
from penstock.remat._problem import RematProblem
from penstock.remat._warn import warn
from penstock.tiers import generators_held
from penstock.units import format_bytes


class CompiledPlan:
    """Forward and backward of one plan, compiled. They run node by node until a step has kept within the plan's bytes.

    The trial is a step of its own, on the arguments of the first. Its gradients are discarded and generators restored.
    """

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_results: int,
        allowed_bytes: int,
        problem: RematProblem,
    ):
        self.is_accepted: bool | None = None
        self._num_results = num_results
        """Number of values that forward returns before those that it saves."""
        self._allowed_bytes = allowed_bytes
        """Bytes that a step may take in addition to those at its start."""
        self._inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
        self._device = max(map(device_of, backward.graph.nodes), key=is_accelerator)
        once = [operator for operator in problem.operators if operator.must_run_once and operator.target != "tangent"]
        if once:
            self._decline(
                f"a trial would run {once[0].name} a second time, but it must run only once ({once[0].must_run_once})"
            )
            return
        try:
            self._forward, self._backward = compiled(forward), compiled(backward)
        except Exception as error:  # a compiler may raise anything; the plan runs without it
            self._decline(f"Inductor could not compile it ({type(error).__name__}: {str(error).partition(chr(10))[0]})")

    def runner(self, plain: Runner, *, is_backward: bool) -> Runner:
        """Return a runner that runs a half of the step compiled if that is accepted, else as ``plain`` does."""

        def run(arguments: list[Any]) -> Any:
            if self.is_accepted is None and not is_backward:
                self._measure(arguments)
            if not self.is_accepted:
                return plain(arguments)
            return self._backward(arguments) if is_backward else self._forward(arguments)

        return boxed_function(run)

    def _measure(self, arguments: list[Any]) -> None:
        if not probe.can_record(self._device):
            return  # nothing says what it takes
        try:
            with generators_held(), random_forked([self._device]), _accumulate.discarding():
                self._step(arguments)  # libraries make their one-time allocations here
                taken = probe.peak_bytes(lambda: self._step(arguments), device=self._device).activation_bytes
        except Exception as error:  # as when compiling
            self._decline(f"its trial failed ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
            return
        if taken > self._allowed_bytes:
            self._decline(
                f"compiled by Inductor, the step takes {format_bytes(taken)}, but may take only "
                f"{format_bytes(self._allowed_bytes)}"
            )
        else:
            self.is_accepted = True

    def _step(self, arguments: list[Any]) -> None:
        tangents = [tensor for node in self._inputs if "tangents" in node.name for tensor in tensors_of(node)]
        gradients = [
            torch.empty_strided(tangent.shape, tangent.stride(), dtype=tangent.dtype, device=tangent.device).fill_(1)
            for tangent in tangents
        ]
        results = self._forward(list(arguments))  # the caller holds them until backward has ended
        saved = list(results[self._num_results :])
        results = results[: self._num_results]
        saved += gradients
        del gradients
        self._backward(saved)

    def _decline(self, why: str) -> None:
        if self.is_accepted is None:
            warn(
                f"compiler='inductor' is not used for this step, which runs operator by operator instead: {why}",
                CompilerDeclinedWarning,
            )
        self.is_accepted = False
