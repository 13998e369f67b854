"""Pages of the API, made from signatures and docstrings, so that nothing is written twice.

A page for every public module: its map, then every public name with its signature, docstring, fields and methods.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import api_messages

import penstock

_SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Attributes):")


def pages() -> dict[str, str]:
    """Return the Markdown of every page by its name: ``index``, and one for each room."""
    named = sorted(set(re.findall(r"`penstock\.(\w+)", penstock.__doc__ or "")))
    rooms = [module for module in named if importlib.util.find_spec(f"penstock.{module}") is not None]
    return {
        "index": _index(rooms, [module for module in named if module not in rooms]),
        **{room: _page(room) for room in rooms},
    }


def public_names(room: str) -> list[str]:
    """Return the public names of a room, in the order of its map."""
    module = importlib.import_module(f"penstock.{room}")
    if hasattr(module, "__all__"):
        return list(module.__all__)
    tree = _tree(Path(module.__file__ or ""))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [
        alias.asname for node in imports for alias in node.names if alias.asname and not alias.asname.startswith("_")
    ]


def _index(rooms: list[str], others: list[str]) -> str:
    text = _markdown(inspect.getdoc(penstock) or "")
    for room in rooms:
        text = text.replace(f"`penstock.{room}`", f"[`penstock.{room}`]({room}.md)")
    parts = [f"# API\n\n{text}"]
    for name in others:  # names that are at hand without their room, as `penstock.advise`
        value = getattr(penstock, name)
        parts += [f"## `{name}` {{ #{name} }}", _entry(importlib.import_module(value.__module__), value.__name__)]
    return "\n\n".join(parts) + "\n"


def _page(room: str) -> str:
    module = importlib.import_module(f"penstock.{room}")
    names = public_names(room)
    links = {name: f"[`{name}`](#{name})" for name in names}
    parts = [f"# penstock.{room}", _linked(_markdown(inspect.getdoc(module) or ""), links)]
    for name in sorted(names, key=lambda text: (text.lower(), text)):
        parts.append(f"## `{name}` {{ #{name} }}")
        parts.append(_linked(_entry(module, name), {other: link for other, link in links.items() if other != name}))
    if room == "errors":
        parts.append(api_messages.tables(Path(penstock.__file__).parent))
    return "\n\n".join(parts) + "\n"


def _entry(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    home, node = _definition(module, name)
    if isinstance(node, ast.ClassDef):
        return "\n\n".join(_class(value, node))
    if isinstance(node, ast.FunctionDef):
        return "\n\n".join([_code(_signature(node)), _markdown(inspect.getdoc(value) or "")])
    if node is not None:
        after = _string_after(_tree(home).body, node)
        return "\n\n".join([_code(ast.unparse(node)), _markdown(after or inspect.getdoc(value) or "")])
    return "\n\n".join([_code(f"{name}{inspect.signature(value)}"), _markdown(inspect.getdoc(value) or "")])


def _definition(module: ModuleType, name: str) -> tuple[Path, ast.stmt | None]:
    """Return the file and statement that define a public name, followed through imports."""
    file = Path(module.__file__ or "")
    for node in _tree(file).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return file, node
        if isinstance(node, ast.Assign | ast.AnnAssign) and _targets(node) == [name]:
            return file, node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return _definition(importlib.import_module(node.module or ""), original)
    return file, None


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    return [ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def _class(value: Any, node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases if not ast.unparse(base).startswith(("_", "Protocol")))
    starts = next(
        (method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"), None
    )
    takes = _arguments(starts.args, skip_first=True) if starts is not None else []
    yield _code(_call(f"class {node.name}", takes) if takes else f"class {node.name}" + (f"({bases})" if bases else ""))
    yield _markdown(inspect.getdoc(value) or "")
    fields = [*_fields(node.body), *(_attributes(starts.body) if starts is not None else [])]
    if fields:
        yield "\n".join(["| field | type, default | meaning |", "|---|---|---|", *fields])
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            attribute = getattr(value, method.name, None)
            is_property = isinstance(
                inspect.getattr_static(value, method.name, None), property | functools.cached_property
            )
            yield f"### `{node.name}.{method.name}` {{ #{node.name}.{method.name} }}"
            yield _code(_signature(method, skip_first=True, is_property=is_property))
            yield _markdown(inspect.getdoc(attribute) or "")


def _fields(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the fields of a dataclass, or the members of an enumeration, each with the string below it."""
    for node in body:
        if isinstance(node, ast.AnnAssign | ast.Assign):
            name = _targets(node)[0]
            meaning = _string_after(body, node)
            if name.startswith("_") or meaning is None:
                continue
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ast.unparse(node.value)
            default = f" = {ast.unparse(node.value)}" if isinstance(node, ast.AnnAssign) and node.value else ""
            yield _row(name, kind + default, meaning)


