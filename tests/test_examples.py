"""Examples run, so that they cannot rot."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.common import data_folder

EXAMPLES = {
    "hugging_face.py": ["--layers", "2", "--width", "64", "--steps", "3", "--budget", "64MiB"],
    "lightning_run.py": ["--layers", "2", "--width", "64", "--steps", "3", "--budget", "27MiB"],
}
ELSEWHERE = {
    "sweep_jobs.py",
    "two_ranks.py",
    "ranks_graphsage.py",
}  # with sweep.yaml, in tests/cli/test_fleet_cli.py; below
WITH_DATA = {
    "entity_classification.py": ("aifb", ["--epochs", "30"], 80),
    "link_prediction.py": (
        "fb15k237",
        ["--epochs", "4", "--width", "16", "--triples", "20000", "--batch", "2048"],
        0.03,
    ),
}
MADE_UP = {
    "minibatch_attention.py": [
        *["--nodes", "4000", "--epochs", "2", "--batch", "512"],
        *["--width", "640", "--host", "6MiB", "--disk", "{folder}"],
    ],
    "own_layer.py": ["--nodes", "1000", "--epochs", "40"],
    "tiered_graphsage.py": [
        *["--nodes", "10000", "--edges", "200000", "--width", "512", "--host", "6MiB", "--seeds", "2000"],
        *["--batch", "128", "--epochs", "2", "--disk", "{folder}"],
    ],
}
FOLDER = Path(__file__).parents[1] / "examples"


def test_every_example_is_run():
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES) | set(WITH_DATA) | set(MADE_UP) | ELSEWHERE


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    command = [sys.executable, str(FOLDER / name), "--disk", str(tmp_path), *EXAMPLES[name]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (told,) = (line for line in result.stdout.splitlines() if " moved in " in line)
    assert told.endswith(" moved in 3 steps") and not told.startswith("0 B")
    assert "nothing" not in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.data
@pytest.mark.parametrize("name", WITH_DATA)
def test_example_with_data_runs(name):
    folder, options, least = WITH_DATA[name]
    data = data_folder() / folder
    if not data.is_dir():
        pytest.skip(f"needs the data set in {data}; in another folder: PENSTOCK_DATA=FOLDER, which has {folder}")
    command = [sys.executable, str(FOLDER / name), "--data", str(data), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert last_number(result.stdout) > least


@pytest.mark.parametrize("name", MADE_UP)
def test_example_with_made_up_data_learns(name, tmp_path):
    files = ["--picture", str(tmp_path / "curve.png"), "--checkpoint", str(tmp_path / "weights.safetensors")]
    options = [option.format(folder=tmp_path) for option in MADE_UP[name]]
    command = [sys.executable, str(FOLDER / name), *options, *files]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    accuracies = [last_number(line) for line in result.stdout.splitlines() if "accuracy" in line]
    assert accuracies and min(accuracies) > 70
    if name == "own_layer.py":
        assert float(result.stdout.split("losses apart by ")[1].split()[0]) < 1e-4
    kept = {path.name for path in tmp_path.iterdir() if path.suffix != ".rows"}
    assert kept == {"curve.png", "weights.safetensors"}
    if "--host" in options:
        (on_disk,) = [line for line in result.stdout.splitlines() if line.startswith("disk")]
        assert 5 < float(on_disk.split()[-1].rstrip("%")) < 95  # some rows of each tier


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "tensor"])
def test_two_ranks_train_as_without_it(how, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(FOLDER / "two_ranks.py"), "--how", how, "--disk", str(tmp_path), "--width", "64", "--steps", "3"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank}: losses equal: True" in result.stdout
    assert list(tmp_path.iterdir()) == []


def last_number(text):
    return float(text.rsplit(":", 1)[1].strip().rstrip("%"))


def test_ranks_train_on_one_copy_of_files(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(FOLDER / "ranks_graphsage.py"), "--disk", str(tmp_path), "--edges", "200000", "--width", "512"]
    command += ["--host", "10MiB", "--seeds", "1000", "--batch", "64"]
    for _ in range(2):  # the second run finds the files
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("epoch 1: loss") == 2 and "from the disk" in result.stdout
        assert len(list(tmp_path.iterdir())) == 2


def test_machines_train_on_one_table(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [
        "sh",
        "-c",
        'PENSTOCK_MACHINE=$RANK LOCAL_RANK=0 exec "$0" "$@"',
        sys.executable,
        str(FOLDER / "ranks_graphsage.py"),
    ]
    command += ["--disk", str(tmp_path), "--edges", "200000", "--width", "512", "--host", "12MiB", "--seeds", "1000"]
    result = subprocess.run(
        [*command, "--batch", "64", "--peers", "copies"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("epoch 1: loss") == result.stdout.count(" of other machines") == 2
    assert "(0 of other machines)" not in result.stdout
    assert len(list(tmp_path.iterdir())) == 2
