"""Throughput of a fleet of twelve jobs, each several times a device's budget, against other ways to train them.

The setting of Hydra's paper, scaled to this machine: 6 learning rates x 2 batch sizes, AdamW. Devices are CPU threads
of one core each, or CUDA devices under a cap; offloaded bytes go to a disk, or to host memory and a disk. Peers run in
alternation with the fleet, for several rounds: plain training of two such models in parallel, each in its own process
on its own core (what two devices could reach if everything fitted); the same with dummy traffic of as many bytes as
the fleet moves (on a CPU lanes take cores, caches and memory bandwidth from the computation, which a GPU's copy engines
do not); one model at a time, on one device after the other; a pipeline; FSDP2 with CPU offload
(benchmarks/fleet_peers.py).

Run it with ``python -m benchmarks.fleet_training --disk /nvme --json fleet.json``.
"""

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import Row, paired_ratio, parser, show, write
from benchmarks.fleet_models import jobs_of, state_bytes, text_file
from benchmarks.fleet_peers import throughput, train_plainly
from penstock import fleet
from penstock.report import curves, gantt
from penstock.units import format_bytes, parse_bytes

WARM_BATCHES = 2
"""First mini-batches of a job, in which memory is touched for the first time; plain training has one step for that."""


class Run:
    """A fleet's run, measured while all devices had work."""

    def __init__(self, settings: Any, jobs: list[fleet.Job], **options: Any):
        options = {"host": settings.host, "disk": settings.disk, "progress": None, **options}
        with fleet.Fleet(devices_of(settings), settings.budget, **options) as running:
            for job in jobs:
                running.add(job)
            results = running.wait()
            self.records = running.records
        self.devices = results.devices
        self.losses = {name: result.losses for name, result in results.items()}
        failed = [result for result in results.values() if result.state is not fleet.JobState.DONE]
        if failed:
            raise RuntimeError(f"{failed[0].name}: {failed[0].error}")
        by_device: dict[int, list[fleet.UnitRecord]] = defaultdict(list)
        for record in self.records:
            by_device[record.device].append(record)
        self.begin_s = max(min(record.start_s for record in records) for records in by_device.values())
        self.end_s = min(max(record.end_s for record in records) for records in by_device.values())
        if self.end_s <= self.begin_s:  # one device had ended before the other began
            self.begin_s = min(record.start_s for record in self.records)
            self.end_s = max(record.end_s for record in self.records)
        batch_of = {job.name: job.tags["batch"] for job in jobs}
        inside = [record for record in self.records if self.begin_s <= record.start_s and record.end_s <= self.end_s]
        num_units = {name: units_of_a_batch(self.records, name) for name in batch_of}
        samples = sum(batch_of[unit.job] / num_units[unit.job] for unit in inside)
        span_s = self.end_s - self.begin_s
        self.samples_per_s = samples / span_s
        warm = self._warm_units(num_units)
        warm_samples = sum(batch_of[unit.job] / num_units[unit.job] for unit in warm)
        self.warm_samples_per_s = warm_samples / sum(unit.end_s - unit.start_s for unit in warm) * len(by_device)
        """Samples per second without the first mini-batches of each job."""
        total_s = span_s * len(by_device)
        self.stall_share = sum(unit.stall_s for unit in inside) / total_s
        self.recompute_share = sum(unit.recompute_s for unit in inside) / total_s
        computes_s = sum(unit.end_s - unit.start_s - unit.stall_s for unit in inside)
        self.useful_share = computes_s / total_s - self.recompute_share
        self.stall_s = sum(unit.stall_s for unit in inside)
        devices, all_samples = (
            self.devices,
            sum(batch_of[record.job] / num_units[record.job] for record in self.records),
        )
        self.moved = (
            int(sum(device.parked_bytes for device in devices) / all_samples),
            int(sum(device.fetched_bytes for device in devices) / all_samples),
        )
        """Bytes copied out and in per sample."""

    def _warm_units(self, num_units: dict[str, int]) -> list[fleet.UnitRecord]:
        by_job: dict[str, list[fleet.UnitRecord]] = defaultdict(list)
        for entry in sorted(self.records, key=lambda record: record.start_s):
            by_job[entry.job].append(entry)
        warm = [unit for job, units in by_job.items() for unit in units[WARM_BATCHES * num_units[job] :]]
        return warm or self.records


