"""Triton's kernels: run under its interpreter and compiled for sm_90, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def run(what, *, interpret):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": str(HERE)}
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "triton_process.py"), what],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-6000:]
    return outcome.stdout


def test_results_and_gradients_are_those_of_plain_pytorch():
    assert run("equality", interpret=True).count("equal") == 16


def test_shipped_layers_give_what_their_eager_selves_give():
    assert run("layers", interpret=True).count("equal") == 12


def test_half_precision_is_summed_in_single():
    assert run("half", interpret=True).count("equal") == 24


def test_broadcast_sums_and_rounded_maxima():
    assert run("corners", interpret=True).count("equal") == 6


def test_all_kernels_compile_for_sm_90():
    assert run("compile_all", interpret=False).count("compiled") > 60


def test_repeated_calls_are_equal_to_the_bit_and_schedules_nearly_so():
    assert run("repeated", interpret=True).count("equal") == 4
