"""Triton's kernels: run under its interpreter and compiled for sm_90, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def run(what, *, interpret=True):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": str(HERE)}
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "unified_kernels_process.py"), what],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-6000:]
    return outcome.stdout


@pytest.mark.parametrize("what", ["values", "conversions", "out_of_range", "lines", "draws"])
def test_under_the_interpreter(what):
    assert "equal" in run(what)


def test_all_kernels_compile_for_sm_90():
    assert run("compile_all", interpret=False).count("compiled") == 14


def test_numbers_that_change_from_call_to_call_are_no_part_of_a_kernel():
    """Triton compiles a kernel anew for an argument that is 1, or divisible by 16, unless it is told not to."""
    pytest.importorskip("triton")
    source = (
        "from penstock.unified import _kernels\n"
        "for kernel in (_kernels.gather_rows, _kernels.sample_neighbours):\n"
        "    print(*[one.name for one in kernel.params if one.do_not_specialize])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[:2] == ["num_wanted", "size seed_low seed_high"]
