"""An optimizer's step on tensors in host memory, on behalf of parameters of an accelerator.

Another processor rounds differently, so that results agree with steps on the device within rounding, not bit for bit.
"""

import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.devices import stay_on_node
from penstock.native import PRECISIONS, UPDATES, HostUpdatePass
from penstock.stepping import State, own_class, step_part

if TYPE_CHECKING:
    from penstock.tiers import Handle

_TRIES = 3
_WITH_KERNEL = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose update is a single kernel on a CPU."""
FEWEST_TRIED = 2**16
"""Elements of the parameter on which a step is tried. With fewer, Python overhead dominates."""
Groups = Sequence[Mapping[str, Any]]


class HostStep:
    """A step whose tensors are all in host memory. Subclasses say what it computes."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The error with which it has ended."""
        self.computed_s = 0.0
        """Seconds that it has computed."""
        self.is_counted = True
        """Whether it has done what it is for."""
        self.turn = 0
        """Its number among the steps of its lane."""
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        """Functions to be called when it has ended."""

    @property
    def is_ready(self) -> bool:
        """Whether it can begin at once."""
        return True

    def get_ready(self) -> None:
        """Wait until it can begin; the thread of a `HostLane` calls this."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended, so that host memory holds the new bytes."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for its end."""
        self._done.wait()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function when it has ended, in its thread, or now if it has."""
        with self._lock:
            if not self.is_done:
                self._calls.append(call)
                return
        call()

    def run(self) -> None:
        """Run the step; the thread of a `HostLane` calls this. Whoever waits for the step raises its error."""
        try:
            self.get_ready()
            start_s = time.perf_counter()
            self.compute()
            self.computed_s = time.perf_counter() - start_s
        except BaseException as error:
            self.error = error
        finally:
            with self._lock:
                self._done.set()
                calls, self._calls = self._calls, []
            for call in calls:
                call()

    def compute(self) -> None:
        """Compute the step, in host memory only."""
        raise AssertionError(f"{type(self).__name__} does not say what it computes")


class HostLane:
    """A thread that runs steps on the host, one after the other. It starts with the first step.

    It takes the first step of its queue that is ready. If none is, it waits for the one that was added first. It runs
    on the processors of a NUMA ``node``, and so do the threads that it starts.
    """

    def __init__(self, node: int | None = None) -> None:
        self._node = node
        self._queue: deque[HostStep] = deque()
        self._turns = itertools.count()
        self._condition = threading.Condition()
        """Guards the queue and the request to end the thread."""
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self.num_steps = 0
        self.busy_s = 0.0
        """Seconds that the thread has computed."""

    def put(self, step: HostStep, *, is_first: bool) -> None:
        """Add a step at the front or at the end of the queue. Raises ``RuntimeError`` if no thread could be started."""
        with self._condition:
            step.turn = next(self._turns)
            if is_first:
                self._queue.appendleft(step)
            else:
                self._queue.append(step)
            self._condition.notify_all()
        if self._thread is None:
            self._is_ending = False
            thread = threading.Thread(target=self._run, name="penstock host steps", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._queue.remove(step)
                raise
            self._thread = thread

    def hurry(self, step: HostStep) -> None:
        """Move a step that somebody waits for to the front of the queue."""
        with self._condition:
            if step in self._queue:
                self._queue.remove(step)
                self._queue.appendleft(step)

    def close(self) -> None:
        """Wait for the steps in the queue, and end the thread. A later `put` starts it again."""
        if self._thread is not None:
            with self._condition:
                self._is_ending = True
                self._condition.notify_all()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        stay_on_node(self._node)
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_ending)
                if not self._queue:
                    return
                step = next(filter(_is_ready, self._queue), None) or min(self._queue, key=lambda step: step.turn)
                self._queue.remove(step)
            with torch.no_grad():
                step.run()
            self.busy_s += step.computed_s
            self.num_steps += step.is_counted
            del step  # frees its gradient


def _is_ready(step: HostStep) -> bool:
    try:
        return step.is_ready
    except Exception:  # it will have it when it runs, and whoever waits for it gets it
        return True


def step_on_host(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    parameter: torch.Tensor,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    call: str,
) -> State:
    """Step ``weight``, the value of ``parameter`` in host memory, and the large tensors of ``state`` in place.

    ``groups`` are the settings of the optimizer's groups when the step was due. Returns the other entries of the state
    that the step has changed. Raises ``TypeError`` if the optimizer replaces a large tensor by one of another kind;
    ``call`` shows how to step on the device instead.
    """
    changed = step_in_one_pass(optimizer, groups, parameter, weight, [gradient], state)
    if changed is not None:
        return changed
    large = [value for value in state.values() if is_large(value)]
    twin = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)  # attributes that an optimizer may look at
    twin.grad = gradient
    own = groups_with(twin, parameter, _in_one_pass(optimizer, groups, [weight, gradient, *large]))
    (after,) = step_part(optimizer, [twin], {twin: dict(state)}, groups=own).values()
    changed = {}
    for field, value in after.items():
        mine = state.get(field)
        if value is mine:
            continue
        if not is_large(mine) and not is_large(value):
            changed[field] = value
        elif isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape:
            mine.copy_(value)
        else:
            raise TypeError(
                f"{type(optimizer).__name__} changed the tensors of its state ({field}), which is supported only for "
                f"updates on the device: {call}"
            )
    return changed


def step_in_one_pass(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    parameter: torch.Tensor,
    weight: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    state: State,
    casts: Sequence[torch.Tensor] = (),
    scale: float = 1.0,
) -> State | None:
    """Step as `step_on_host` does, with the sum of some gradients times a factor, and write casts of the weight.

    ``None`` if there is no such kernel for these tensors and settings, and nothing has changed. Adam, AdamW, SGD and
    Adagrad have one for weights in float32, with gradients in float32, bfloat16 or float16.
    """
    kind = own_class(optimizer)
    group = next((each for each in groups if any(own is parameter for own in each["params"])), None)
    states = [state[field] for field in _STATES.get(kind, ()) if isinstance(state.get(field), torch.Tensor)]
    large = [value for value in state.values() if is_large(value)]
    tensors = [weight, *gradients, *states, *casts]
    if group is None or kind not in _STATES or group.get("differentiable") or [*map(id, large)] != [*map(id, states)]:
        return None
    if not all(_lies_as(tensor, weight) for tensor in tensors) or not _is_dense(weight):
        return None
    precisions = {tensor.dtype for tensor in gradients}
    if {tensor.dtype for tensor in (weight, *states)} != {torch.float32} or len(precisions) != 1:
        return None
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (gradients[0], *casts)]
    if any(name not in PRECISIONS for name in names) or "float32" in names[1:]:
        return None
    update = HostUpdatePass(
        num_elements=weight.numel(), weight=weight.data_ptr(), scale=scale,
        num_gradients=len(gradients), gradient_precision=PRECISIONS.index(names[0]), num_casts=len(casts),
        rate=float(group["lr"]), weight_decay=float(group["weight_decay"]), is_negated=bool(group["maximize"]),
    )  # fmt: skip
    if len(gradients) > len(update.gradients) or len(casts) > len(update.casts) or len(states) > len(update.states):
        return None
    for number, tensor in enumerate(states):
        update.states[number] = tensor.data_ptr()
    for number, tensor in enumerate(gradients):
        update.gradients[number] = tensor.data_ptr()
    for number, tensor in enumerate(casts):
        update.casts[number], update.cast_precisions[number] = tensor.data_ptr(), PRECISIONS.index(names[1 + number])
    step = state.get("step")
    is_set = _SETTINGS[kind](update, group, state, 1.0 if step is None else float(step) + 1)
    if not is_set or not update.run():
        return None
    if isinstance(step, torch.Tensor):
        step += 1  # in place: somebody may hold it
        return {}
    return {} if step is None else {"step": step + 1}


def _set_adam(update: HostUpdatePass, group: Mapping[str, Any], state: State, number: float) -> bool:
    if "step" not in state or bool(group["amsgrad"]) != ("max_exp_avg_sq" in state):
        return False
    update.kind, update.epsilon = UPDATES.index("Adam"), float(group["eps"])
    update.first_decay, update.second_decay = map(float, group["betas"])
    update.is_decoupled = bool(group["decoupled_weight_decay"])
    update.step_size = update.rate / (1 - update.first_decay**number)
    update.root_of_bias = math.sqrt(1 - update.second_decay**number)
    return True


def _set_sgd(update: HostUpdatePass, group: Mapping[str, Any], state: State, number: float) -> bool:  # noqa: ARG001
    if bool(group["momentum"]) != isinstance(state.get("momentum_buffer"), torch.Tensor):
        return False  # the first step makes it
    update.kind, update.is_nesterov = UPDATES.index("SGD"), bool(group["nesterov"])
    update.momentum, update.dampening = float(group["momentum"]), float(group["dampening"])
    return True


def _set_adagrad(update: HostUpdatePass, group: Mapping[str, Any], state: State, number: float) -> bool:
    if "step" not in state:
        return False
    update.kind, update.epsilon = UPDATES.index("Adagrad"), float(group["eps"])
    update.rate /= 1 + (number - 1) * float(group["lr_decay"])
    return True


_STATES: dict[type[torch.optim.Optimizer] | None, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adagrad: ("sum",),
}
"""The large entries of a state, in the order of ``updates.c``."""
_SETTINGS: dict[type[torch.optim.Optimizer] | None, Callable[..., bool]] = {
    torch.optim.Adam: _set_adam,
    torch.optim.AdamW: _set_adam,
    torch.optim.SGD: _set_sgd,
    torch.optim.Adagrad: _set_adagrad,
}
"""Functions that write a group's settings into an update, and return whether it has all that it needs."""


