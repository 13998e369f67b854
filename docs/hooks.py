"""Hooks of MkDocs that build pages nobody writes: the API, examples, and pages that lie outside of `docs`.

Links between pages are those that work in a checkout; here they are turned to where the site has the same thing.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import api_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder into the navigation where the folder is named."""
    config.watch += [str(ROOT / "src"), str(ROOT / "examples")]
    pages = {**_written(), **_generated()}
    config.nav = expanded(config.nav or [], pages)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and the figures that pages link to."""
    for address, content in _generated().items():
        files.append(File.generated(config, address, content=content))
    for figures in sorted((ROOT / "benchmarks" / "results").glob("*.*")):
        files.append(File.generated(config, f"results/{figures.name}", abs_src_path=str(figures)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn links to files of the repository into links to where the site has them."""
    address = page.file.src_uri
    origin = _ORIGINS.get(address, f"docs/{address}")
    if address.startswith(("api/", "examples/")):
        return markdown
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _relinked(part, origin, address) for part in parts)


def expanded(nav: list[Any], pages: dict[str, str]) -> list[Any]:
    """Return `nav` with each ``folder/`` replaced by its pages that `nav` does not name, in order of their titles.

    A section without any page is left out.
    """
    named = set(_leaves(nav))

    def fill(entries: list[Any] | str) -> list[Any]:
        filled: list[Any] = []
        for entry in [entries] if isinstance(entries, str) else entries:
            if isinstance(entry, dict):
                ((title, inside),) = entry.items()
                alone = isinstance(inside, str) and not inside.endswith("/")
                filled.append({title: inside if alone else fill(inside)})
            elif entry.endswith("/"):
                folder = PurePosixPath(entry)
                rest = {page for page in pages if PurePosixPath(page).parent == folder} - named
                filled.extend(sorted(rest, key=lambda address: _title(pages[address])))
            else:
                filled.append(entry)
        return filled

    return [entry for entry in fill(nav) if not (isinstance(entry, dict) and [] in entry.values())]


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inside = nav.values() if isinstance(nav, dict) else nav
    return [leaf for page in inside for leaf in _leaves(page)]


def _title(markdown: str) -> str:
    return re.sub(r"[`#]", "", markdown.lstrip().split("\n", 1)[0]).strip().lower()


def _written() -> dict[str, str]:
    folder = ROOT / "docs"
    return {file.relative_to(folder).as_posix(): file.read_text() for file in sorted(folder.rglob("*.md"))}


_ORIGINS = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
"""Pages of the site that are files at the top of the repository."""


def _generated() -> dict[str, str]:
    examples = sorted((ROOT / "examples").glob("*.py"))
    return {
        **{f"api/{name}.md": content for name, content in api_pages.pages().items()},
        **{f"examples/{example.stem}.md": _example(example) for example in examples},
        "examples/index.md": _examples(examples),
        **{address: (ROOT / origin).read_text() for address, origin in _ORIGINS.items()},
    }


def _example(file: Path) -> str:
    return f"# {file.name}\n\n````python\n{file.read_text()}````\n"


def _examples(files: list[Path]) -> str:
    rows = [f"| [{file.name}]({file.stem}.md) | {_first_line(file)} |" for file in files]
    return "\n".join(["# Examples", "", "Each runs, and the tests run it.", "", "| | |", "|---|---|", *rows, ""])


def _first_line(file: Path) -> str:
    return file.read_text().lstrip('"').split("\n", 1)[0].rstrip('"')


def _relinked(markdown: str, origin: str, address: str) -> str:
    def turn(match: re.Match[str]) -> str:
        target = _normal(PurePosixPath(origin).parent / match[2])
        return f"{match[1]}{_relative(_on_site(target), address)}{match[3]}"

    return _LINK.sub(turn, markdown)


def _on_site(target: str) -> str:
    """Return where the site has what the repository has at `target`."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if match := re.fullmatch(r"src/penstock/(?:(\w+)/)?(\w+)\.py", target):
        return f"api/{match[1] or match[2].replace('__init__', 'index')}.md"
    if match := re.fullmatch(r"examples/(\w+)\.(?:py|yaml)", target):
        return f"examples/{'sweep_jobs' if target.endswith('.yaml') else match[1]}.md"
    if target.startswith("benchmarks/results/"):
        return target.removeprefix("benchmarks/")
    return {origin: address for address, origin in _ORIGINS.items()}.get(target, target)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _relative(target: str, address: str) -> str:
    depth = len(PurePosixPath(address).parent.parts)
    return "../" * depth + target
