"""The command line, as a user calls it."""

import json

from typer.testing import CliRunner

import penstock
from penstock.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_version():
    assert run("--version").output.strip() == f"penstock {penstock.__version__}"


def test_probe_prints_json(tmp_path):
    result = run("probe", "--disk", tmp_path, "--json")
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert {place["name"] for place in report["places"]} >= {"device", "disk"}
    assert all(lane["bandwidth_bytes_per_s"] > 0 for lane in report["lanes"])
    assert all(feature["reason"] for feature in report["features"])


def test_probe_prints_tables(tmp_path):
    result = run("probe", "--disk", tmp_path)
    assert result.exit_code == 0
    for words in ("Devices and tiers", "Bandwidths", "Features", "direct I/O"):
        assert words in result.output


def test_an_unknown_directory_is_one_paragraph_and_exit_1(tmp_path):
    result = run("probe", "--disk", tmp_path / "missing")
    assert result.exit_code == 1
    assert "does not exist" in result.output
    assert "Traceback" not in result.output
