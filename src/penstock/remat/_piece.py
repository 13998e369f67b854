"""One graph of Dynamo's, planned and run for every kind of arguments.

Dynamo makes a graph once, with symbols for sizes that change. Each concrete kind of arguments makes a `Variant`: the
graph with numbers in place of symbols, which AOTAutograd captures on the first use, outside of Dynamo. A variant can
run by any plan for it. The owner of the step (`_session.py`) chooses one for every call.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import CaptureError, PenstockError, PenstockWarning
from penstock.remat import _accumulate, _aot, _capture, _dynamo, _ticket
from penstock.remat._arguments import (
    KnownArguments,
    floats_of,
    for_arguments,
    kind_of,
    number_places,
    storage_of,
    weak_storage,
    without_floats,
)
from penstock.remat._as_eager import function_of
from penstock.remat._decision import Decision
from penstock.remat._in_place import add_in_place
from penstock.remat._plan import RematPlan
from penstock.remat._problem import RematProblem
from penstock.remat._warn import warn
from penstock.remat._whole import Recipe, keep_whole
from penstock.tiers import check_version, gate, generators_held, version_of

_MAX_VARIANTS = 64
"""Limit of one graph's variants; the least recently used one is dropped."""
_MANY_NUMBERS = 8
"""Number of calls that differ only in a float; one more, and a warning recommends a tensor."""
_MAX_EMITTED = 8
"""Limit of one variant's plans that are kept as graphs."""


@dataclass(frozen=True, slots=True)
class PlannedHalves:
    """Forward and backward of a variant by one plan."""

    plan: RematPlan
    """The plan for which they were emitted."""
    forward: _aot.Runner
    """Forward, which returns what it saves after its results."""
    backward: _aot.Runner
    """Backward, which takes what forward saved and the gradients of the results."""


class Owner(Protocol):
    """The owner of a step, which decides how its graphs run."""

    is_rehearsing: bool
    """Whether only plans are wanted, and nothing has to run."""
    has_rest: bool
    """Whether graphs that cannot be captured may run eagerly."""

    pieces: "list[GraphPiece]"
    """All graphs."""
    num_calls: int
    """Number of calls of what was compiled, so far."""
    has_warned_of_pieces: bool
    """Whether the user was told that graphs are traced again and again."""

    def left_eager(self, why: str) -> None:
        """Note that a graph runs eagerly, and why."""

    @property
    def adds_gradients(self) -> bool:
        """Whether backward adds gradients to their leaves itself."""

    @property
    def is_functional(self) -> bool:
        """Whether planned graphs must not write into their inputs."""

    def begin(self, variant: "Variant", arguments: Sequence[torch.Tensor]) -> "Call":
        """Begin a call of ``variant``, and decide how it runs."""

    def describe(self, variant: "Variant") -> RematProblem:
        """Measure the operators of a captured variant."""

    def emitted(self, variant: "Variant", plan: RematPlan) -> PlannedHalves:
        """Return both halves of a variant by a plan for it."""


