"""Loading of user functions by location: ``file.py:function`` or ``package.module:function``."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.cli._fault import Misuse, named
from penstock.errors import PenstockError

_NOWHERE = Path()


def function_of(target: str, what: str, returns: str, folder: Path = _NOWHERE) -> Callable[..., Any]:
    """Return the function that ``target`` names; a relative path of a file starts at ``folder``.

    ``what`` and ``returns`` describe the function in errors: ``"makes the step"``, ``"() returns a step"``. The file
    can import modules next to it, as with ``python file.py``; a module can import from the current directory.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise Misuse(
            f"{target!r} does not say which function {what}: give FILE.py:FACTORY or MODULE:FACTORY, where "
            f"FACTORY{returns}"
        )
    module = _module_in(folder / where) if where.endswith(".py") else _module_named(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise PenstockError(f"{where} has no function {name}")
    return function  # type: ignore[no-any-return]


def called(target: str, function: Callable[..., Any], **parameters: Any) -> Any:  # any: a user's function
    """Call ``function``. Its exceptions become a ``PenstockError`` that says where; ours are raised unchanged."""
    _, why = misfit_of(function, parameters)
    if why:
        raise PenstockError(f"{target} {why}")
    shown = f"{target}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})"
    with _guarded(f"{shown} failed"):
        return function(**parameters)


def misfit_of(function: Callable[..., Any], parameters: Iterable[str]) -> tuple[str | None, str]:
    """Return the parameter that ``function`` does not know, and why it cannot be called; ``(None, "")`` if it can."""
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # built in
        return None, ""
    names = [
        name
        for name, parameter in takes.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.parameters.values())
    for name in parameters:
        if name not in names and not takes_any:
            return name, f"takes {', '.join(names) or 'nothing'}, not {name}"
    try:
        takes.bind(**dict.fromkeys(parameters))
    except TypeError as error:
        return None, f"cannot be called: {error}"
    return None, ""


def shown_kind(value: object) -> str:
    """Describe a wrong return value in an error, such as ``"a tuple of 3 (Linear, Tensor, int)"``."""
    if isinstance(value, tuple | list):
        kinds = ", ".join(type(item).__name__ for item in value[:4]) + (", ..." if len(value) > 4 else "")
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    return "nothing" if value is None else f"a {type(value).__name__}"


@contextmanager
def _guarded(said: str) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except SystemExit as error:
        why = "; what only runs as a script belongs under `if __name__ == '__main__':`"
        raise PenstockError(f"{said}: it ended the process with {error.code!r}{why}") from error
    except Exception as error:
        raise PenstockError(f"{said}: {named(error)}") from error


def _module_in(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise PenstockError(f"there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _find_beside(file.resolve().parent)
    with _guarded(f"{file} cannot be loaded"):
        spec.loader.exec_module(module)
    return module


def _module_named(name: str) -> ModuleType:
    _find_beside(Path.cwd())
    with _guarded(f"{name} cannot be loaded"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise PenstockError(f"there is no module {name} ({error})") from error
            raise


def _find_beside(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
