"""Optimizer steps on parameters, gradients and states that are pages.

PyTorch's own optimizers step one parameter after the other, and an update is put off until somebody uses what it
changes. Optimizers that the user declares separable step one parameter after the other, at once. All others run their
own ``step``, whole, at its time, on pages that are fetched as it reads them (`penstock.stepping`).
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from penstock.host_stepping import settings_of, settings_of_group
from penstock.state._casts import Casts
from penstock.state._deferred import Deferred, DueState
from penstock.state._on_host import HostUpdates, merge
from penstock.state._operators import PLAIN, SMALL_BYTES
from penstock.state._page import Page
from penstock.state._pages import Pages
from penstock.state._past import do_pending
from penstock.state._promise import Promise
from penstock.state._slices import SlicedUpdates
from penstock.state._taken import Taken
from penstock.stepping import State, own_class, step_part, tensors_in, why_whole
from penstock.storages import id_or_zero

_SMALL_SHARE = 256
"""Divisor of the budget that gives how many bytes of small parameters are updated together."""
_AT_ONCE = 16
"""Factor by which the budget must exceed an update's pages for all of them to be fetched before it begins."""

UpdatedBy = Literal["device", "host", "auto"]
"""Which processor computes an optimizer's updates; ``"auto"``: both, as planned."""


