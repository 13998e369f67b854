"""Examples run, so that they cannot rot."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = {"hugging_face.py": ["--layers", "2", "--width", "64", "--steps", "2"]}
ELSEWHERE = {"sweep_jobs.py"}  # with sweep.yaml, in tests/cli/test_fleet_cli.py
FOLDER = Path(__file__).parents[1] / "examples"


def test_every_example_is_run():
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES) | ELSEWHERE


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    command = [sys.executable, str(FOLDER / name), "--disk", str(tmp_path), *EXAMPLES[name]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "moved" in result.stdout
    assert list(tmp_path.iterdir()) == []
