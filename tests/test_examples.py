"""Examples run, so that they cannot rot."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = {"hugging_face.py": ["--layers", "2", "--width", "64", "--steps", "2"]}
ELSEWHERE = {"sweep_jobs.py"}  # with sweep.yaml, in tests/cli/test_fleet_cli.py
WITH_DATA = {"entity_classification.py": ("aifb", ["--epochs", "30"])}
FOLDER = Path(__file__).parents[1] / "examples"


def test_every_example_is_run():
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES) | set(WITH_DATA) | ELSEWHERE


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    command = [sys.executable, str(FOLDER / name), "--disk", str(tmp_path), *EXAMPLES[name]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "moved" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", WITH_DATA)
def test_example_with_data_runs(name):
    folder, options = WITH_DATA[name]
    data = Path(__file__).parents[2] / "shared" / "data" / folder
    if not data.is_dir():
        pytest.skip(f"no data in {data}")
    command = [sys.executable, str(FOLDER / name), "--data", str(data), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    accuracy = float(result.stdout.rsplit(":", 1)[1].strip().rstrip("%"))
    assert accuracy > 80