class Updates:
    """The step of one optimizer.

    It is wide because an update may run whole, in parts, put off, in backward or on the host, all in one step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pages: Pages,
        taken: Taken,
        casts: Casts,
        *,
        update: UpdatedBy,
        updates_in_backward: bool,
        separable: bool,
    ):
        self._optimizer, self._pages, self._taken = optimizer, pages, taken
        self.why_whole = why_whole(optimizer, separable=separable)
        """Why the optimizer's own step runs whole; ``""`` if parameters are updated one after the other."""
        self._may_defer = own_class(optimizer) is not None
        """Whether an update may be put off, as nothing else happens in the step."""
        self._host = (
            None if update == "device" else HostUpdates(optimizer, pages, casts, last_first=updates_in_backward)
        )
        """The updates on the host; ``None`` if the device does all."""
        casts.name, casts.hosted = taken.name, None if update == "host" else ()
        self._slices = SlicedUpdates(optimizer, pages, taken, casts)
        """The updates on the device in slices."""
        self._is_planned = update == "auto"
        """Whether a plan says which updates are the host's. Until there is one, the device does all."""
        self._hosted: frozenset[int] = frozenset()
        """Parameters that the host updates by the plan."""
        self._group_of: dict[int, dict[str, Any]] = {}
        """Each parameter's group when the step began."""
        self._is_broken = False
        self._parked_bytes: tuple[int, ...] = ()
        """Bytes copied out before the last few steps. Where nothing leaves, nothing is put off."""
        self._is_too_large = False
        """Whether the pages of some update were not all on the device. From there on the host does every update, so
        that steps are alike.
        """
        self._stateless: set[int] = set()
        """Parameters without optimizer state."""
        self._small: list[torch.Tensor] = []
        """Parameters whose gradients this backward has completed, and whose updates wait for its end."""
        self._updated: set[int] = set()
        """Parameters that this backward has updated."""
        self._promise = Promise(pages)

    def begin_step(self) -> None:
        """Look for each parameter's group, since groups come, go and are replaced between steps."""
        self._slices.begin_step()
        groups = self._optimizer.param_groups
        self._group_of = {id(parameter): group for group in groups for parameter in group["params"]}

    def begin(self) -> Callable[[], None]:
        """Replace ``optimizer.step``; return a function that restores it."""
        optimizer, own = self._optimizer, self._optimizer.__dict__.get("step")
        step: Any
        if self.why_whole:
            run, whole = optimizer.step, self._whole

            @functools.wraps(run)
            def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
                del self
                return whole(run, args, kwargs)

        else:
            inner = self._step

            @torch.optim.Optimizer.profile_hook_step  # type: ignore[attr-defined]  # runs hooks once, around all parts
            def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
                del self
                return inner(closure)

            step._wrapped_by_lr_sched = True  # a scheduler that was here before warns otherwise
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

        def give_back() -> None:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own  # type: ignore[method-assign]

        return give_back

    def _whole(self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the optimizer's own step as it is. What it makes are pages like the results of any operator."""
        try:
            return run(*args, **kwargs)
        finally:
            self._taken.states(self._optimizer)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Do the optimizer's step, one parameter after the other."""
        loss, optimizer = None, self._optimizer
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler would warn that no step came before
        for page in list(self._pages):
            due = page.pending
            if due is not None and id(due.parameter) not in self._updated:  # nobody has used it since the last step
                due()
        if self._is_planned and self._host is not None:
            self._follow_split(self._host)
        settings = settings_of(self._optimizer)
        self._promise.end(settings)
        is_scaled = (
            getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
        )
        self._parked_bytes = (*self._parked_bytes[-2:], sum(self._pages.copies.parked_bytes.values()))
        are_at_rest = len(self._parked_bytes) == 3 and self._parked_bytes[0] == self._parked_bytes[-1]
        small: list[torch.Tensor] = []
        waiting = set(map(id, self._small))  # if an error has kept the end of backward from updating them
        self.begin_step()
        for own in settings:
            for parameter in own["params"]:
                if parameter.grad is None or id(parameter) in self._updated - waiting:
                    continue
                if not is_scaled and (self._is_small(parameter) or (are_at_rest and self._is_at_hand(parameter))):
                    small.append(parameter)
                elif (
                    is_scaled
                    or self._is_in_slices(parameter)
                    or not self._defer(parameter, {**own, "params": [parameter]})
                ):
                    self._update_now(parameter)
        self._update_together(small)
        self._forget_updated()
        return loss

    def _follow_split(self, host: HostUpdates) -> None:
        """Let the host update what the plan says, from now on."""
        replay = self._pages.replay
        if replay.host_bytes_per_s is None:
            replay.host_bytes_per_s = host.tried_bytes_per_s()
            replay.wants_split = bool(replay.host_bytes_per_s)
        if replay.split is None:
            return
        split, replay.split = replay.split, None
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        pages = [(parameter, self._pages.find(id_or_zero(parameter))) for parameter in parameters]
        hosted = [(parameter, page) for parameter, page in pages if page is not None and page.key in split]
        self._hosted = frozenset([id(parameter) for parameter, _ in hosted])
        host.casts.hosted = {page.identity for _, page in hosted}

    def _forget_updated(self) -> None:
        self._updated.clear()
        self._small.clear()
        self._promise.forget()

    def _defer(self, parameter: torch.Tensor, settings: dict[str, Any], *, to_host_alone: bool = False) -> bool:
        """Put off the update until somebody uses the weight, its gradient or its state, since forward fetches it
        anyway.

        Or hand it to the host, if not all of these are on the device. Returns whether either was possible.
        """
        gradient, page = parameter.grad, self._pages.find(id_or_zero(parameter))
        own = None if gradient is None else self._pages.find(id_or_zero(gradient))
        if gradient is None or page is None or own is None:  # nobody would notice when somebody uses it
            return False
        if not self._may_defer:
            return False
        states = self._optimizer.state
        state = states.setdefault(parameter, DueState())  # in the order of parameters, as in any step
        if type(state) is dict and not state:  # somebody has looked for it before there was any
            state = states[parameter] = DueState()
        of_state = (self._pages.find(id_or_zero(value)) for value in state.values() if isinstance(value, torch.Tensor))
        pages = [page, own, *(page for page in of_state if page is not None)]
        if any(page.pending is not None for page in pages):  # several parameters share memory
            return False
        due = self._pages.register.due
        update = Deferred(
            self._update, self._note_broken, parameter, gradient, state, [settings], pages, due, self._pages.allow
        )
        torch.autograd.graph.increment_version(parameter)
        if (
            self._host is not None
            and self._is_for_host(parameter, pages)
            and self._host.begin(update, is_stateless=id(parameter) in self._stateless)
        ):
            return True
        if to_host_alone:
            return False
        self._pages.course.put_off(page)
        update.put_off()
        return True

    def _is_in_slices(self, parameter: torch.Tensor) -> bool:
        """Whether the device is to update a parameter in slices."""
        return self._host is None and self._is_too_much(parameter)

    def _is_too_much(self, parameter: torch.Tensor) -> bool:
        settings = [{**self._group_of.get(id(parameter), {}), "params": [parameter]}]
        return len(settings[0]) > 1 and self._slices.wants(
            parameter, self._optimizer.state.get(parameter, {}), settings
        )

    def _is_for_host(self, parameter: torch.Tensor, pages: Sequence[Page]) -> bool:
        if self._is_planned:  # what is too much for the device at once is the host's in any plan
            return id(parameter) in self._hosted or self._is_too_much(parameter)
        self._is_too_large = self._is_too_large or not all(page.is_at_hand for page in pages)
        return self._is_too_large

    def _update(self, parameter: torch.Tensor, live: State, now: State, settings: Sequence[Mapping[str, Any]]) -> None:
        """Do the update. ``live`` is the optimizer's entry, ``now`` what was in it when the step was due."""
        before, first = dict(now), self._pages.course.position + 1
        if self._slices.wants(parameter, now, settings):
            changed = self._slices.update(parameter, now, settings)
            if changed is not None:
                self._keep(parameter, live, before, changed)
                return
        weight, gradient, *states = [
            self._pages.find(id_or_zero(tensor))
            for tensor in (parameter, parameter.grad, *now.values())
            if isinstance(tensor, torch.Tensor)
        ]
        with self._at_once(parameter, now):
            (after,) = step_part(self._optimizer, [parameter], {parameter: now}, groups=settings).values()
        if weight is not None and gradient is not None:
            large = [page for page in states if page is not None]
            self._pages.course.updated_on_device(weight, gradient, large, first)
        self._keep(parameter, live, before, after)

    def _keep(self, parameter: torch.Tensor, live: State, before: State, after: State) -> None:
        """Put the state that an update has made into the optimizer's entry."""
        if self._optimizer.state.get(parameter) is not live:
            return  # it has a new entry by now
        merge(live, before, after)
        if isinstance(live, DueState):
            live = self._optimizer.state[parameter] = dict(live)
        if any(before.get(field) is not value for field, value in after.items()):
            self._taken.state(parameter, live)
        if not live:
            self._stateless.add(id(parameter))
            del self._optimizer.state[parameter]

    def _at_once(self, parameter: torch.Tensor, state: State) -> contextlib.AbstractContextManager[None]:
        """Fetch all pages of an update before its first operator, if the budget has room for them.

        A dozen operators on the same four pages take less than half the time if nobody looks at each of them. The first
        update, which makes the states, is looked at.
        """
        tensors = [value for value in (parameter, parameter.grad, *state.values()) if isinstance(value, torch.Tensor)]
        pairs = [(tensor, self._pages.find(id_or_zero(tensor))) for tensor in tensors]
        pages = list(dict.fromkeys(page for _, page in pairs if page is not None))
        is_known = len(pages) > 2 and all(
            page is not None or (tensor.layout is torch.strided and tensor.nbytes < SMALL_BYTES)
            for tensor, page in pairs
        )
        if not is_known or _AT_ONCE * sum(page.size_bytes for page in pages) > self._pages.course.budget_bytes:
            return contextlib.nullcontext()
        do_pending(pages)
        are_plain = all(type(tensor) in PLAIN for tensor in tensors)
        return self._pages.quietly(pages, pages, are_plain=are_plain)  # some optimizers write to gradients as well

    def _is_small(self, parameter: torch.Tensor) -> bool:
        """Whether nothing of the parameter ever leaves the device."""
        if parameter.nbytes >= SMALL_BYTES or parameter.grad is None or parameter.grad.layout is not torch.strided:
            return False
        state = self._optimizer.state[parameter]  # in the order of parameters, as in any step
        tensors = [parameter, parameter.grad, *(value for value in state.values() if isinstance(value, torch.Tensor))]
        return all(self._pages.find(id_or_zero(tensor)) is None for tensor in tensors)

    def _is_at_hand(self, parameter: torch.Tensor) -> bool:
        """Whether all pages of its update are on the device, with nothing due, and it is not its first one."""
        state, gradient = self._optimizer.state.get(parameter), parameter.grad
        if not state or gradient is None or gradient.layout is not torch.strided or not self._may_defer:
            return False
        pages = [self._pages.find(id_or_zero(tensor)) for tensor in (parameter, gradient, *tensors_in(state))]
        return all(page is None or (page.is_here and page.pending is None and page.scaling is None) for page in pages)

    def _update_together(self, parameters: Sequence[torch.Tensor]) -> None:
        """Update parameters that are on the device, as many at a time as operators on lists take."""
        most_bytes, part, part_bytes = self._pages.course.budget_bytes // _SMALL_SHARE, list[torch.Tensor](), 0
        for parameter in parameters:
            part.append(parameter)
            part_bytes += parameter.nbytes
            if part_bytes >= most_bytes or parameter is parameters[-1]:
                live = {parameter: self._optimizer.state[parameter] for parameter in part}
                now = {parameter: dict(state) for parameter, state in live.items()}
                before = {parameter: dict(state) for parameter, state in live.items()}
                with self._quietly([tensor for own in part for tensor in (own, own.grad, *tensors_in(now[own]))]):
                    stepped = step_part(self._optimizer, part, now)
                for updated, after in stepped.items():
                    self._keep(updated, live[updated], before[updated], after)
                part, part_bytes = [], 0

    @contextlib.contextmanager
    def _quietly(self, tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Run operators on tensors that are on the device, and that make nothing large, without looking at each."""
        pages = [self._pages.find(id_or_zero(tensor)) for tensor in tensors if tensor is not None]
        known = list(dict.fromkeys(page for page in pages if page is not None))
        are_plain = all(tensor is None or type(tensor) in PLAIN for tensor in tensors)
        with self._pages.quietly(known, known, are_plain=are_plain):
            yield

    def _update_now(self, parameter: torch.Tensor) -> None:
        state = self._optimizer.state[parameter]
        self._update(parameter, state, dict(state), [{**self._group_of[id(parameter)], "params": [parameter]}])

    def in_backward(self, parameter: torch.Tensor) -> None:
        """Update a parameter whose gradient is complete, as the user has promised, and which nobody looks at."""
        group = self._group_of.get(id(parameter))
        if group is None:
            return
        if id(parameter) in self._updated:
            raise RuntimeError(
                f"{self._taken.name(parameter)} got a second gradient in one step, after its update. "
                "update_in_backward=True supports one backward per step, in which each parameter gets its gradient "
                "once: leave it out, and continue from the last checkpoint"
            )
        if not self._updated:
            self._promise.begin(settings_of(self._optimizer))
        self._updated.add(id(parameter))
        self._promise.updated(parameter)
        if self._is_small(parameter):
            if not self._small:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]
            self._small.append(parameter)
            return
        if self._host is not None:
            self._taken.gradient(parameter)
        if self._host is None or not self._defer(parameter, settings_of_group(group, [parameter]), to_host_alone=True):
            with torch.no_grad():
                self._update_now(parameter)
        parameter.grad = self._promise.stand_in(parameter)

    def _end_backward(self) -> None:
        """Update the small parameters together at the end of backward. If an error prevents this, `step` does it."""
        small, self._small = [parameter for parameter in self._small if parameter.grad is not None], []
        with torch.no_grad():
            self._update_together(small)
        for parameter in small:
            parameter.grad = self._promise.stand_in(parameter)

    def _note_broken(self) -> None:
        """Note that an update began and did not finish."""
        self._is_broken = True

    @property
    def is_broken(self) -> bool:
        """Whether an update began and did not finish, so that the model is in a state between two steps."""
        return self._is_broken or self._slices.is_broken or (self._host is not None and self._host.failed)

    @property
    def num_on_host(self) -> int | None:
        """Number of updates that the host computed; ``None`` if it computes none."""
        return None if self._host is None else self._host.lane.num_steps

    def forget(self) -> None:
        """Drop the updates that are due; afterwards no thread works on host memory."""
        if self._host is not None:
            self._host.close()
        for page in self._pages:
            if page.pending is not None:
                page.pending.forget()
            page.pending = page.scaling = None
        self._forget_updated()
        self._is_broken = self._slices.is_broken = False
