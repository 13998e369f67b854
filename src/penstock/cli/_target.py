"""Functions by where they are: ``file.py:function`` or ``package.module:function``."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import PenstockError

_NOWHERE = Path()


def function_of(target: str, what: str, returns: str, folder: Path = _NOWHERE) -> Callable[..., Any]:
    """The function that ``target`` names; a relative file lies in ``folder``.

    ``what`` and ``returns`` say in an error what the function is for: ``"makes the step"``, ``"() returns a step"``.
    What lies beside the file, or for a module in the current directory, can be imported, as with ``python file.py``.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise PenstockError(
            f"{target!r} does not say which function {what}: give FILE.py:FACTORY or MODULE:FACTORY, where "
            f"FACTORY{returns}"
        )
    module = _module_in(folder / where) if where.endswith(".py") else _module_named(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise PenstockError(f"{where} has no function {name}")
    return function  # type: ignore[no-any-return]


def _module_in(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise PenstockError(f"there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _find_beside(file.resolve().parent)
    spec.loader.exec_module(module)
    return module


def _module_named(name: str) -> ModuleType:
    _find_beside(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise PenstockError(f"there is no module {name} ({error})") from error


def _find_beside(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
