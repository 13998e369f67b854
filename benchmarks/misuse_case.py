"""One misuse: the call, and the judgement of its outcome."""

import copy
import inspect
import linecache
import os
import pickle
import re
import signal
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from benchmarks.misuse_table import (
    RECORDS,
    ROOMS,
    SCENES,
    USES,
    Arguments,
    Told,
    Use,
    Wrong,
    public_methods,
    public_names,
    public_properties,
)
from benchmarks.misuse_theirs import ACCEPTED, ENDLESS, THEIRS, reason_for
from benchmarks.misuse_values import POOL, QUICK, annotations_of, fits
from benchmarks.soak_case import Case
from penstock.errors import InternalError, PenstockError

SOURCE = str(Path(penstock.__file__).parent)
OUTCOMES = ("right", "our error", "their error")
"""Outcomes that are as they should be."""
FAULTS = ("raw", "silent", "wrong number", "leak", "outside", "crash", "hang")
"""Outcomes that are not. Silent: a value of a type that the annotation excludes was accepted without an error."""
_HELPS = re.compile(
    r"must|expected|such as|penstock\.|[Gg]ive |[Uu]se |[Mm]ake |[Rr]ead |[Cc]all |cannot|pip install|not |\w\(.*\)"
)
"""Words in a message that says what works, or shows a call."""

WORKS = ": as it should be"
"""The suffix of names of cases in which nothing is wrong."""
_RAW = ("AttributeError", "KeyError", "IndexError", "AssertionError", "ZeroDivisionError", "NameError", "InternalError")
"""Errors that are never raised on purpose."""


@dataclass(frozen=True, slots=True)
class Misuse:
    """A case of the campaign."""

    room: str
    name: str
    """The name with which a case is shown and can be run again."""
    run: Callable[[Case], object]
    """Runs the misuse. Its error is judged."""
    public: str = ""
    """The public name, as in its table."""
    parameter: str = ""
    """The argument that is wrong; empty if the order or the sharing is wrong."""
    value: str = ""
    """The label of the wrong value in the pool."""
    is_excluded: bool = False
    """Whether the annotation excludes the value, so that accepting it counts as silent."""


def misuses(*, quick: bool = False, rooms: tuple[str, ...] = ROOMS) -> Iterator[Misuse]:
    """Return all cases, room by room."""
    for room in rooms:
        for name, value in public_names(room).items():
            full = f"{room}.{name}"
            if full in USES:
                yield from _of_use(room, full, USES[full], value, QUICK if quick else tuple(POOL))
            elif full in RECORDS:
                yield from _of_record(room, full, RECORDS[full])
        for title, call in SCENES.items():
            if title.startswith(f"{room}: "):
                yield Misuse(room, title, call)


def _of_use(room: str, full: str, use: Use, value: Any, labels: tuple[str, ...]) -> Iterator[Misuse]:
    if not use.made_by:
        yield Misuse(room, f"{full}{WORKS}", _called(use))
        yield from _of_arguments(room, full, use, labels)
    if not inspect.isclass(value):
        return
    methods = [method for method in public_methods(value) if method not in use.skips]
    for method in methods:
        good = use.methods.get(method, lambda _: {})
        yield from _of_method_arguments(room, full, use, value, method, good, labels)
        yield from _of_order(room, full, use, method, good)
    for name in public_properties(value):
        if name not in use.skips:
            yield from _of_order(room, full, use, name, None)
    yield from _of_copies(room, full, use)
    if "__enter__" in dir(value):
        yield from _of_contexts(room, full, use)


def _called(use: Use, parameter: str = "", label: str = "") -> Callable[[Case], object]:
    def run(case: Case) -> object:
        arguments = use.good(case)
        if parameter.startswith("**"):
            arguments[parameter[2:]] = POOL[label]()
        elif parameter:
            arguments[parameter] = (POOL[label](),) if parameter.startswith("*") else POOL[label]()
        return use.check(invoke(use.call, arguments), arguments)

    return run


