"""Trains a small model twice, plainly and with its activations parked, and compares every bit."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import nn

from penstock import offload
from penstock.offload import _plan

OPTIONS = {"min_size": 0, "max_in_flight": "1MiB", "min_saving": 0, "max_stall": 1, "verify": True}
"""Everything may be parked, and nothing is declined."""


@dataclass
class Run:
    """What one training left behind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Per step, by name; a parameter without a gradient is left out."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    statistics: list[offload.OffloadStatistics] = field(default_factory=list)
    """After each step; empty without an offloader."""
    num_changes: int = 0
    """Cycles that differed from the plan made before them."""


@contextlib.contextmanager
def everything_parked():
    """Plans park all that may be parked, however long its copies take: tiny steps hide no copy.

    Fetches begin when the first storage is needed, and not before: what a fetch asks for while its copy out has not
    begun is not written at all, and how far a disk is by then is luck.
    """
    patched = {"_bisect": 0, "_never_gone": set(), "_declined": ""}
    with contextlib.ExitStack() as stack:
        for name, value in patched.items():
            stack.enter_context(mock.patch.object(_plan, name, return_value=value))
        stack.enter_context(mock.patch.object(_plan, "lay_fetches", _lay_fetches_in_backward))
        yield


def _lay_fetches_in_backward(problem, parked):
    begins = min((storage.need_event for storage in problem.storages), default=0)
    return {
        index: min(max(begins, problem.storages[index].pack_event + 1), problem.storages[index].need_event)
        for index in parked
    }


def settle(offloader):
    """Lets all copies end, so that whatever was parked has left and must be fetched."""
    for waterfall in offloader._waterfalls.values():
        waterfall.drain()


def assert_nothing_leaked(offloader):
    """Every handle was released, and no byte of the disk is held. Waits for what still travels."""
    gc.collect()
    settle(offloader)
    statistics = offloader.tier_statistics()
    assert statistics.num_live_handles == 0
    assert statistics.held_bytes["disk"] == 0
    assert not offloader._entries


def assert_moved(offloader):
    """Bytes were written to disk and came back from it."""
    statistics = offloader.tier_statistics()
    assert statistics.parked_bytes > 0
    assert statistics.fetched_bytes > 0
    assert statistics.written_to_disk_bytes == statistics.parked_bytes
    assert statistics.num_failed_writes == statistics.kept_bytes == 0


def assert_same(expected: Run, actual: Run):
    """Losses, gradients of every step and the final state are equal to the bit."""
    assert len(expected.losses) == len(actual.losses) > 0
    for step, (left, right) in enumerate(zip(expected.losses, actual.losses, strict=True)):
        assert torch.equal(left, right), f"losses of step {step} differ: {left} and {right}"
    for step, (left, right) in enumerate(zip(expected.gradients, actual.gradients, strict=True)):
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), f"gradients of {name} differ in step {step}"
    assert expected.state.keys() == actual.state.keys()
    for name, value in expected.state.items():
        assert torch.equal(value, actual.state[name]), f"{name} differs at the end"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor``; of the local part of a DTensor."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().clone()


def note(run: Run, model: nn.Module, loss: torch.Tensor):
    """Writes a finished step down."""
    run.losses.append(plain(loss))
    run.gradients.append(
        {name: plain(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}
    )


def train(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module, int, Callable[[], None]], torch.Tensor],
    make: Callable[[nn.Module], offload.Offloader] | None = None,
    *,
    num_steps: int = 4,
    check: Callable[[offload.Offloader], None] | None = None,
    between: Callable[[nn.Module, int], None] = lambda *_: None,
    learning_rate: float = 0.05,
) -> Run:
    """Trains with SGD and momentum; with ``make``, inside the offloader that it returns for the model.

    ``step(model, index, settle)`` runs forward, ``settle()`` and backward, and returns the loss. ``check`` is called
    with the offloader when training is over, and ``between`` before each step.
    """
    run = Run()
    torch.manual_seed(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    offloader = make(model) if make else None
    pause = (lambda: settle(offloader)) if offloader else (lambda: None)
    for index in range(num_steps):
        between(model, index)
        torch.manual_seed(100 + index)
        optimizer.zero_grad()
        with offloader or contextlib.nullcontext():
            loss = step(model, index, pause)
        note(run, model, loss)
        del loss
        optimizer.step()
        if offloader:
            run.statistics.append(offloader.statistics())
    run.state = {name: plain(value) for name, value in model.state_dict().items()}
    if offloader:
        run.num_changes = num_changes(offloader)
        del optimizer, model
        assert_nothing_leaked(offloader)
        assert_moved(offloader)
        if check:
            check(offloader)
        offloader.close()
    return run


def num_changes(offloader) -> int:
    """Cycles that differed from the plan made for them."""
    return offloader._learner.num_changes.total()


def assert_trains_equal(
    build, step, disk, *, num_steps=4, follows_plan=True, check=None, between=None, **options
) -> Run:
    """Both trainings agree, bytes were moved in every step, and from the second step on the plan held."""
    beside = {"num_steps": num_steps} | ({"between": between} if between else {})
    expected = train(build, step, **beside)
    with everything_parked():
        make = lambda model: offload.activations(model, disk=disk, **OPTIONS | options)  # noqa: E731
        actual = train(build, step, make, check=check, **beside)
    assert_same(expected, actual)
    assert not any(statistic.declined or statistic.failed_bytes for statistic in actual.statistics)
    if follows_plan:
        assert all(statistic.parked_bytes + statistic.forwarded_bytes > 0 for statistic in actual.statistics)
        assert actual.num_changes == 0
        assert actual.statistics[0].predicted_peak_bytes is None
        assert all(statistic.predicted_peak_bytes is not None for statistic in actual.statistics[1:])
    return actual


def forward_backward(forward: Callable[[nn.Module], torch.Tensor]):
    """The ordinary step: ``forward(model)`` gives the loss, everything parked leaves, backward brings it back."""

    def step(model, index, settle):
        loss = forward(model)
        settle()
        loss.backward()
        return loss.detach()

    return step


class Mlp(nn.Module):
    """Three blocks, with a hook for what happens between them."""

    def __init__(self, width=32, num_blocks=3, call=None):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 4)
        self.call = call or (lambda block, x: block(x))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def mlp_loss(model: nn.Module) -> torch.Tensor:
    """A loss on a batch of random numbers, drawn from the generator that each step seeds."""
    return model(torch.randn(96, 16)).square().mean()