class Call:
    """One forward whose backward may come. It ends with the last ticket that refers to it."""

    def __init__(self, halves: PlannedHalves, plan: RematPlan, when_over: Callable[["Call"], None]):
        self.halves = halves
        self.plan = plan
        """The plan that it follows. The halves may have been made for another plan with the same decisions."""
        self._when_over = when_over
        self._is_over = False
        self.is_failed = False
        self.results: list[tuple[int, int]] = []
        """Identity and bytes of each result's storage."""
        self.held: list[StorageWeakRef | None] = []
        """Weak references. While they live, no other storage gets one of these identities."""
        self.seconds = 0.0
        """Seconds of its forward and backward, on the host's clock."""
        self.had_backward = False
        self.is_alone = True
        """Whether nothing else in its step has gradients."""
        self.gradient_strides: list[tuple[int, ...]] | None = None
        """Strides that backward needs for its gradients; ``None`` if it takes any."""

    def failed(self) -> None:
        """Note that forward failed."""
        self.is_failed = True
        self.over()

    def over(self) -> None:
        """Note that nothing of it is held any more. Finalizers may call it. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._when_over(self)


class _Handed:
    """The values that forward hands over to backward, behind a ticket."""

    def __init__(self, call: Call, saved: list[Any]):
        self.call = call
        self.saved: list[Any] | None = saved
        self.versions = [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in saved]

    def take(self) -> list[Any]:
        """Return the saved values, and give them away unless autograd keeps the graph."""
        if self.saved is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time. Specify retain_graph=True if you need to backward "
                "through the graph a second time."
            )
        for tensor, version in zip(self.saved, self.versions, strict=True):
            if isinstance(tensor, torch.Tensor):
                check_version(tensor, version)
        if _capture.keeps_graph():
            return list(self.saved)
        saved, self.saved = self.saved, None
        return saved

    def __del__(self) -> None:
        self.call.over()


@dataclass(slots=True, weakref_slot=True)
class Variant:
    """A graph for one kind of arguments."""

    piece: "GraphPiece"
    arguments: "KnownArguments"
    run: Callable[..., Any] = field(init=False)
    """The function that AOTAutograd made of it."""
    captured: _capture.JointGraph | None = None
    """The captured graph; ``None`` if nothing requires gradients."""
    problem: RematProblem | None = None
    """The problem of a step that is this graph alone."""
    is_scaled: bool = False
    """Whether its operators' times were scaled from other sizes, and no step has corrected them yet."""
    num_calls: int = 0
    """Number of counted calls that ended with a backward."""
    is_eager: bool = False
    """Whether it could not be captured, and runs eagerly."""
    recipes: list[Recipe] = field(default_factory=list)
    """Recipes kept alive for the operators that are captured whole."""
    halves: dict[tuple[Decision, ...], PlannedHalves] = field(default_factory=dict)
    """Both halves by decisions, the most recently used last."""
    has_run: bool = False
    """Whether a step with it has ended."""
    leanest: RematPlan | None = None
    """The plan that leaves the fewest bytes for backward, once it was needed."""

    def emitted(self, plan: RematPlan) -> PlannedHalves:
        """Return both halves by ``plan``."""
        halves = self.halves.pop(plan.decisions, None) or self.piece.owner.emitted(self, plan)
        self.halves[plan.decisions] = halves
        while len(self.halves) > _MAX_EMITTED:
            del self.halves[next(iter(self.halves))]
        return halves

    def forward(self, arguments: list[Any]) -> Any:
        """Run forward for AOTAutograd, and return its results and a ticket for backward."""
        assert self.captured is not None
        with gate.computing():
            call = self.piece.owner.begin(self, arguments)
            start_s = time.perf_counter()
            try:
                values = list(call.halves.forward(arguments))
            except BaseException:
                call.failed()
                raise
            call.seconds = time.perf_counter() - start_s
            num_results = self.captured.num_forward_outputs
            results, saved = values[:num_results], values[num_results:]
            del values
            call.results = [storage_of(result) for result in results]
            call.held = [weak_storage(result) for result in results]
            # Otherwise gradients are taken as they come: a copy to the traced strides, as AOTAutograd makes it, changes
            # bits, because oneDNN sums a bias's gradient in the order of memory.
            if self.piece.owner.is_functional or not self.captured.takes_any_layout:
                call.gradient_strides = [tangent.meta["val"].stride() for tangent in self.captured.tangents]
            return *results, _ticket.issue(_Handed(call, _apart(saved, results)))


def _backward(arguments: list[Any]) -> Any:
    """Run backward for AOTAutograd, with the ticket and the gradients of the results.

    Return the arguments' gradients.
    """
    ticket, *tangents = arguments
    arguments.clear()
    handed: _Handed = _ticket.thing_of(ticket)
    with gate.computing():
        start_s = time.perf_counter()
        inputs = handed.take()
        is_last = handed.saved is None
        if handed.call.gradient_strides is not None:
            tangents = list(map(_laid_out, tangents, handed.call.gradient_strides))
        inputs += tangents
        del tangents
        try:
            with contextlib.nullcontext() if handed.call.is_alone else _accumulate.returning():
                gradients = handed.call.halves.backward(inputs)
            return tuple(map(_only_once, gradients)) if torch.is_grad_enabled() else gradients
        finally:
            handed.call.seconds += time.perf_counter() - start_s
            handed.call.had_backward = True
            if is_last:
                handed.call.over()


