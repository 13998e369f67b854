"""Values of options, and completions for shells, which are read from folders without importing PyTorch."""

import os
import re
from enum import StrEnum
from pathlib import Path

import typer

_SPECIAL = re.compile(r"[^\w@%+=:,./-]")


class PlanMethod(StrEnum):
    """Values of ``--method``, as in `penstock.remat.Method`."""

    HYBRID = "hybrid"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class MachineName(StrEnum):
    """Values of ``--machine``: the names in `penstock.machines.MACHINES`."""

    H200 = "h200"
    A100 = "a100"
    A100_40GB_OPTANE = "a100-40gb-optane"
    RTX4090 = "rtx4090"
    GH200 = "gh200"


class DemoRoom(StrEnum):
    """Values of ``--room``: the rooms that a demo of their own shows."""

    FLEET = "fleet"
    TRAINING = "training"
    UNIFIED = "unified"
    RELATIONAL = "relational"


class Scheduler(StrEnum):
    """Values of ``--scheduler``, as in `penstock.fleet.SchedulerName`."""

    FAIR = "fair"
    SHARDED_LRTF = "sharded-lrtf"
    FIFO = "fifo"
    SHORTEST_FIRST = "shortest-first"
    RANDOM = "random"


class DeviceChoice(StrEnum):
    """Values of ``--device`` of a benchmark."""

    CPU = "cpu"
    CUDA = "cuda"


def job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the names of jobs of the fleet whose folder was already typed."""
    run_dir = ctx.params.get("run_dir")
    if run_dir is None:
        return []
    names = sorted(folder.name for folder in (Path(run_dir) / "jobs").glob("*") if folder.is_dir())
    fits = [name for name in names if name.startswith(incomplete)]
    is_bash = os.environ.get("_PENSTOCK_COMPLETE") == "complete_bash"
    return [_SPECIAL.sub(r"\\\g<0>", name) for name in fits] if is_bash else fits  # bash inserts the text as it is
