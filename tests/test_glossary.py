"""Words of our own are linked to the glossary where a page first uses them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TERMS = {
    "tier": r"tiers?",
    "lane": r"lanes?",
    "park": r"park(?:s|ed|ing)?",
    "stall": r"stall(?:s|ed)?",
    "cycle": r"cycles?",
    "true-peak": r"true peaks?",
    "static-bytes": r"static bytes",
    "activation-peak": r"activation peaks?",
    "shard": r"shards?",
    "unified-tensor": r"unified tensors?",
    "eager-rest": r"eager rest",
    "waterfall": r"waterfalls?",
    "in-flight": r"in flight",
}
"""Anchors of the glossary, and the words that need them. Words that everybody knows are not in the list."""
PAGES = sorted(
    page.relative_to(ROOT)
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if page.name not in {"glossary.md", "benchmarks.md"} and "design" not in page.parts
)


def first_use(text, pattern):
    """The first use in prose: outside of code, headings, pictures, and the texts and targets of links elsewhere."""
    hidden = re.compile(
        r"^```.*?^```|^#.*?$|`[^`\n]*`|!?\[(?:[^\[\]]|\[[^\]]*\])*\]\((?!\S*glossary\.md#)[^)]*\)|<!--.*?-->|^---\n.*?^---$",
        re.MULTILINE | re.DOTALL,
    )
    blank = hidden.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    return re.search(rf"(?<![\w/.-])({pattern})(?![\w/-]|\.\w)", blank, re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_first_use_of_a_word_of_ours_is_linked(page):
    text = (ROOT / page).read_text()
    for anchor, pattern in TERMS.items():
        use = first_use(text, pattern)
        if use is not None:
            link = text[max(0, text.rfind("[", 0, use.start())) : use.end() + 120]
            assert re.match(rf"\[[^\]]*\]\(\S*glossary\.md#{anchor}\)", link), f"{use.group()} in {page} needs a link"


def test_every_anchor_is_in_the_glossary():
    glossary = (ROOT / "docs/glossary.md").read_text()
    assert [anchor for anchor in TERMS if f'<a id="{anchor}"></a>' not in glossary] == []
