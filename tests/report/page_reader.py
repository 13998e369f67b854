"""A reader of pages: their text, tables, pictures and attributes."""

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from html.parser import HTMLParser

from penstock import report


@dataclass
class PageTable:
    caption: str
    header: list
    lines: list

    def column(self, name):
        return [line[self.header.index(name)] for line in self.lines]

    def line(self, name):
        return next(line for line in self.lines if line[0] == name)


class Page(HTMLParser):
    """What a page says: its text, tables, pictures and attributes, and whether every tag is closed."""

    _VOID = {"meta", "br", "img", "link", "input"}

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text()
        self.text, self.tables, self.attributes, self.tags, self.titles = [], [], [], [], []
        self._open, self._cell = [], None
        self.feed(self.source)
        assert self._open == []
        self.svgs = [ET.fromstring(f"<svg{part.split('</svg>')[0]}</svg>") for part in self.source.split("<svg")[1:]]

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self._VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append(PageTable("", [], []))
        elif tag == "tr":
            self.tables[-1].lines.append([])
        elif tag in ("th", "td", "caption"):
            self._cell = []

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag in ("th", "td"):
            self.tables[-1].lines[-1].append("".join(self._cell))
        elif tag == "caption":
            self.tables[-1].caption = "".join(self._cell)
        elif tag == "thead":
            self.tables[-1].header = self.tables[-1].lines.pop()
        if tag in ("th", "td", "caption"):
            self._cell = None

    def handle_data(self, data):
        if self._open and self._open[-1] == "style":
            return
        self.text.append(data)
        if self._cell is not None:
            self._cell.append(data)

    def says(self, words):
        return words in " ".join("".join(self.text).split())

    def table(self, caption):
        return next(table for table in self.tables if table.caption.startswith(caption))

    def values_of(self, name):
        return [value for key, value in self.attributes if key == name]


def page_of(tmp_path, *things, **options):
    return Page(report.write_html(tmp_path / "run.html", *things, **options)[0])


def assert_stands_alone(page):
    for word in ("http", "src=", "@import", "url(", "<script", "<link", "javascript:"):
        assert word not in page.source.lower().replace("&lt;script", ""), word
    assert not set(page.tags) & {"script", "img", "iframe", "object", "embed", "link", "base"}
    assert not any(key.startswith("on") for key, _ in page.attributes)
    for target in page.values_of("href"):
        assert target.startswith("#s") or target.endswith(".trace.json")
