"""A user's optimizer, stepped shard by shard.

The factory is called once, with all parameters. Its result is the master, whose groups a learning-rate scheduler
changes. `penstock.stepping` performs a shard's step on the shard's parameters.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.fleet._groups import Group
from penstock.fleet._packed import Packed
from penstock.stepping import State, missing_state_bytes, own_class, refuse_inseparable, step_part, why_whole

WHAT_WORKS = (
    "Give it a larger budget, or use one of PyTorch's optimizers without hooks. If an optimizer of your own updates "
    "each parameter from its own gradient and state alone: Job(separable=True, ...)"
)


@dataclass(slots=True)
class OptimizerStates:
    """A job's optimizer states between its steps."""

    packed: dict[Group, Packed] = field(default_factory=dict)
    """State that is worth moving."""
    numbers: dict[str, State] = field(default_factory=dict)
    """State that is not worth moving: numbers, and tensors of one element."""
    stepped: set[str] = field(default_factory=set)
    """Parameters that were stepped in this process, so that their states are known."""


class ShardedOptimizer:
    """The master optimizer, and its steps on parts of the parameters."""

    def __init__(
        self,
        master: torch.optim.Optimizer,
        names: Mapping[int, str],
        lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None,
        *,
        separable: bool = False,
    ):
        if not isinstance(master, torch.optim.Optimizer):
            raise TypeError(
                f"the optimizer factory must return a torch.optim.Optimizer, got {type(master).__name__}; for instance "
                "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
            )
        if needs_closure(master):
            raise closure_refused(master)
        if separable and own_class(master) is None:
            _check_separable(master)
        self.master = master
        unknown = [
            parameter for group in master.param_groups for parameter in group["params"] if id(parameter) not in names
        ]
        if unknown:
            raise ValueError(
                "the optimizer holds parameters that the model does not have; use the parameters that the factory "
                "receives"
            )
        self.trained = {
            names[id(parameter)]
            for group in master.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        self._initial = {
            names[id(parameter)]: dict(state) for parameter, state in master.state.items() if id(parameter) in names
        }
        """States that the factory made, each kept until its parameter's first step."""
        self.scheduler = None if lr_scheduler is None else lr_scheduler(master)
        """The scheduler of the master's learning rates."""
        self.why_whole = why_whole(master, separable=separable) or _why_hooked(master)
        """Why the master must step on all parameters at once, to stand after "because"; empty if it need not."""
        self._separable = separable
        if not self.why_whole:
            master.state = defaultdict(dict)

    @property
    def waits_for_metric(self) -> bool:
        """Whether the scheduler is stepped with the metric of a validation, instead of after every step."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def step_on_plateau(self, metrics: Mapping[str, float]) -> None:
        """Step such a scheduler. Raise ``ValueError`` if it cannot be known which metric it waits for."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if "loss" not in metrics and len(metrics) != 1:
                raise ValueError(
                    "ReduceLROnPlateau takes one metric, but the validation has several: "
                    f"{', '.join(metrics)}; let metric= return one scalar, or a dict with 'loss'"
                )
            self.scheduler.step(metrics.get("loss", next(iter(metrics.values()))))

    def put_back_states(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the master the states that the factory made, because it will step whole after all."""
        for name in list(self._initial):
            self.master.state[parameters[name]] = self._first(name, parameters[name])

    def state_share(self, named: Mapping[str, nn.Parameter]) -> float:
        """Return bytes of state per byte of trained parameters, as far as they are known before the first step."""
        trained_bytes = sum(parameter.nbytes for name, parameter in named.items() if name in self.trained)
        return missing_state_bytes(self.master, separable=self._separable) / max(1, trained_bytes)

    def step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        """Step ``parameters``, which have gradients, from ``states``, and return their new states, changed in place.

        An empty state is that of a first step.
        """
        if hooked := _why_hooked(self.master):
            raise TypeError(f"the job was cut and {hooked}; register hooks in the factory of the optimizer")
        begun = {name: states.get(name) or self._first(name, parameter) for name, parameter in parameters.items()}
        after = self._step(parameters, begun)
        for name in parameters:
            self._initial.pop(name, None)
        return after

    def try_step(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, State]:
        """Try the first step of ``parameters`` and return the states that it would leave.

        The master stays as it was.
        """
        return self._step(
            parameters, {name: copy.deepcopy(self._first(name, parameter)) for name, parameter in parameters.items()}
        )

    def _first(self, name: str, parameter: nn.Parameter) -> State:
        """Return the initial state on the parameter's device. Numbers, such as counts of steps, stay where they are."""
        return {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in self._initial.get(name, {}).items()
        }

    def _step(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State]) -> dict[str, State]:
        by_parameter: dict[torch.Tensor, State] = {parameters[name]: state for name, state in states.items()}
        after = step_part(self.master, parameters.values(), by_parameter)
        return {name: dict(after[parameter]) for name, parameter in parameters.items()}


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` cannot be called without arguments, as L-BFGS's cannot."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    except ValueError:  # built in
        return False
    return False


def closure_refused(optimizer: torch.optim.Optimizer) -> TypeError:
    """Return the error for an optimizer whose ``step`` calls the loss itself."""
    return TypeError(
        f"{type(optimizer).__name__} needs a closure that computes the loss again, and a job calls step() without one; "
        "use an optimizer that steps on gradients: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
    )


def _why_hooked(optimizer: torch.optim.Optimizer) -> str:
    """Return that hooks run around steps, which may read any parameter; ``""`` if there are none."""
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [getattr(optimizer, key, None) for key in own]  # some wrappers do not call the constructor of Optimizer
    if any(hooks):
        return f"{type(optimizer).__name__} has hooks on its steps, which may look at all parameters at once"
    of_all = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    if any(not _is_ours(hook) for hooks in of_all for hook in list(hooks.values())):
        return "hooks on the steps of all optimizers are registered, which may look at all parameters at once"
    return ""


def _is_ours(hook: Any) -> bool:  # any: whatever can be called
    """Whether a hook is Penstock's own, which only notes that an optimizer steps."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("penstock.")


def _check_separable(optimizer: torch.optim.Optimizer) -> None:
    call = "Job(separable=False, ...)"
    try:
        refuse_inseparable(optimizer, call)
    except TypeError:
        raise
    except Exception as error:  # its step is the user's
        raise TypeError(
            f"separable=True cannot be checked for {type(optimizer).__name__}, whose step raises "
            f"{type(error).__name__}: {error} on parameters that it has not seen before. Leave it out: {call}"
        ) from error
