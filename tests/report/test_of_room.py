"""The page of a room's demo compares plain training and Penstock, and says where they ran."""

import json

import pytest
from page_reader import Page

from penstock import report
from penstock.errors import PenstockError

MIB = 2**20
SUMMARY = {
    "story": "Four models train.",
    "cap_bytes": 40 * MIB,
    "failures": {"plain": "can't allocate <memory>", "checkpoint per block": "too much", "half": ""},
    "taken_bytes": {"plain": 110 * MIB, "Penstock": 39 * MIB},
    "time_ratio": 1.34,
    "largest_loss_difference": 2e-7,
    "losses": [3.0, 2.5],
    "told": "Models went to the disk.",
    "command": "penstock demo --room fleet",
    "machine": {"device": "a processor", "memory_bytes": 2**34, "cuda": None},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "room.json").write_text(json.dumps(SUMMARY))
    timelines = {"plain": [[5.0, 10 * MIB], [6.0, 110 * MIB]], "Penstock": [[0.0, 10 * MIB], [2.0, 39 * MIB]]}
    (tmp_path / "room-memory.json").write_text(json.dumps(timelines))
    return tmp_path


def test_both_are_on_the_page(folder):
    page = Page(report.write_html(folder / "run.html", folder)[0])
    methods = page.table("Plain PyTorch and Penstock")
    assert methods.line("plain") == ["plain", "fails", "110.0 MiB", "", ""]
    assert methods.line("checkpoint per block")[1:3] == ["fails", ""]
    assert methods.line("half")[1] == "trains"
    assert methods.line("Penstock") == ["Penstock", "trains", "39.0 MiB", "1.34", "2e-07"]
    assert page.says("Four models train. The kernel enforces a cap of 40.0 MiB. Models went to the disk.")
    assert page.says("from 3.0000 to 2.5000") and page.says("plain: peak 110.0 MiB") and page.says("cap: 40.0 MiB")
    assert dict(page.table("Machine, versions and command").lines)["memory"] == "16.0 GiB"


@pytest.mark.parametrize("name", ["room.json", "room-memory.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"plain": 1}', ""])
def test_damaged_files_are_named(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(PenstockError, match="cannot be read as the folder of a demo"):
        report.write_html(folder / "run.html", folder)
