"""The page of a demo compares all methods and says where they ran."""

import json

import pytest
from page_reader import Page

from penstock import report
from penstock.errors import PenstockError

MIB = 2**20
PEAK = {"peak_bytes": 110 * MIB, "activation_bytes": 100 * MIB}


def method(label, activation_mib, ratio, moved_mib):
    peak = {"peak_bytes": (10 + activation_mib) * MIB, "activation_bytes": activation_mib * MIB}
    return {
        **peak,
        "label": label,
        "step_time_ratio": ratio,
        "largest_loss_difference": 0.0,
        "moved_bytes": moved_mib * MIB,
    }


SUMMARY = {
    "cap_bytes": 40 * MIB,
    "budget_bytes": 42 * MIB,
    "plain": PEAK,
    "plain_failure": "can't allocate <memory>",
    "methods": {"checkpoint": method("checkpoint per block", 25, 1.25, 0), "offload": method("offload", 30, 1.1, 80)},
    "best": "offload",
    "whole": {
        "state_bytes": 300 * MIB,
        "cap_bytes": 100 * MIB,
        "failures": {"plain": "can't", "checkpoint per block": ""},
        "step_time_ratio": 1.34,
        "largest_loss_difference": 0.0,
        "statistics": {"step_parked": {"parameters": 3 * MIB, "states": MIB}},
    },
    "command": "penstock demo --out 'my demo'",
    "machine": {"device": "a processor", "cores": 2, "memory_bytes": 2**34, "cuda": None, "torch": "2.9.0"},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "summary.json").write_text(json.dumps(SUMMARY))
    timelines = {"plain": [[5.0, 10 * MIB], [6.0, 110 * MIB]], "offload": [[0.0, 10 * MIB], [2.0, 40 * MIB]]}
    (tmp_path / "demo" / "memory.json").write_text(json.dumps(timelines))
    return tmp_path / "demo"


def test_all_methods_their_memory_and_the_machine_are_on_the_page(tmp_path, folder):
    page = Page(report.write_html(tmp_path / "run.html", folder)[0])
    methods = page.table("All methods")
    assert methods.line("plain")[:4] == ["plain", "fails", "100.0 MiB", "1"]
    assert methods.line("checkpoint per block")[1:] == ["trains", "25.0 MiB", "1.25", "0 B", "0"]
    assert methods.line("offload")[1:] == ["trains", "30.0 MiB", "1.10", "80.0 MiB", "0"]
    larger = page.table("A model that is larger than the cap")
    assert larger.column("under the cap") == ["fails", "trains", "trains"]
    assert larger.line("Penstock: training")[2:] == ["1.34", "4.0 MiB", "0"]
    assert page.says("it fails: can't allocate <memory>.")
    assert page.says("plain: peak 110.0 MiB") and page.says("cap: 50.0 MiB")
    where = page.table("Machine, versions and command")
    assert dict(where.lines) == {
        "command": "penstock demo --out 'my demo'",
        "device": "a processor",
        "cores": "2",
        "memory": "16.0 GiB",
        "torch": "2.9.0",
    }


@pytest.mark.parametrize("name", ["summary.json", "memory.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"methods": 3}', '{"plain": [[NaN, 1]]}'])
def test_a_damaged_file_is_one_error(tmp_path, folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(PenstockError, match="cannot be read as the folder of a demo"):
        report.write_html(tmp_path / "run.html", folder)