def invoke(call: Callable[..., Any], arguments: Arguments) -> Any:
    """Call with keyword arguments, except for positional-only ones."""
    places, keywords = [], dict(arguments)
    for parameter in parameters_of(call):
        if parameter.kind is parameter.VAR_POSITIONAL:
            places += keywords.pop(f"*{parameter.name}", ())
        elif (
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.name in keywords
        ):
            places.append(keywords.pop(parameter.name))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
    return call(*places, **keywords)


def parameters_of(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return parameters of a function, or of a class's own ``__init__`` if another library's ``__new__`` hides it."""
    if inspect.isclass(call) and inspect.isfunction(call.__init__):
        return list(inspect.signature(call.__init__).parameters.values())[1:]
    return list(inspect.signature(call).parameters.values())


def _parameters(call: Callable[..., Any], good: Arguments) -> list[str]:
    names = []
    for parameter in parameters_of(call):
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.append(f"*{parameter.name}")
        elif parameter.kind is parameter.VAR_KEYWORD:
            names.append("**potatoes")
        elif not parameter.name.startswith("_"):
            names.append(parameter.name)
    return [*names, *(name for name in good if name not in names)]


def _of_arguments(room: str, full: str, use: Use, labels: tuple[str, ...]) -> Iterator[Misuse]:
    hints = annotations_of(use.call)
    for parameter in _parameters(use.call, {}):
        for label in labels if not parameter.startswith("**") else labels[:1]:
            if (full, parameter, label) not in ENDLESS:
                yield Misuse(
                    room, f"{full}({parameter}={label})", _called(use, parameter, label), full,
                    parameter.lstrip("*"), label, not fits(hints.get(parameter.lstrip("*"), Any), POOL[label]()),
                )  # fmt: skip


def _of_method_arguments(
    room: str, full: str, use: Use, kind: type, method: str, good: Callable[[Any], Arguments], labels: tuple[str, ...]
) -> Iterator[Misuse]:
    function = inspect.getattr_static(kind, method)
    function = function.__func__ if isinstance(function, classmethod | staticmethod) else function
    hints = annotations_of(function)
    names = _parameters(function, {})
    is_static = isinstance(inspect.getattr_static(kind, method), staticmethod)
    for parameter in names if is_static else names[1:]:
        for label in labels if not parameter.startswith("**") else labels[:1]:

            def run(case: Case, parameter: str = parameter, label: str = label) -> object:
                arguments = use.good(case)
                owner = invoke(use.call, arguments)
                values = good(owner)
                if parameter.startswith("**"):
                    values["potatoes"] = POOL[label]()
                else:
                    values[parameter] = (POOL[label](),) if parameter.startswith("*") else POOL[label]()
                try:
                    _exhaust(invoke(getattr(owner, method), values))
                finally:
                    use.close(owner)
                return None

            public = f"{full}.{method}"
            if (public, parameter, label) not in ENDLESS:
                excluded = not fits(hints.get(parameter.lstrip("*"), Any), POOL[label]())
                yield Misuse(
                    room, f"{public}({parameter}={label})", run, public, parameter.lstrip("*"), label, excluded
                )


def _exhaust(result: Any) -> Any:
    """Enter and iterate the result, so that it cannot fail later."""
    if isinstance(result, types.GeneratorType):
        return [item for item, _ in zip(result, range(100), strict=False)]
    if hasattr(result, "__enter__") and type(result).__module__ in ("contextlib", "_contextlib"):
        with result:
            return None
    return result


def _of_order(room: str, full: str, use: Use, method: str, good: Callable[[Any], Arguments] | None) -> Iterator[Misuse]:
    def ask(owner: Any) -> object:
        attribute = getattr(owner, method)
        return attribute if good is None else _exhaust(invoke(attribute, good(owner)))

    def made(case: Case) -> tuple[Any, Arguments]:
        arguments = use.good(case)
        return invoke(use.call, arguments), arguments

    def first(case: Case) -> object:
        owner, _ = made(case)
        try:
            return ask(owner)
        finally:
            use.close(owner)

    def twice(case: Case) -> object:
        owner, _ = made(case)
        try:
            ask(owner)
            return ask(owner)
        finally:
            use.close(owner)

    def closed(case: Case) -> object:
        owner, _ = made(case)
        use.close(owner)
        try:
            return ask(owner)
        finally:
            use.close(owner)

    def elsewhere(case: Case) -> object:
        owner, _ = made(case)
        try:
            in_thread(lambda: ask(owner))
        finally:
            use.close(owner)
        return None

    def forked(case: Case) -> object:
        owner, _ = made(case)
        try:
            in_child(lambda: ask(owner))
        finally:
            use.close(owner)
        return None

    yield Misuse(room, f"{full}.{method}: at once", first)
    yield Misuse(room, f"{full}.{method}: in another thread", elsewhere)
    yield Misuse(room, f"{full}.{method}: in a forked child", forked)
    if good is not None:
        yield Misuse(room, f"{full}.{method}: twice", twice)
    if hasattr(_kind(full), "close"):
        yield Misuse(room, f"{full}.{method}: after close", closed)


def _kind(full: str) -> Any:
    room, _, name = full.partition(".")
    return public_names(room)[name]


def _of_copies(room: str, full: str, use: Use) -> Iterator[Misuse]:
    ways = {
        "copied": copy.copy, "copied deeply": copy.deepcopy, "pickled": lambda thing: pickle.loads(pickle.dumps(thing)),
    }  # fmt: skip
    for title, way in ways.items():

        def run(case: Case, way: Callable[[Any], Any] = way) -> object:
            arguments = use.good(case)
            owner = invoke(use.call, arguments)
            try:
                other = way(owner)
                if not use.made_by:
                    use.check(other, arguments)
            finally:
                use.close(owner)
            return None

        yield Misuse(room, f"{full}: {title}", run)

    def used_after_a_copy_closed(case: Case) -> object:
        arguments = use.good(case)
        owner = invoke(use.call, arguments)
        other = copy.copy(owner)
        use.close(other)
        return use.check(owner, arguments)

    def deleted(case: Case) -> object:
        invoke(use.call, use.good(case))
        return None

    if hasattr(_kind(full), "close"):
        yield Misuse(room, f"{full}: a copy is closed, and it is used", used_after_a_copy_closed)
        yield Misuse(room, f"{full}: dropped without close", deleted)


def _of_contexts(room: str, full: str, use: Use) -> Iterator[Misuse]:
    def in_itself(case: Case) -> object:
        owner = invoke(use.call, use.good(case))
        try:
            with owner, owner:
                pass
        finally:
            use.close(owner)
        return None

    def in_another(case: Case) -> object:
        first = invoke(use.call, use.good(case))
        try:
            second = invoke(use.call, use.good(case))
            try:
                with first, second:
                    pass
            finally:
                use.close(second)
        finally:
            use.close(first)
        return None

    def left_unentered(case: Case) -> object:
        owner = invoke(use.call, use.good(case))
        try:
            owner.__exit__(None, None, None)
        finally:
            use.close(owner)
        return None

    def entered_closed(case: Case) -> object:
        owner = invoke(use.call, use.good(case))
        use.close(owner)
        with owner:
            return None

    def closed_inside(case: Case) -> object:
        owner = invoke(use.call, use.good(case))
        with owner:
            use.close(owner)

    def in_two_threads(case: Case) -> object:
        owner = invoke(use.call, use.good(case))

        def enter() -> None:
            with owner:
                pass

        try:
            with owner:
                in_thread(enter)
        finally:
            use.close(owner)
        return None

    yield Misuse(room, f"{full}: entered inside of itself", in_itself)
    yield Misuse(room, f"{full}: entered inside of another", in_another)
    yield Misuse(room, f"{full}: left without being entered", left_unentered)
    yield Misuse(room, f"{full}: entered after close", entered_closed)
    yield Misuse(room, f"{full}: closed inside of itself", closed_inside)
    yield Misuse(room, f"{full}: entered by two threads", in_two_threads)


def _of_record(room: str, full: str, make: Callable[[], Any]) -> Iterator[Misuse]:
    def again(way: Callable[[Any], Any]) -> Callable[[Case], object]:
        def run(_: Case) -> object:
            thing = make()
            other = way(thing)
            shown = [re.sub(" at 0x[0-9a-f]+", "", str(thing)) for thing in (thing, other)]
            if type(other) is not type(thing) or shown[0] != shown[1]:
                raise Wrong(f"{other} instead of {thing}")
            return repr(other), other == thing

        return run

    yield Misuse(room, f"{full}: copied", again(copy.copy))
    yield Misuse(room, f"{full}: copied deeply", again(copy.deepcopy))
    yield Misuse(room, f"{full}: pickled", again(lambda thing: pickle.loads(pickle.dumps(thing))))


def in_thread(call: Callable[[], object]) -> None:
    """Call in another thread, and raise here the error that it raised there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class InChild(Exception):
    """The error of a forked child: its outcome and its text."""


def in_child(call: Callable[[], object]) -> None:
    """Call in a forked child, and raise here the error from there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            signal.alarm(8)
            outcome, text = "right", ""
            try:
                call()
            except BaseException as error:
                outcome, text = judged(error, "", "")
            os.write(writing, f"{outcome}\n{text}"[:3000].encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kind = "hang" if os.WTERMSIG(status) == signal.SIGALRM else "crash"
        raise InChild(kind, f"the child ended by signal {os.WTERMSIG(status)}")
    outcome, _, text = said.partition("\n")
    if outcome != "right":
        raise InChild(outcome or "crash", text)


def judged(error: BaseException, public: str, parameter: str) -> tuple[str, str]:
    """Return the outcome for an error, and its text."""
    if isinstance(error, InChild):
        return error.args[0], error.args[1]
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Wrong):
        return "wrong number", text
    if isinstance(error, PenstockError) and not isinstance(error, ValueError | TypeError | InternalError):
        return "our error", text
    if isinstance(error, Told):
        kind = str(error).partition(":")[0]
        told = kind.endswith("Error") and kind not in _RAW and _HELPS.search(str(error))
        return ("our error" if told else "raw", str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    is_ours = frame.filename.startswith(SOURCE)
    where = f"{text}\n  at {frame.filename.rpartition('/src/')[2]}:{frame.lineno}: {line}"
    reason = reason_for(error, public, parameter)
    if isinstance(error, InternalError) and not reason:
        return "raw", where
    named = (
        not parameter
        or re.search(rf"\b{re.escape(parameter)}\b", str(error).replace(" ", "_"))
        or (
            re.search(rf"\b{re.escape(parameter)}\b", str(error))
            or re.search(rf"\b{parameter.rstrip('s')}", str(error))
        )
    )
    kinds = (PenstockError, ValueError, TypeError, IndexError, KeyError, ImportError, OSError, NotImplementedError)
    if reason:
        return "their error", f"{text} ({reason})"
    if is_ours and line.startswith("raise") and isinstance(error, kinds) and not isinstance(error, InternalError):
        return ("our error", text) if named or _HELPS.search(str(error)) else ("raw", f"names no argument: {where}")
    if isinstance(error, AssertionError) and "testing" in frame.filename and line.startswith("raise"):
        return "our error", text
    return "raw", where


def outcome_of(misuse: Misuse, case: Case) -> tuple[str, str]:
    """Run a misuse and judge its outcome."""
    try:
        misuse.run(case)
    except BaseException as error:
        outcome, text = judged(error, misuse.public, misuse.parameter)
        is_misused = not misuse.name.endswith(WORKS)
        return (outcome, text) if is_misused else ("raw", f"the working call of its table does not work: {text}")
    if misuse.is_excluded and (misuse.public, misuse.parameter) not in ACCEPTED:
        return "silent", f"{misuse.parameter}={misuse.value} was taken without a word"
    return "right", ""


__all__ = ["FAULTS", "OUTCOMES", "THEIRS", "Misuse", "in_child", "in_thread", "judged", "misuses", "outcome_of"]