class GraphPiece:
    """A graph of Dynamo's. A call runs the variant for its arguments, which is made if there is none yet."""

    def __init__(self, owner: Owner, module: fx.GraphModule, break_reason: str):
        self.owner, self.break_reason = owner, break_reason
        self.does = hash(tuple((node.op, str(node.target)) for node in module.graph.nodes))
        """A hash that is equal for graphs that differ only in sizes."""
        self._module = module
        self._numbers = number_places(module)
        """Positions of arguments that are numbers, or tensors that represent a number of the caller's."""
        self._variants: dict[Any, Variant] = {}  # any: see kind_of
        self.first = (0, "")
        """The call in which it first ran, and the shapes of its arguments then."""
        self._lock = threading.RLock()

    def __call__(self, *arguments: Any) -> Any:
        """Run the graph and return its results."""
        variant = self.variant(arguments)
        if variant.is_eager:
            return variant.run(*arguments)
        passed = variant.arguments.passed(arguments)
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):  # others' hooks would replace the ticket
            return variant.run(*passed)

    def devices(self) -> set[torch.device]:
        """Return the devices of its arguments so far."""
        with self._lock:
            return {device for variant in self._variants.values() for device in variant.arguments.devices}

    def variant(self, arguments: Sequence[Any]) -> Variant:
        """Return the variant for such arguments."""
        kind = kind_of(arguments, self._numbers)
        with self._lock:
            variant = self._variants.get(kind)
        if variant is None:
            self._warn_of_numbers(kind)
            with generators_held(), gate.tracing(), _dynamo.compiling_alone():
                variant = self._compiled(arguments)
        with self._lock:
            self._variants.pop(kind, None)
            self._variants[kind] = variant  # the most recently used last
            while len(self._variants) > _MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
        return variant

    def _warn_of_numbers(self, kind: Any) -> None:
        """Warn once if a float changes from call to call, since each value is traced anew."""
        floats = floats_of(kind)
        with self._lock:
            num_alike = sum(without_floats(key) == without_floats(kind) for key in self._variants) if floats else 0
        if num_alike == _MANY_NUMBERS:
            warn(
                f"a float among the arguments of a compiled step had a different value in each of {num_alike + 1} "
                f"calls, the last {floats[0]:g}. Every new value is traced and planned again, which is slow. Pass a "
                f"tensor instead: torch.tensor({floats[0]:g})",
                PenstockWarning,
            )

    def _warn_of_pieces(self, shapes: str) -> None:
        """Warn once if Dynamo traces again and again although no shape changed."""
        self.first = (self.owner.num_calls, shapes)
        calls = {piece.first[0] for piece in self.owner.pieces if piece.does == self.does and piece.first[1] == shapes}
        if len(calls) == _MANY_NUMBERS and not self.owner.has_warned_of_pieces:
            self.owner.has_warned_of_pieces = True
            warn(
                f"in {len(calls)} calls a step was traced and planned again for the same shapes, which is slow: "
                "something other than a tensor changes between calls, such as a counter that forward reads. "
                "TORCH_LOGS=recompiles shows what changes. Keep it in a buffer, or out of forward",
                PenstockWarning,
            )

    def _compiled(self, arguments: Sequence[Any]) -> Variant:
        variant = Variant(self, KnownArguments.of(arguments, self._numbers))
        if not self._variants:
            self._warn_of_pieces(variant.arguments.shapes)
        try:
            try:
                self._capture(variant, arguments)
            except AssertionError:  # raised by PyTorch if a graph changes an input of which others are views
                variant.arguments = variant.arguments.each_once()
                self._capture(variant, arguments)
        except Exception as error:  # operators, subclasses and changes of arguments that PyTorch cannot trace raise any
            is_told = (isinstance(error, PenstockError) or _is_ours(error)) and not isinstance(error, CaptureError)
            if is_told or isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise
            is_known = isinstance(error, (CaptureError, *_aot.cannot_trace()))
            if not self.owner.has_rest or (_dynamo.is_untested() and not is_known):
                raise _refusal(error) from error
            variant.run, variant.is_eager = self._module.forward, True
            self.owner.left_eager(_why(error))
        return variant

    def _capture(self, variant: Variant, arguments: Sequence[Any]) -> None:
        module = for_arguments(self._module, arguments, variant.arguments.times)
        variant.recipes = keep_whole(module.graph)
        module.recompile()
        inputs, groups = variant.arguments.passed(arguments), variant.arguments.repeated()
        held, lent = weakref.ref(variant), [inputs]  # PyTorch keeps what it compiled, and its functions

        def partition(joint: fx.GraphModule, num_forward_outputs: int) -> None:
            variant = _alive(held)
            owner = variant.piece.owner
            _capture.tag_backward(joint.graph)
            _capture.separate_sums(joint.graph, num_forward_outputs, groups)
            if owner.adds_gradients:
                _capture.accumulate_early(joint.graph, num_forward_outputs, lent[0])
            if not owner.is_functional:
                add_in_place(joint.graph)
            variant.captured = _capture.read(joint, num_forward_outputs)
            variant.problem = owner.describe(variant)

        def forward(arguments: list[Any]) -> Any:
            return _alive(held).forward(arguments)

        def without_gradients(module: fx.GraphModule) -> _aot.Runner:
            return _without_gradients(module, held)

        variant.run = _aot.compiled(module, inputs, partition, forward, _backward, without_gradients)
        lent.clear()


