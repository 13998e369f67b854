"""The promise of ``update_in_backward=True``: one backward a step, then ``optimizer.step()``, then ``zero_grad()``.

An update in backward uses a gradient and a group's settings before plain PyTorch would. So whatever would show that, a
use of the gradient or of the new weight, or another setting, raises an error that names it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from penstock.state._page import Page
from penstock.state._pages import Pages
from penstock.storages import id_or_zero


class Promise:
    """The promise of one training's user, and what would break it."""

    def __init__(self, pages: Pages):
        self._pages = pages
        self._settings: list[dict[str, Any]] = []
        """Settings of the groups at the first update in backward of this step."""
        self._storages: set[int] = set()
        """Storages of the parameters that were updated in backward, until ``optimizer.step()``."""
        self._used: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        """The numbers behind what stands in for gradients that updates have used."""

    def begin(self, settings: list[dict[str, Any]]) -> None:
        """Begin with the first update in backward of a step, which takes these settings of the optimizer's groups."""
        self._settings, self._pages.before_use = settings, self._refuse_use

    def updated(self, parameter: torch.Tensor) -> None:
        """Note that a parameter is updated in backward."""
        self._storages.add(id_or_zero(parameter))

    def end(self, settings: list[dict[str, Any]]) -> None:
        """End with ``optimizer.step()``. Raises ``RuntimeError`` if a setting has changed since `begin`."""
        before, has_updated = self._settings, bool(self._storages)
        self.forget()
        for old, new in zip(before, settings, strict=True) if has_updated else ():
            for key, value in new.items():
                if key != "params" and key in old and bool(torch.as_tensor(value != old[key]).any()):
                    raise RuntimeError(
                        f"{key!r} of an optimizer's group was changed from {old[key]} to {value} between backward and "
                        "optimizer.step(). update_in_backward=True has used the old one already: change it after "
                        "step(), or leave update_in_backward out, and continue from the last checkpoint"
                    )

    def forget(self) -> None:
        """Forget the updates of this step."""
        self._settings, self._pages.before_use = [], None
        self._storages.clear()

    def _refuse_use(self, pages: Sequence[Page]) -> None:
        if torch._C._current_graph_task_id() == -1:  # backward itself goes on
            for page in pages:
                if page.identity in self._storages:
                    raise RuntimeError(
                        f"{page.label} is used between backward and optimizer.step(), and has its new value already: "
                        "update_in_backward=True promises that optimizer.step() follows backward. Leave it out, and "
                        "continue from the last checkpoint"
                    )

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a tensor that looks like the gradient, has one number, and raises an error once somebody uses it.

        All of one kind share the number, so that they take no memory that plain updates would not.
        """
        kind = parameter.dtype, parameter.device
        if kind not in self._used:
            with torch.no_grad():
                self._used[kind] = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            self._pages.register.due[id_or_zero(self._used[kind])] = _refuse_gradient
        with no_dispatch():  # the watch would take it for a use
            return self._used[kind].expand(parameter.shape)


def _refuse_gradient() -> None:
    raise RuntimeError(
        "the gradient of a parameter was used by its update, and is gone: update_in_backward=True promises that nobody "
        "reads or adds to gradients after backward. Call optimizer.zero_grad() before anything else, or leave it out, "
        "and continue from the last checkpoint"
    )
