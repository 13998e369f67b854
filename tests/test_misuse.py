"""The campaign of misuse: it knows every public name, and its quick form finds nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import misuse_table
from benchmarks.misuse_case import FAULTS, Misuse, judged, outcome_of
from benchmarks.misuse_table import Told, Wrong

from penstock.errors import TierFullError
from penstock.offload import activations
from penstock.units import parse_bytes

ROOT = Path(__file__).parents[1]


def test_every_public_name_has_a_working_call():
    """A new one gets an entry in the tables of `benchmarks/misuse_*.py`, so that the campaign misuses it too."""
    assert misuse_table.missing() == []


def test_a_name_without_an_entry_is_missing():
    misuse_table.load()
    use = misuse_table.USES.pop("offload.activations")
    try:
        assert misuse_table.missing() == ["offload.activations"]
    finally:
        misuse_table.USES["offload.activations"] = use


def test_a_sample_of_the_campaign_finds_nothing(tmp_path):
    """In a process of its own, which forks: this one may have threads."""
    file = tmp_path / "misuse.json"
    rooms = [text for room in ("offload", "tiers", "unified", "relational", "probe") for text in ("--room", room)]
    command = [sys.executable, "-m", "benchmarks.misuse", "--quick", "--every", "60", *rooms]
    run = subprocess.run(
        [*command, "--json", str(file), "--disk", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    content = json.loads(file.read_text())
    assert content["configuration"]["findings"] == []
    assert run.returncode == 0, run.stderr[-2000:]
    total = {row["metric"]: row["value"] for row in content["rows"] if row["name"] == "misuse"}
    assert total["cases"] >= 15
    assert total["cases"] == total["right"] + total["our error"] + total["their error"]
    assert list(tmp_path.iterdir()) == [file]


def raised(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever it is
        call()
    return caught.value


def test_outcomes():
    def deep():
        return {}["potatoes"]

    assert judged(raised(lambda: activations(len)), "offload.activations", "model")[0] == "our error"
    assert judged(raised(lambda: parse_bytes("12 potatoes")), "units.parse_bytes", "size")[0] == "our error"
    assert judged(raised(deep), "offload.activations", "model")[0] == "raw"
    assert judged(raised(activations), "offload.activations", "")[0] == "their error"
    assert judged(TierFullError("no room"), "", "")[0] == "our error"
    assert judged(Wrong("2 instead of 3"), "", "")[0] == "wrong number"
    assert judged(Told("IndexError: list index out of range"), "", "")[0] == "raw"
    assert judged(Told("TypeError: loss must be a tensor"), "", "")[0] == "our error"


def test_what_is_taken_without_a_word_is_a_fault():
    silent = Misuse("offload", "a", lambda _: None, "offload.activations", "verify", "''", is_excluded=True)
    assert outcome_of(silent, None)[0] == "silent"
    assert "silent" in FAULTS
