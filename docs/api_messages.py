"""Every message that the library raises or warns with, as tables by room, read from its source."""

import ast
from collections.abc import Iterator
from pathlib import Path

_LEFT_OUT = ("InternalError", "AssertionError", "AttributeError")
"""Our own bugs, what assertions of `testing` say, and what Python's own protocols ask for."""


def tables(source: Path) -> str:
    """Return a heading and a table of errors and messages for each room, with three dots for the values in messages."""
    by_room: dict[str, set[tuple[str, str]]] = {}
    for file in sorted(source.rglob("*.py")):
        room = file.relative_to(source).parts[0].removesuffix(".py")
        by_room.setdefault(room, set()).update(messages(file))
    parts = []
    for room, result in sorted(by_room.items()):
        if result:
            rows = [f"| `{name}` | {_cell(text)} |" for name, text in sorted(result, key=lambda pair: pair[::-1])]
            parts += [f"## Messages of {room}", "\n".join(["| raises | message |", "|---|---|", *rows])]
    return "\n\n".join(parts)


def messages(file: Path) -> Iterator[tuple[str, str]]:
    """Return the class and message of everything that a file raises or warns with, if the message is written there."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and node.args:
            name, text = ast.unparse(node.func).rpartition(".")[2], _text(node.args[0])
            if name == "warn" and len(node.args) > 1:
                name = ast.unparse(node.args[1])
            if text and name.endswith(("Error", "Warning")) and name not in _LEFT_OUT:
                yield name, text


def _text(node: ast.expr) -> str:
    """Return the text of a message, with three dots for values; empty if it is nothing but values."""
    if isinstance(node, ast.JoinedStr):
        result = "".join(str(value.value) if isinstance(value, ast.Constant) else "..." for value in node.values)
    else:
        result = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return result if any(part.isalpha() for part in result) else ""


def _cell(text: str) -> str:
    """Return the text of a table's cell that is shown literally."""
    for mark in "\\`*_<>[]|{}":
        text = text.replace(mark, f"&#{ord(mark)};")
    return " ".join(text.split())
