"""Saved reports give the same page later, and a damaged one is one clear error."""

import json
import re

import pytest
from page_reader import Page, assert_stands_alone
from runs_to_report import Account, advice, peak_report, planned

from penstock import report
from penstock.errors import PenstockError


def test_everything_at_once_now_and_later(tmp_path, offloader, run_dir):
    things = [offloader, planned(), run_dir, Account(), advice(), peak_report(), offloader]
    files = report.write_html(tmp_path / "now.html", *things)
    assert [file.name for file in files] == [
        "now.html", "now.offload.trace.json", "now.fleet.trace.json", "now.offload-2.trace.json",
    ]  # fmt: skip
    assert report.save(tmp_path / "kept", *things) == tmp_path / "kept" / "report.json"
    again = report.write_html(tmp_path / "later.html", tmp_path / "kept")
    assert [file.name.replace("later", "now") for file in again] == [file.name for file in files]
    assert all(file.read_text() == two.read_text() for file, two in zip(files[1:], again[1:], strict=True))
    pages = [file.read_text().replace("later.", "now.") for file in (files[0], again[0])]
    assert pages[0].partition("<main>")[2] == pages[1].partition("<main>")[2]
    assert_stands_alone(Page(files[0]))


def test_a_page_in_the_folder_that_it_shows(tmp_path, offloader):
    report.save(tmp_path, offloader)
    files = report.write_html(tmp_path / "run.html", tmp_path)
    assert json.loads(files[1].read_text())["traceEvents"]


def damaged_by(change):
    def damage(path):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return damage


DAMAGES = {
    "cut short": lambda path: path.write_text(path.read_text()[:-50]),
    "not text": lambda path: path.write_bytes(b"\xff\x00" * 40),
    "empty": lambda path: path.write_text(""),
    "another format": damaged_by(lambda content: content.update(format=2)),
    "a number without end": lambda path: path.write_text(
        re.sub(r'"points":\[\[[^,]+,', '"points":[[1e999,', path.read_text(), count=1)
    ),
    "a part missing": damaged_by(lambda content: content["parts"][0].pop("section")),
    "a trace elsewhere": damaged_by(lambda content: content["parts"][0].update(trace="../../etc/passwd")),
    "a kind that leads elsewhere": damaged_by(
        lambda content: content["parts"][0]["section"].update(kind="../../elsewhere")
    ),
    "a colour of its own": damaged_by(
        lambda content: content["parts"][0]["section"]["charts"][0]["series"][0].update(colour='c0" onload="x')
    ),
    "too many points": damaged_by(
        lambda content: content["parts"][0]["section"]["charts"][0]["series"][0].update(points=[[0, 0]] * 2000)
    ),
    "a short line": damaged_by(lambda content: content["parts"][0]["section"]["tables"][0]["lines"].append(["x"])),
    "a group that is not there": damaged_by(
        lambda content: content["parts"][1]["section"]["charts"][0]["rows"][0].update(bars=[[0, 1, 99]])
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_file_is_one_clear_error(tmp_path, damage):
    path = report.save(tmp_path / "kept", planned(), Account())
    damage(path)
    with pytest.raises(PenstockError, match=r"report\.json cannot be read as a saved report: .*report\.save") as raised:
        report.write_html(tmp_path / "run.html", tmp_path / "kept")
    assert len(str(raised.value)) < 700
    assert not (tmp_path / "run.html").exists()


def test_a_saved_file_that_is_too_large_is_not_read(tmp_path):
    path = report.save(tmp_path, planned())
    with path.open("r+b") as file:
        file.truncate(2**31)
    with pytest.raises(PenstockError, match="2,147,483,648 bytes"):
        report.write_html(tmp_path / "run.html", tmp_path)
