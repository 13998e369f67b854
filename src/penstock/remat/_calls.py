"""Calls of a step's graphs: what each holds, and which results of one are arguments of another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from penstock.remat import _capture
from penstock.remat._arguments import storage_of, weak_storage
from penstock.remat._piece import Call, Variant
from penstock.remat._plan import RematPlan
from penstock.remat._together import GraphLink
from penstock.remat._verify import live_bytes


@dataclass(slots=True)
class Done:
    """One call of the running step."""

    variant: Variant
    statics: "Statics"
    call: Call | None = None
    """The call; ``None`` before it begins."""

    @property
    def plan(self) -> RematPlan:
        """The plan that it follows."""
        assert self.call is not None
        return self.call.plan

    @property
    def results(self) -> list[tuple[int, int]]:
        """Identity and bytes of each result's storage, once forward has ended."""
        return [] if self.call is None else self.call.results


class Statics:
    """Storages of a call's arguments: parameters with their gradients, and other storages, by identity."""

    def __init__(self, arguments: Sequence[Any], *, accumulates: bool):
        self.storages = [storage_of(argument)[0] for argument in arguments]
        self._held = [weak_storage(argument) for argument in arguments]
        """Weak references. While they live, no other storage gets one of these identities."""
        self.parameters: dict[int, int] = {}
        self.missing: dict[int, int] = {}
        """Part of the parameters' bytes that belongs to gradients which do not exist yet."""
        self.gradient_bytes = 0
        """Bytes of the gradients that exist."""
        self.others: dict[int, int] = {}
        for argument in arguments:
            if isinstance(argument, nn.Parameter):
                has_gradient = accumulates and argument.requires_grad
                self.parameters[id(argument)] = argument.nbytes * (2 if has_gradient else 1)
                if has_gradient and argument.grad is None:
                    self.missing[id(argument)] = argument.nbytes
                elif has_gradient:
                    self.gradient_bytes += argument.nbytes
            else:
                key, size_bytes = storage_of(argument)
                self.others[key] = size_bytes


def links_of(step: Sequence[Done]) -> list[GraphLink]:
    """Return which results of the step's graphs were arguments of later graphs."""
    links: list[GraphLink] = []
    results: dict[int, tuple[int, int]] = {}
    for target, done in enumerate(step):
        captured = done.variant.captured
        assert captured is not None
        for position, key in enumerate(done.statics.storages):
            if key in results:
                source, storage = results[key]
                links.append(
                    GraphLink(source=source, storage=storage, target=target, gradient=_gradient_of(captured, position))
                )
        for node, (key, _) in zip(captured.forward_outputs, done.results, strict=True):
            storage_number = captured.storage_of.get(node) if isinstance(node, fx.Node) else None
            if key and storage_number is not None:
                results[key] = (target, storage_number)
    return links


def _gradient_of(captured: _capture.JointGraph, argument: int) -> int | None:
    node = captured.gradients[argument] if argument < len(captured.gradients) else None
    return captured.storage_of.get(node) if isinstance(node, fx.Node) else None


def saved_bytes_of(done: Done) -> int:
    """Return the bytes that a call has left for its backward, or a little more."""
    problem = done.variant.problem
    assert problem is not None
    live = live_bytes(problem, done.plan)
    return live[problem.num_forward] if len(live) > problem.num_forward else 0
