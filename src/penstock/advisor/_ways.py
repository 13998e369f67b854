"""The options that are tried: how each is set up, and the code that sets it up."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock import offload, remat
from penstock.advisor._workload import Workload
from penstock.errors import BudgetError, OffloadDeclinedWarning, PenstockError, PenstockWarning
from penstock.tiers import Budget
from penstock.units import format_bytes

LEAST_BLOCKS = 2
"""Least number of modules of one class in a list for them to count as the model's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One option, and a function that sets it up."""

    name: str
    """Name, as in `Option`."""
    rooms: tuple[str, ...]
    """Rooms, as in `Option`."""
    begin: Callable[[int], "Running"]
    """A function that sets it up; its argument is the device bytes that are held during trials but not in training.

    Options that measure the peak themselves add these bytes to their budget. Raises ``PenstockError`` or
    ``RuntimeError`` if the option does not work with this model.
    """
    code: str
    """Code, as in `Option`."""
    num_warm: int = 1
    """Number of steps before it runs as it will from then on."""


@dataclass(slots=True)
class Running:
    """An option that was set up."""

    step: Callable[[], None]
    """A function that runs forward and backward of the batch."""
    close: Callable[[], None] = field(default=lambda: None)
    """A function that frees what the option took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of an option, and the budget as the user writes it."""

    budget: Budget
    """Limits of the device and the tiers, without what other rooms hold."""
    spelled: str
    """The budget as code."""
    reserve_bytes: int
    """Device bytes that other parts of the process hold."""
    unaccounted_bytes: int
    """The part of ``reserve_bytes`` that is in no shared account."""
    extra_bytes: int
    """Bytes held during trials but not in training, minus those held in training but not yet."""

    def alone(self, extra_bytes: int = 0) -> Budget:
        """Return the budget on an account of its own, since options are alternatives."""
        limit = self.budget.device_bytes
        if limit is not None and limit + extra_bytes < 1:
            raise BudgetError(
                f"the budget of {format_bytes(limit)} cannot be met: the optimizer's state alone takes more. Give a "
                "larger budget"
            )
        device = None if limit is None else limit + extra_bytes
        return self.budget.alone(device=device, host=self.budget.host_bytes)


def ways_for(workload: Workload, limits: Limits, planned: remat.Planned | None) -> list[Way]:
    """Return the options that may be tried; ``planned`` is the profile, if the step is one graph."""
    budget = limits.budget
    blocks = blocks_of(workload.model)
    ways = [_plain(workload)]
    if blocks:
        ways.append(_checkpoint(workload, blocks))
    has_tiers = budget.leads_below(workload.device)
    if has_tiers:
        ways.append(_offload(workload, limits, []))
        if blocks:
            ways.append(_offload(workload, limits, blocks))
    if planned is not None:
        ways.append(_remat(workload, limits, planned, "recompute"))
        if has_tiers:
            ways.append(_remat(workload, limits, planned, "hybrid"))
    return ways


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of the blocks that one would checkpoint: the largest list of modules of one class."""
    most: list[str] = []
    most_parameters = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < LEAST_BLOCKS:
            continue
        if len({type(child) for child in module}) > 1 or not any(True for child in module for _ in child.children()):
            continue  # modules of several classes, or single layers
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > most_parameters:
            most_parameters = size
            most = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
    return most


@contextlib.contextmanager
def checkpointed(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Let each block save only its inputs while the block runs, by Hugging Face's own checkpointing if there is any."""
    if (own := _with_own_checkpointing(model)) is not None:
        owner = model.get_submodule(own)
        kind = _kind(owner)
        with _left_alone(owner):
            getattr(owner, f"{kind}_enable")(**{f"{kind}_kwargs": {"use_reentrant": False}})
            try:
                yield
            finally:
                getattr(owner, f"{kind}_disable")()
        return
    modules = dict.fromkeys(model.get_submodule(block) for block in blocks)
    forwards = {module: vars(module).get("forward") for module in modules}
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, forward in forwards.items():
            del module.forward  # the class has its own again
            if forward is not None:
                module.forward = forward


@contextlib.contextmanager
def _left_alone(owner: nn.Module) -> Iterator[None]:
    """Restore attributes and hooks after the block, since any that are left would make planned steps captured anew."""
    attributes = {part: dict(vars(part)) for part in owner.modules()}
    hooks = [
        (value, dict(value)) for before in attributes.values() for value in before.values() if isinstance(value, dict)
    ]
    try:
        yield
    finally:
        for part, before in attributes.items():
            vars(part).clear()
            vars(part).update(before)
        for hook, before in hooks:
            hook.clear()
            hook.update(before)


