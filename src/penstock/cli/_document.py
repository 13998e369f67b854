"""A user's YAML or JSON file, checked against a pydantic model; every error names file, line and key.

Scalars follow YAML 1.2: ``1e-4`` is a number, ``no`` is text. Tags cannot build objects.
"""

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from penstock.arguments import warn_renamed
from penstock.files import read_text
from penstock.units import parse_bytes

_PAIR = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_Model = TypeVar("_Model", bound=BaseModel)
_KINDS = ("null", "bool", "int", "float", "str", "timestamp", "merge", "value", "seq", "map")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _KINDS}
_MOST_VALUES = 1_000_000
_MOST_DIGITS = 1000
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)


def say_renamed(old: str, new: str) -> None:
    """Show a warning about an earlier name. Python hides it elsewhere, unless a script has used the name."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", DeprecationWarning)
        warn_renamed(old, new)


class Strict(BaseModel):
    """A mapping in a file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The content of a file that was read."""

    path: Path
    """The path as the user gave it."""
    data: Any  # whatever stands there
    """The content: dictionaries, lists, numbers, text."""
    node: yaml.Node | None
    """The same content with line numbers; ``None`` for an empty file."""

    def error(self, keys: Sequence[str | int], message: str) -> ValueError:
        """Return an error that says what is wrong at ``keys``, with file and line."""
        line, known_keys = self._find(keys)
        return ValueError(
            ", ".join(filter(None, (str(self.path), f"line {line}", _dotted(known_keys)))) + f": {message}"
        )

    def check(self, model: type[_Model]) -> _Model:
        """Return the data as ``model``. Raises ``ValueError`` with a line per fault."""
        if not isinstance(self.data, dict):
            what = "the file is empty" if self.data is None else f"got a {type(self.data).__name__}"
            keys = (
                f"{name}{' (required)' if field.is_required() else ''}" for name, field in model.model_fields.items()
            )
            raise ValueError(f"{self.path} must hold keys with values, {what}; the keys are {', '.join(keys)}")
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            faults = [self._explain(fault, model) for fault in error.errors(include_url=False)]
            raise ValueError("\n".join(str(fault) for fault in faults)) from None

    def _explain(self, fault: ErrorDetails, model: type[BaseModel]) -> ValueError:
        keys = fault["loc"]
        if fault["type"] == "missing":
            return self.error(keys[:-1], f"{keys[-1]} is missing")
        return self.error(keys, message_of(fault, model))

    def _find(self, keys: Sequence[str | int]) -> tuple[int, list[str | int]]:
        """Return the line, from 1, and those of ``keys`` that are in the file; pydantic adds marks that are not."""
        node, line, known_keys = self.node, 1, []
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                pairs = [(name, value) for name, value in node.value if name.value == key]
                if not pairs:
                    continue
                line, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
                line = node.start_mark.line + 1
            else:
                continue
            known_keys.append(key)
        return line, known_keys


def _joined(pair: re.Match[str]) -> str:
    """Return the character that JSON writes as a surrogate pair."""
    return json.loads(f'"{pair[0]}"')  # type: ignore[no-any-return]


def read(path: Path) -> Document:
    """Read a file. Raises ``OSError``, and ``ValueError`` with the line if it is not valid YAML."""
    text = read_text(path)
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not
        text = _PAIR.sub(_joined, text)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return Document(path=path, data=None if node is None else _value(node, [_MOST_VALUES]), node=node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply to be read") from None


def value_of(text: str) -> Any:  # numbers, text, lists: what a file may hold
    """Return the value that ``text`` would have in a file. Raises ``ValueError`` if it is not valid there."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if node is None else _value(node, [_MOST_VALUES])
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f"{text!r} is no value; quote it: '\"{text}\"'") from None


def message_of(fault: ErrorDetails, model: type[BaseModel]) -> str:
    """Return a fault that pydantic found, in our words."""
    if fault["type"] == "extra_forbidden":
        known = _model_at(model, fault["loc"][:-1]).model_fields
        return f"there is no such key; there are {', '.join(known)}"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    value = fault["input"]
    is_told = fault["type"] == "value_error" or isinstance(value, dict | list)
    return message if is_told else f"{message}, not {value!r}"


def to_bytes(value: object) -> object:
    """Convert ``"200MiB"``, ``4e8`` or a whole number to bytes, for pydantic."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return parse_bytes(value)  # type: ignore[arg-type]  # it checks
    except TypeError as error:
        raise ValueError(str(error)) from None


def _value(node: yaml.Node, left: list[int], above: tuple[yaml.Node, ...] = ()) -> Any:  # whatever stands there
    """Return the value of a node. ``left`` counts the values that may still follow, since repeated aliases multiply."""
    left[0] -= 1
    if left[0] < 0:
        raise yaml.MarkedYAMLError(problem=f"there are more than {_MOST_VALUES:,} values", problem_mark=node.start_mark)
    if node.tag not in _TAGS:
        raise yaml.MarkedYAMLError(problem=f"{node.tag} is not read here", problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node) if node.style is None else node.value
    if any(ancestor is node for ancestor in above):
        raise yaml.MarkedYAMLError(problem="this stands inside of itself", problem_mark=node.start_mark)
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, left, above) for item in node.value]
    mapping: dict[Any, Any] = {}
    for name, value in node.value:
        key = _value(name, left) if isinstance(name, yaml.ScalarNode) else None
        if not isinstance(key, str) or key in mapping:
            why = f"{key} stands there twice" if isinstance(key, str) else "a key is text"
            raise yaml.MarkedYAMLError(problem=why, problem_mark=name.start_mark)
        mapping[key] = _value(value, left, above)
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:  # None, bool, int, float or str
    text = node.value
    if len(text) > _MOST_DIGITS and (_INTEGER.fullmatch(text) or _FLOAT.fullmatch(text)):
        raise yaml.MarkedYAMLError(problem=f"a number of {len(text)} digits", problem_mark=node.start_mark)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return float(text.replace(".", "")) if _INFINITE.fullmatch(text) else text


def _dotted(keys: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _model_at(model: type[BaseModel], keys: Sequence[str | int]) -> type[BaseModel]:
    """Return the model of the mapping at ``keys``."""
    for key in keys:
        if key in model.model_fields:
            model = _model_in(model.model_fields[str(key)].annotation) or model
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in models if model is not None), None)
