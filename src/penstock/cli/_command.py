"""The parts that all commands share: ``--json``, ``--debug``, progress, exit codes, and errors without tracebacks.

A command is a function that returns an `Answer`. This module adds the shared options, registers the command, and turns
every exception that it raises into one paragraph.
"""

import contextlib
import functools
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.models import ArgumentInfo, OptionInfo

from penstock.cli._answer import Answer, ExitCode, as_json
from penstock.cli._fault import exit_code_of, explain
from penstock.cli._paths import PathUse
from penstock.cli._progress import Steps
from penstock.native import tell_what_is_slower
from penstock.units import parse_bytes

DEBUG = "penstock.debug"
"""The key under which a context keeps whether ``--debug`` stood before the command."""

_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead, and nothing else.")]


class Interrupted(KeyboardInterrupt):
    """A `KeyboardInterrupt` whose message says what to do next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """A parameter of a command that names a path."""

    parameter: str
    option: str
    use: PathUse
    default: object

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ``PenstockError`` if the command cannot use the given path. Defaults are not checked."""
        path = given[self.parameter]
        if path is not None and path != self.default:
            self.use.check(self.option, Path(path))


def command(app: typer.Typer, *, trains: bool = False) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Register a function on ``app``. Its first parameter is the `Steps` of its progress; the others are arguments.

    ``trains``: it plans or trains, itself or in child processes. Without a C compiler, its first line then says what is
    slower on this machine.
    """

    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        own = list(inspect.signature(function).parameters.values())[1:]
        uses = list(_uses_of(own))

        @functools.wraps(function)
        def run(*, _context: typer.Context, as_json: bool, debug: bool, **given: Any) -> None:
            name = f"penstock {_context.command_path.partition(' ')[2]}"
            if trains:
                tell_what_is_slower(_note)
            call = _CommandRun(name, wants_json=as_json, is_debugged=debug or bool(_context.meta.get(DEBUG)))
            call(function, given, uses)

        added = {"_context": typer.Context, "as_json": _Json, "debug": _Debug}
        kind = inspect.Parameter.KEYWORD_ONLY
        extra = [
            inspect.Parameter(
                name, kind, annotation=what, default=inspect.Parameter.empty if name == "_context" else False
            )
            for name, what in added.items()
        ]
        run.__signature__ = inspect.Signature([*(parameter.replace(kind=kind) for parameter in own), *extra])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in own} | added
        told = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        app.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in told))(run)
        return function

    return register


def _uses_of(parameters: Iterable[inspect.Parameter]) -> Iterator[_Path]:
    for parameter in parameters:
        marks = getattr(parameter.annotation, "__metadata__", ())
        for use in (mark for mark in marks if isinstance(mark, PathUse)):
            (info,) = (mark for mark in marks if isinstance(mark, OptionInfo | ArgumentInfo))
            option = parameter.name.upper()
            if isinstance(info, OptionInfo):
                own = (name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str))
                option = next(own, f"--{parameter.name.replace('_', '-')}")
            yield _Path(parameter=parameter.name, option=option, use=use, default=parameter.default)


def size(text: str) -> int:
    """Parse the size of an option, such as ``"6GiB"``, to bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _note(text: str) -> None:
    Console(stderr=True).print(f"[bold yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence a logger: PyTorch logs the traceback of an error that it also raises."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """Redirect the standard output's file descriptor to standard error, for output from outside of Python's streams."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class _CommandRun:
    """One call of a command."""

    def __init__(self, name: str, *, wants_json: bool, is_debugged: bool):
        self._name, self._wants_json, self._is_debugged = name, wants_json, is_debugged

    def __call__(self, function: Callable[..., Answer], given: dict[str, Any], paths: Sequence[_Path]) -> None:
        try:
            answer = self._answer(function, given, paths)
            if self._wants_json:
                typer.echo(as_json(answer.data))
            else:
                answer.show(Console())
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):  # the last: `| head` stopped reading
            raise
        except KeyboardInterrupt as interrupt:
            self._end(interrupt, str(interrupt) or f"{self._name}: interrupted.", ExitCode.INTERRUPTED)
        except Exception as error:
            self._end(error, explain(error, self._name), exit_code_of(error))
        if answer.exit_code:
            raise typer.Exit(int(answer.exit_code))

    def _answer(self, function: Callable[..., Answer], given: dict[str, Any], paths: Sequence[_Path]) -> Answer:
        """Run the function. With ``--json``, output of the user's code and child processes goes to standard error."""
        with contextlib.ExitStack() as stack:
            steps = stack.enter_context(Steps(is_wanted=not self._wants_json))
            if self._wants_json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
                stack.enter_context(_descriptor_redirected())
            if not self._is_debugged:
                stack.enter_context(_quiet(logging.getLogger("torch._subclasses")))
            for path in paths:
                path.check(given)
            return function(steps, **given)

    def _end(self, error: BaseException, message: str, exit_code: ExitCode) -> NoReturn:
        if self._is_debugged:
            traceback.print_exception(error, file=sys.stderr)
        Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        if self._wants_json:
            fault = {"command": self._name, "kind": type(error).__name__, "message": message}
            typer.echo(as_json({"error": {**fault, "exit_code": int(exit_code)}}))
        raise typer.Exit(int(exit_code)) from None
