"""Settings with which a step is planned, for every entry point."""

import functools
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch

from penstock import tiers
from penstock.arguments import check_fields
from penstock.machines import Machine
from penstock.remat._problem import Method, RematProblem

Size = int | str
_EXAMPLE = "penstock.remat.compile(model, budget='6GiB')"


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings with which a step is planned. It is wide because users set each of them by name."""

    budget: Size | float | tiers.Budget | None
    """A budget in bytes, as a number or text such as ``"6GiB"``, or a ``Budget`` with tiers.

    A ``float`` is a share of the peak without a plan.
    """
    optimizer: torch.optim.Optimizer | None = None
    """The optimizer, whose state is counted, also before its first step where that is known."""
    reserve: Size = 0
    """Further bytes that the process holds on the device in addition to this step."""
    disk: tiers.DiskSpec = None
    """Directories to swap to."""
    host: Size | None = None
    """Bytes of pinned host memory to swap to (CUDA)."""
    accumulates: bool = True
    """Whether gradients exist when backward makes new ones; ``False`` with ``zero_grad(set_to_none=True)``."""
    adds_gradients: bool = True
    """Whether backward adds each gradient to an existing one where it is made; else it returns all at its end."""
    method: Method = "hybrid"
    """The means that a plan may use."""
    machine: Machine | None = None
    """A machine whose times are used instead of measuring, for plans that are not run here."""
    profile: RematProblem | None = None
    """A problem of the same step, whose times and workspaces are used instead of measuring."""
    compiler: Literal["eager", "inductor"] = "eager"
    """How the planned graphs run: node by node, or by Inductor if that keeps the budget."""
    verify: bool = False
    """Whether to compare resident storages with the plan's after every operator, and checksums of swaps (slow)."""
    as_eager: bool = True
    """Whether ``torch.compiler.is_compiling()`` is ``False`` for the model, so that it takes eager PyTorch's path."""
    strict: bool = False
    """Whether to raise an error instead of warning if the budget cannot be kept."""

    def __post_init__(self) -> None:
        check_fields(self, _EXAMPLE)
        if self.verify and self.compiler != "eager":
            raise ValueError(
                f"verify=True checks one operator after the other, which needs compiler='eager', got {self.compiler!r}"
            )
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise ValueError(f"`budget` as a share must be above 0 and at most 1, such as 0.5, got {self.budget}")

    @property
    def has_tiers(self) -> bool:
        """Whether there is a tier to move storages to."""
        account = self.account
        return bool(account.disk_bytes) or bool(account.tiers) or account.host_bytes is not None

    @functools.cached_property  # hence no slots
    def account(self) -> tiers.Budget:
        """The budget as one account, which whoever takes something for this step charges."""
        if isinstance(self.budget, tiers.Budget):
            return self.budget
        size = None if isinstance(self.budget, float) or self.budget is None else self.budget
        return tiers.Budget(device=size, host=self.host, disk=self.disk)

    def as_options(self) -> dict[str, Any]:
        """Return the settings in the form that `of_options` takes."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    @classmethod
    def of_options(cls, options: dict[str, Any]) -> Self:
        """Make settings from a dict, as ``torch.compile`` passes them. Raise ``ValueError`` for unknown options."""
        if "budget" not in options:
            only = f" (got only {sorted(options)})" if options else ""
            raise ValueError(
                f"the option 'budget' is missing{only}: penstock.remat.compile(model, budget='6GiB') or "
                "torch.compile(model, backend='penstock', options={'budget': '6GiB'})"
            )
        unknown = set(options) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"unknown options {sorted(unknown)}; valid options are {sorted(cls.__dataclass_fields__)}")
        return cls(**options)