def _lies_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in main memory have their elements in the same order."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_neg()
    return is_plain and tensor.size() == other.size() and tensor.stride() == other.stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements have no gaps between them and do not overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def seconds_per_element(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: State) -> float:
    """Return the seconds per element of a step on the host, tried on zeros."""
    zeros = functools.partial(torch.zeros, device="cpu")  # regardless of the default device
    weight, gradient = (zeros(parameter.shape, dtype=parameter.dtype) for _ in range(2))
    tried = {
        field: zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for field, value in state.items()
    }
    best_s = math.inf
    for _ in range(_TRIES):
        start_s = time.perf_counter()
        tried |= step_on_host(optimizer, optimizer.param_groups, parameter, weight, gradient, tried, "")
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / parameter.numel()


def host_view(
    handle: "Handle", dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], storage_offset: int
) -> torch.Tensor:
    """Return a tensor over the bytes of a handle in host memory, which no copy touches, without a copy."""
    memory = handle.host_memory()
    whole_bytes = memory.numel() // dtype.itemsize * dtype.itemsize  # a tensor of another dtype may be the last
    memory = memory[:whole_bytes].view(dtype)
    return memory.as_strided(shape, stride, memory.storage_offset() + storage_offset)


def is_faster(seconds: float, parameter: torch.Tensor, state: State, rates: tuple[float, float]) -> bool:
    """Whether steps on the host, which take ``seconds`` per element, take less time than the link for the device's.

    ``rates`` are bytes per second out of the device and back.
    """
    out, back = rates
    states = sum(value.nbytes for value in state.values() if is_large(value)) / parameter.numel()
    own = parameter.element_size()
    on_device_s = max((3 * own + states) / back, (2 * own + states) / out)
    return bool(max(2 * own / back, own / out, seconds) < on_device_s)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return copies of the settings of the optimizer's groups as they are now, with their own lists of parameters."""
    return [settings_of_group(group, group["params"]) for group in optimizer.param_groups]


