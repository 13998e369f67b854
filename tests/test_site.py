"""The site builds strictly, names every page, documents every public name, and loads nothing from elsewhere."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import penstock

pytest.importorskip("material", reason="the site needs mkdocs-material: pip install 'penstock[docs]'")

ROOT = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"`penstock\.(\w+)", penstock.__doc__)))
ROOMS = [name for name in NAMED if importlib.util.find_spec(f"penstock.{name}")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    source = str(Path(penstock.__file__).parents[1])
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": source}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


class References(HTMLParser):
    """What a page loads by itself, and where its navigation leads."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and attributes.get("src"):
            self.loaded.append(attributes["src"])
        if tag == "link" and "href" in attributes:
            self.loaded.append(attributes["href"])
        if tag == "a" and "md-nav__link" in (attributes.get("class") or ""):
            self.links.append(attributes.get("href") or "")


def html_pages(site):
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_every_page_is_in_the_navigation(site):
    pages = {page.relative_to(site).parent for page in html_pages(site) if page.name == "index.html"}
    written = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.parent if path.name == "index" else path for path in written} <= pages
    linked = set()
    for page in html_pages(site):
        for link in References(page.read_text()).links:
            target = (page.parent / link.partition("#")[0]).resolve()
            linked.add(target.relative_to(site.resolve()))
    assert pages - linked == set()


def test_nothing_is_loaded_from_elsewhere(site):
    for page in html_pages(site):
        loaded = References(page.read_text()).loaded
        assert loaded
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        outside = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text())
        assert outside == [], sheet


def test_search_finds_what_pages_say(site):
    index = (site / "search" / "search_index.json").read_text()
    assert "OffloadDeclinedWarning" in index and "NeighborLoader" in index


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_documented(site, room):
    module = importlib.import_module(f"penstock.{room}")
    page = (site / "api" / room / "index.html").read_text()
    ids = References(page).ids
    names = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value) and _is_of(room, value)
    }
    assert names <= set(ids)
    for name in names:
        value = getattr(module, name)
        for method_name, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not method_name.startswith("_"):
                assert f"{name}.{method_name}" in ids
    assert "\\|" not in page and "&amp;#" not in page  # what a table would need that Markdown does not
    headings = re.findall(r"<h[23] id=\"[^\"]+\">.*?</h[23]>(.*?)(?=<h[23]|</article>)", page, re.DOTALL)
    assert headings
    for text in headings:
        assert re.search(r"<(p|table|li)\b", text), f"an entry of {room} has a signature alone: {text[:200]}"


def _is_of(room, value):
    home = getattr(value, "__module__", None) or ""
    return home == f"penstock.{room}" or home.startswith(f"penstock.{room}.")


def test_every_message_is_listed(site):
    page = (site / "api" / "errors" / "index.html").read_text()
    for message in (
        "is not a size. Write a number and a unit",
        "offloading contexts do not nest",
        "a fleet cannot train inside a job of another fleet",
    ):
        assert message in page
    assert page.count("<tr>") > 300


def test_map_of_the_api_leads_to_every_room(site):
    page = (site / "api" / "index.html").read_text()
    assert all(f'href="{room}/"' in page for room in ROOMS)
    assert {name for name in NAMED if name not in ROOMS} <= set(References(page).ids)


def test_a_folder_in_the_navigation_stands_for_its_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    hooks = importlib.import_module("hooks")
    pages = {
        "a.md": "# Z",
        "rooms/two.md": "# B",
        "rooms/one.md": "# C",
        "rooms/first.md": "# D",
        "rooms/sub/x.md": "# X",
    }
    nav = [{"Start": ["a.md"]}, {"Rooms": ["rooms/first.md", "rooms/"]}, {"None": "nowhere/"}]
    assert hooks.expanded(nav, pages) == [
        {"Start": ["a.md"]},
        {"Rooms": ["rooms/first.md", "rooms/two.md", "rooms/one.md"]},
    ]