def _attributes(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            name = _targets(node)[0]
            meaning = _string_after(body, node)
            if name.startswith("self.") and not name.startswith("self._") and meaning is not None:
                kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
                yield _row(name.removeprefix("self."), kind, meaning)


def _row(name: str, kind: str, meaning: str) -> str:
    shown = f"`{kind}`" if kind else ""
    text = " ".join(_markdown(meaning).split())
    parts = text.split("`")  # a bar ends a cell, but inside of backticks
    parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
    return f"| `{name}` | {shown} | {'`'.join(parts)} |"


def _string_after(body: list[ast.stmt], node: ast.stmt) -> str | None:
    following = body[body.index(node) + 1 : body.index(node) + 2]
    if following and isinstance(following[0], ast.Expr) and isinstance(following[0].value, ast.Constant):
        result = following[0].value.value
        return inspect.cleandoc(result) if isinstance(result, str) else None
    return None


def _signature(node: ast.FunctionDef, *, skip_first: bool = False, is_property: bool = False) -> str:
    returns = f" -> {_plain(node.returns)}" if node.returns is not None else ""
    if is_property:
        return f"{node.name}{returns.replace(' ->', ':')}"
    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
    return _call(node.name, _arguments(node.args, skip_first=skip_first and not is_static)) + returns


def _call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    return line if len(line) <= 88 else f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


def _arguments(signature: ast.arguments, *, skip_first: bool) -> list[str]:
    positional = [*signature.posonlyargs, *signature.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(signature.defaults)) + list(signature.defaults)
    shown = [_argument(argument, default) for argument, default in zip(positional, defaults, strict=True)][skip_first:]
    if signature.vararg:
        shown.append("*" + _argument(signature.vararg, None))
    elif signature.kwonlyargs:
        shown.append("*")
    shown += [
        _argument(argument, default)
        for argument, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    ]
    return shown + (["**" + _argument(signature.kwarg, None)] if signature.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {_plain(argument.annotation)}" if argument.annotation is not None else ""
    return argument.arg + kind + (f"{' = ' if kind else '='}{ast.unparse(default)}" if default is not None else "")


def _plain(annotation: ast.expr) -> str:
    is_text = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return str(annotation.value) if is_text else ast.unparse(annotation)  # type: ignore[attr-defined]


def _markdown(docstring: str) -> str:
    """Return a docstring as Markdown: double backticks, sections, literal blocks and examples."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines += [_block(block, after_colons=bool(lines) and lines[-2].endswith("::")), ""]
    text = "\n".join(lines).rstrip()
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _block(block: str, *, after_colons: bool) -> str:
    if after_colons and block.startswith(" "):
        return _code(textwrap.dedent(block))
    if block.lstrip().startswith(">>>"):
        return _code(textwrap.dedent(block), "pycon")
    before, example, after = block.partition("\n>>> ")
    if example and not after_colons:
        return f"{_block(before, after_colons=False)}\n\n{_code('>>> ' + after, 'pycon')}"
    block = block.replace("``", "`")
    match = _SECTION.match(block)
    return block if match is None else _section(match[1], block[match.end() :])


def _section(title: str, body: str) -> str:
    items = re.split(r"\n(?=\S)", textwrap.dedent(body.strip("\n")).strip())
    shown = []
    for item in items:
        name, colon, meaning = " ".join(item.split()).partition(": ")
        shown.append(
            f"- `{name}`: {meaning}" if colon and " " not in name.strip("`") else f"- {' '.join(item.split())}"
        )
    return "\n".join([f"**{title}**", "", *shown])


def _linked(markdown: str, links: dict[str, str]) -> str:
    parts = re.split(r"(^```.*?^```$|^#.*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    turn = re.compile(r"(?<!\[)`([A-Za-z_]\w*)`(?!\])")
    return "".join(
        part if part.startswith(("```", "#")) else turn.sub(lambda match: links.get(match[1], match[0]), part)
        for part in parts
    )


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