def settings_of_group(group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return a copy of the settings of an optimizer's group as they are now, for some of its parameters."""
    settings = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
    return settings | {"params": list(parameters)}


def may_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the host can use all settings of the optimizer's groups."""
    settings = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return not fused and all(map(is_here, settings))


def is_large(value: object) -> bool:
    """Whether an entry of a state is worth moving: a tensor with dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def is_number(value: object) -> bool:
    """Whether it is a number, a text or a small tensor in main memory, or ``None``."""
    return is_here(value) and (value is None or isinstance(value, torch.Tensor | int | float | str))


def groups_with(twin: torch.Tensor, parameter: torch.Tensor, groups: Groups) -> list[dict[str, Any]]:
    """Return the optimizer's groups with ``twin`` in place of ``parameter`` and without all other parameters."""
    return [{**group, "params": [twin] if any(own is parameter for own in group["params"]) else []} for group in groups]


def _in_one_pass(optimizer: torch.optim.Optimizer, groups: Groups, tensors: Sequence[torch.Tensor]) -> Groups:
    """Return the groups with one fused kernel chosen, where PyTorch has one, so that memory is read and written once.

    Single operators would read and write it a dozen times. The last bits differ, as they differ from the device's
    anyway.
    """
    first = tensors[0]
    has_kernel = type(optimizer) in _WITH_KERNEL and all(
        tensor.dtype is first.dtype and tensor.stride() == first.stride() and tensor.is_contiguous()
        for tensor in tensors
    )
    if not has_kernel or not first.is_floating_point() or any(group.get("differentiable") for group in groups):
        return groups
    return [{**group, "fused": True, "foreach": False} for group in groups]


def is_here(value: object) -> bool:
    """Whether it is no tensor, or a tensor in main memory."""
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"