def units_of_a_batch(records: list[fleet.UnitRecord], job: str) -> int:
    """Return the number of units per mini-batch of a job: forward of all shards but the last, and backward of all."""
    num_shards = 1 + max(record.shard for record in records if record.job == job)
    return 2 * num_shards - 1


def devices_of(settings: Any) -> list[fleet.Device]:
    if settings.device == "cuda":
        return [fleet.Device(name=f"cuda:{index}") for index in range(torch.cuda.device_count())]
    return [fleet.Device(name="cpu", threads=1) for _ in range(settings.devices)]


def rounds_of(settings: Any, rows: list[Row]) -> None:
    """Run the fleet and its peers in alternation."""
    ours, warm, shares = [], [], []
    theirs: dict[str, list[float]] = defaultdict(list)
    side_by_side = f"{settings.devices} plain trainings side by side"
    moving = f"{side_by_side}, each beside as many bytes moved"
    others = {"one model at a time": "one", "FSDP2 with CPU offload": "fsdp"}
    if settings.model == "gpt":
        others["pipeline, 4 micro-batches"] = "pipeline"
    for number in range(settings.rounds):
        before = throughput(settings, "plain", settings.steps)
        run = Run(settings, jobs_of(settings, settings.jobs, settings.steps))
        after = before if settings.quick else throughput(settings, "plain", settings.steps)
        ours.append(run.samples_per_s)
        warm.append(run.warm_samples_per_s)
        theirs[side_by_side].append((before + after) / 2)
        theirs[moving].append(throughput(settings, "plain", settings.steps, run.moved))
        for name, kind in others.items():
            theirs[name].append(throughput(settings, kind, max(1, settings.steps // 2)))
        shares.append((run.useful_share, run.stall_share, run.recompute_share))
        print(
            f"round {number + 1}: fleet {ours[-1]:.2f} samples/s ({warm[-1]:.2f} once warm), "
            + ", ".join(f"{name} {result[-1]:.2f}" for name, result in theirs.items())
            + f" ({before:.2f} before, {after:.2f} after); useful {shares[-1][0]:.1%}, stalls {shares[-1][1]:.1%}, "
            f"recomputes {shares[-1][2]:.1%}",
            flush=True,
        )
    rows.append(Row(name="fleet", metric="throughput", value=median(ours), unit="samples/s"))
    rows.append(Row(name="fleet", metric="throughput once warm", value=median(warm), unit="samples/s"))
    for name, result in theirs.items():
        middle, low, high = paired_ratio(ours, result)
        rows += [
            Row(name=name, metric="throughput", value=median(result), unit="samples/s"),
            Row(name="fleet", metric="throughput over a peer's", value=middle, unit="", peer=name, ratio=middle),
            Row(name="fleet", metric="the same, 95% low", value=low, unit="", peer=name),
            Row(name="fleet", metric="the same, 95% high", value=high, unit="", peer=name),
            Row(name="fleet", metric="throughput once warm over a peer's", value=paired_ratio(warm, result)[0], unit="",
                peer=name),
        ]  # fmt: skip
        print(f"throughput over {name}: {middle:.3f} [{low:.3f}, {high:.3f}]; warm {paired_ratio(warm, result)[0]:.3f}")
    for index, name in enumerate(("useful computation", "stalls", "recomputation")):
        rows.append(Row(name="fleet", metric=name, value=median(share[index] for share in shares), unit="of the time"))
    statistics = run.devices
    rows += [
        Row(name="fleet", metric="peak", value=max(device.peak_bytes for device in statistics), unit="bytes"),
        Row(name="fleet", metric="budget", value=statistics[0].budget_bytes, unit="bytes"),
        Row(name="fleet", metric="state of a model", value=state_bytes(settings), unit="bytes"),
        Row(
            name="fleet", metric="state over budget", value=state_bytes(settings) / statistics[0].budget_bytes, unit=""
        ),
        Row(
            name="fleet",
            metric="moved in",
            value=sum(device.fetched_bytes for device in statistics),
            unit="bytes",
        ),
        Row(
            name="fleet",
            metric="moved out",
            value=sum(device.parked_bytes for device in statistics),
            unit="bytes",
        ),
    ]
    if settings.json:
        draw(settings.json, run)


def ablations(settings: Any, rows: list[Row]) -> None:
    """Measure the gain of each part: the same few jobs with one part switched off."""
    jobs = jobs_of(settings, min(4, settings.jobs), max(1, settings.steps // 2))
    off: dict[str, Callable[[], dict[str, Any]]] = {
        "all on": dict,
        "no double buffer": lambda: {"ablation": fleet.Ablation(double_buffer=False)},
        "no SHARP": lambda: {"ablation": fleet.Ablation(sharp=False)},
        "always recompute": lambda: {"ablation": fleet.Ablation(recompute=True)},
        "never recompute": lambda: {"ablation": fleet.Ablation(recompute=False)},
        "scheduler sharded-lrtf": lambda: {"scheduler": "sharded-lrtf"},
        "scheduler fifo": lambda: {"scheduler": "fifo"},
        "scheduler shortest-first": lambda: {"scheduler": "shortest-first"},
        "scheduler random": lambda: {"scheduler": "random"},
        "host memory only": lambda: {"host": "8GiB", "disk": None},
        "host memory and disk": lambda: {"host": "512MiB"},
        "disk only": lambda: {"host": None},
    }
    if settings.quick:
        off = {name: off[name] for name in ("all on", "no double buffer")}
    table, first = [], 0.0
    for name, options in off.items():
        start_s = time.perf_counter()
        run = Run(settings, jobs, **options())
        wall_s = time.perf_counter() - start_s
        first = first or run.samples_per_s
        moved = sum(device.fetched_bytes + device.parked_bytes for device in run.devices)
        table.append(
            [name, f"{run.samples_per_s:.2f}", f"{run.samples_per_s / first:.3f}", f"{run.useful_share:.1%}",
             f"{run.stall_s:.1f} s", format_bytes(moved), f"{wall_s:.0f} s"]
        )  # fmt: skip
        print(table[-1], flush=True)
        rows += [
            Row(name=name, metric="throughput", value=run.samples_per_s, unit="samples/s", peer="all on",
                ratio=run.samples_per_s / first),
            Row(name=name, metric="useful computation", value=run.useful_share, unit="of the time"),
            Row(name=name, metric="stalls", value=run.stall_s, unit="s"),
            Row(name=name, metric="moved", value=moved, unit="bytes"),
        ]  # fmt: skip
    show("ablations", ["", "samples/s", "of all on", "useful", "stalls", "moved", "whole run"], table)


def scaling(settings: Any, rows: list[Row]) -> None:
    """Vary the number of jobs, the number of devices, and the size of a model, all with the same budget."""
    table = []
    cases = {f"{count} jobs": {"jobs": count} for count in (1, 2, 4, 8)}
    cases |= {f"{count} devices": {"devices": count} for count in (1, 2) if settings.device == "cpu"}
    cases |= {f"{factor} x layers": {"layers": int(settings.layers * factor)} for factor in (0.5, 1, 2)}
    if settings.quick:
        cases = {"2 jobs": cases["2 jobs"]}
    for name, changes in cases.items():
        fewer = SimpleNamespace(**{**vars(settings), "jobs": 4, **changes})
        run = Run(fewer, jobs_of(fewer, fewer.jobs, max(1, settings.steps // 2)))
        over = state_bytes(fewer) / parse_bytes(settings.budget)
        speed = run.samples_per_s * fewer.layers / settings.layers
        table.append([name, f"{over:.2f}", f"{run.samples_per_s:.2f}", f"{speed:.2f}", f"{run.useful_share:.1%}"])
        print(table[-1], flush=True)
        rows += [
            Row(name=name, metric="throughput", value=run.samples_per_s, unit="samples/s"),
            Row(name=name, metric="throughput by the layers of a model", value=speed, unit="samples/s"),
            Row(name=name, metric="state over budget", value=over, unit=""),
            Row(name=name, metric="useful computation", value=run.useful_share, unit="of the time"),
        ]
    show("scaling", ["", "state/budget", "samples/s", "times layers", "useful"], table)


def equality(settings: Any, rows: list[Row]) -> None:
    """Compare the losses of two concurrent jobs with the plain loop's, and measure the peak."""
    jobs = jobs_of(settings, 2, 3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {job.name: train_plainly(job, settings.device, (job.steps or 1) - 1)[0] for job in jobs}
    torch.set_num_threads(num_threads)
    run = Run(settings, jobs, verify=True)
    is_equal = all(list(run.losses[name]) == losses for name, losses in expected.items())
    measured = max(device.measured_peak_bytes for device in run.devices)
    budget = run.devices[0].budget_bytes
    print(f"losses equal: {is_equal}; measured peak {format_bytes(measured)} of {format_bytes(budget)}", flush=True)
    rows.append(Row(name="fleet", metric="losses equal to plain training", value=is_equal, unit=""))
    rows.append(Row(name="fleet", metric="measured peak over budget", value=measured / budget, unit=""))


def draw(path: Path, run: Run) -> None:
    """Draw units per device in the middle of the run, and the losses."""
    middle_s = (run.begin_s + run.end_s) / 2
    rows: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for entry in sorted(run.records, key=lambda record: record.start_s):
        if abs(entry.start_s - middle_s) < 15:
            rows[f"device {entry.device}"].append(
                (entry.start_s + entry.stall_s - middle_s, entry.end_s - middle_s, entry.job)
            )
    gantt(path.with_suffix(".units.png"), dict(sorted(rows.items())), title="which job is on which device")
    curves(path.with_suffix(".losses.png"), run.losses, title="losses")


def parsed(description: str, arguments: list[str] | None) -> Any:
    """Return the settings of a run."""
    options = parser(description)
    options.add_argument("--model", default="gpt", choices=["gpt", "vit"])
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=768)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--batches", type=int, nargs="+", default=[8, 16], help="the last one is the largest")
    options.add_argument("--devices", type=int, default=2)
    options.add_argument("--jobs", type=int, default=12)
    options.add_argument("--steps", type=int, default=4, help="of jobs with the largest batch")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--budget", help="bytes of a device; by default a model's state over 4.05")
    options.add_argument("--host", help="bytes of host memory below the devices; by default all goes to disk")
    options.add_argument("--part", action="append", choices=list(PARTS))
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.layers, settings.width, settings.length, settings.budget, settings.host = 2, 64, 32, "2304KiB", None
        settings.batches, settings.jobs, settings.steps, settings.rounds = [8, 16], 2, 2, 1
    settings.budget = settings.budget or int(state_bytes(settings) / 4.05)
    return settings


def configuration(settings: Any) -> dict[str, Any]:
    """Return what a file of results says about a run."""
    names = ("model", "layers", "width", "length", "batches", "devices", "jobs", "steps", "rounds", "budget", "host")
    data = "images with planted classes"
    if settings.model == "gpt":
        data = (
            "tinyshakespeare"
            if text_file().is_file()
            else "bytes in order; tinyshakespeare was not beside the checkout"
        )
    return {"data": data, **{name: getattr(settings, name) for name in names}}


PARTS = {"equality": equality, "rounds": rounds_of, "ablations": ablations, "scaling": scaling}


def main(arguments: list[str] | None = None) -> list[Row]:
    settings = parsed(__doc__ or "", arguments)
    rows: list[Row] = []
    share = state_bytes(settings) / parse_bytes(settings.budget)
    print(f"a model's state: {format_bytes(state_bytes(settings))}, {share:.2f} budgets")
    for name, part in PARTS.items():
        if name in (settings.part or PARTS):
            part(settings, rows)
    write(settings.json, configuration(settings), rows, device=settings.device)
    return rows


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["benchmarks.fleet_peers"])
    main()