def _with_own_checkpointing(model: nn.Module) -> str | None:
    """Return the name of the outermost module that can checkpoint by itself and does not yet.

    Its own checkpointing also turns caches off.
    """
    for name, module in model.named_modules():
        if getattr(module, "supports_gradient_checkpointing", False):
            is_on = any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
            return None if is_on else name
    return None


def _kind(owner: nn.Module) -> str:
    """Return the prefix of the methods' names, which Transformers 5 has changed."""
    is_new = hasattr(owner, "activation_checkpointing_enable")
    return "activation_checkpointing" if is_new else "gradient_checkpointing"


def _plain(workload: Workload) -> Way:
    code = f"{workload.preparation}for batch in batches:\n    {workload.expression}.backward()\n{_UPDATE}"
    return Way(name="plain", rooms=(), begin=lambda _: Running(workload.step), code=code)


def _checkpoint(workload: Workload, blocks: Sequence[str]) -> Way:
    def begin(_: int) -> Running:
        def step() -> None:
            with checkpointed(workload.model, blocks):
                workload.step()

        return Running(step)

    loop = f"for batch in batches:\n    {workload.expression}.backward()\n{_UPDATE}"
    code = f"{_checkpoint_code(workload.model, blocks)}{workload.preparation}{loop}"
    return Way(name="checkpoint", rooms=(), begin=begin, code=code)


def _offload(workload: Workload, limits: Limits, blocks: Sequence[str]) -> Way:
    def begin(extra_bytes: int) -> Running:
        account = limits.alone(extra_bytes)  # the offloader measures, so it gets the extra bytes
        offloader = offload.activations(workload.model, budget=account, checkpoint_inputs_only=bool(blocks))

        def step() -> None:
            with contextlib.ExitStack() as stack:
                if blocks:
                    stack.enter_context(checkpointed(workload.model, blocks))
                stack.enter_context(offloader)
                workload.step()
            if offloader.statistics().declined:
                raise PenstockError(offloader.statistics().declined)

        return Running(step, offloader.close)

    inputs_only = ", checkpoint_inputs_only=True" if blocks else ""
    code = (
        f"import penstock\n\n{_checkpoint_code(workload.model, blocks) if blocks else ''}"
        f"offloader = penstock.offload.activations(model, budget={limits.spelled}{inputs_only})\n"
        f"{workload.preparation}for batch in batches:\n"
        f"    with offloader:\n        {workload.expression}.backward()\n{_UPDATE}"
    )
    name = "checkpoint + offload" if blocks else "offload"
    return Way(name=name, rooms=("offload",), begin=begin, code=code, num_warm=4)


def _remat(workload: Workload, limits: Limits, planned: remat.Planned, method: remat.Method) -> Way:
    def begin(_: int) -> Running:
        step = remat.optimize(
            workload.loss_of, [workload.batch], limits.alone(), optimizer=workload.optimizer,
            reserve=limits.reserve_bytes, method=method, profile=planned.problem,
        )  # fmt: skip
        return Running(lambda: step(workload.batch).backward(), step.close)

    method_code = ', method="recompute"' if method == "recompute" else ""
    optimizer = ", optimizer=optimizer" if workload.optimizer is not None else ""
    reserve = f", reserve={limits.unaccounted_bytes}" if limits.unaccounted_bytes else ""
    code = (
        f"import penstock\n\n{workload.preparation}"
        "step = None\n"
        "for batch in batches:\n"
        "    step = step or penstock.remat.optimize(\n"
        f"        lambda batch: {workload.expression}, [batch], {limits.spelled}{optimizer}{reserve}{method_code}\n"
        "    )\n"
        f"    step(batch).backward()\n{_UPDATE}"
    )
    name = "remat" if method == "recompute" else "remat + swap"
    return Way(name=name, rooms=("remat",), begin=begin, code=code)


_UPDATE = "    optimizer.step()\n    optimizer.zero_grad()\n"


def _checkpoint_code(model: nn.Module, blocks: Sequence[str]) -> str:
    if (own := _with_own_checkpointing(model)) is not None:
        owner = f"model.get_submodule({own!r})" if own else "model"
        kind = _kind(model.get_submodule(own))
        return f'{owner}.{kind}_enable({kind}_kwargs={{"use_reentrant": False}})\n'
    parent = blocks[0].rpartition(".")[0]
    return (
        "import functools\n\nfrom torch.utils.checkpoint import checkpoint\n\n"
        f"for block in dict.fromkeys(model.get_submodule({parent!r})):\n"
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)\n"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings during trials that users get when they train."""
    with warnings.catch_warnings():
        for category in (OffloadDeclinedWarning, PenstockWarning):
            warnings.simplefilter("ignore", category)
        yield