def _without_gradients(module: fx.GraphModule, held: "weakref.ref[Variant]") -> _aot.Runner:
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = function_of(node)
    run = _aot.boxed(module)

    def runner(arguments: list[Any]) -> Any:
        if _alive(held).piece.owner.is_rehearsing:
            arguments.clear()
            raise RehearsalOver
        with gate.computing():
            return run(arguments)

    return _aot.boxed_function(runner)


class _OnlyOnce(torch.autograd.Function):
    """A gradient that has no gradients itself. PyTorch 2.13 takes care of that."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:  # noqa: ARG004
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")


def _only_once(gradient: Any) -> Any:
    if not isinstance(gradient, torch.Tensor) or not gradient.is_floating_point():
        return gradient
    return _OnlyOnce.apply(torch.zeros((), requires_grad=True), gradient)  # type: ignore[no-untyped-call]


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class RehearsalOver(Exception):
    """The end of a rehearsal: a step was captured and planned, and would run now."""


def _alive(held: "weakref.ref[Variant]") -> Variant:
    variant = held()
    assert variant is not None  # its caller holds it
    return variant


def _apart(saved: list[Any], results: Iterable[Any]) -> list[Any]:
    """Return saved values, as aliases if they share memory with a result.

    The result will refer to backward, and so to the saved values.
    """
    storages = {storage_of(result)[0] for result in results}
    return [value.detach() if storage_of(value)[0] in storages else value for value in saved]


def _refusal(error: Exception) -> CaptureError:
    """Return the error for a step that is not captured, and must be."""
    if isinstance(error, CaptureError):
        return error
    if isinstance(error, _aot.cannot_trace()):
        return CaptureError(
            "the step reads the value of a tensor, or creates a tensor whose shape depends on values, so it cannot be "
            f"planned before these values are known: {_why(error)}"
        )
    newer = (
        f", which is newer than the versions that plans are tested with ({_dynamo.TESTED}). Please report it; an older "
        "PyTorch works"
    )
    return CaptureError(
        f"the step could not be captured by PyTorch {torch.__version__}{newer if _dynamo.is_untested() else ''}: "
        f"{_why(error)}. Train it with penstock.remat.compile(step, budget=...), which runs such parts eagerly"
    )


def _is_ours(error: Exception) -> bool:
    """Whether Penstock itself raised an error, as for a directory that cannot be used."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__", "").startswith("penstock.")


def _why(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{text} ({type(error).__name__})"
