"""Triton's kernels: run under its interpreter and compiled for sm_90, each in a process of its own."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.relational._elementwise import FUNCTIONS

pytest.importorskip("triton")
HERE = Path(__file__).parent


def run(*parts, interpret, **variables):
    path = os.pathsep.join([str(HERE), str(Path(penstock.__file__).parents[1])])  # the library that is tested
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": path, **variables}
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "triton_process.py"), *parts],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-6000:]
    return outcome.stdout


TOGETHER = {
    part: parts for parts in [("equality", "corners", "repeated", "functions"), ("layers", "half")] for part in parts
}
"""What is interpreted in one process, since what it imports takes seconds."""


@functools.cache
def said_by(parts):
    said = re.split(r"^part (\w+)\n", run(*parts, interpret=True), flags=re.MULTILINE)
    return dict(zip(said[1::2], said[2::2], strict=True))


def interpreted(part):
    return said_by(TOGETHER[part])[part]


def test_results_and_gradients_are_those_of_plain_pytorch():
    assert interpreted("equality").count("equal") == 16


def test_shipped_layers_give_what_their_eager_selves_give():
    assert interpreted("layers").count("equal") == 12


def test_half_precision_is_summed_in_single():
    assert interpreted("half").count("equal") == 24


def test_broadcast_sums_and_rounded_maxima():
    assert interpreted("corners").count("equal") == 6


def test_every_function_gives_what_pytorch_gives():
    assert interpreted("functions").count("equal") == len(FUNCTIONS)


def test_all_kernels_compile_for_sm_90():
    assert run("compile_all", interpret=False).count("compiled") > 60


def test_repeated_calls_are_equal_to_the_bit_and_schedules_nearly_so():
    assert interpreted("repeated").count("equal") == 4


def test_one_schedule_is_compiled_before_the_first_step_and_a_second_process_times_none(tmp_path):
    """The others, three in all of each kernel that sums, are compiled after it and timed once."""
    caches = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    first, second = (run("tuned", interpret=False, **caches).splitlines()[1:] for _ in range(2))
    assert first == [
        "RGCNConv first step: 3 of 3, 4 of products, 0 timed",
        "RGCNConv third step: 9 of 3, 4 of products, 9 timed",
        "RGCNConv fourth step: 9 of 3, 4 of products, 0 timed",
        "RGATConv first step: 9 of 9, 13 of products, 0 timed",
        "RGATConv third step: 25 of 9, 13 of products, 27 timed",
        "RGATConv fourth step: 25 of 9, 13 of products, 0 timed",
    ]
    assert all(line.endswith(", 0 timed") for line in second)
    assert {line.split(": ")[1].split(",")[0] for line in second} == {"3 of 3", "9 of 9"}
