"""Twelve jobs of a GPT on tinyshakespeare, each several times a device's budget, beside plain training and ablations.

The setting of Hydra's paper at a machine's size: 6 learning rates x 2 batch sizes, AdamW. Devices are CPU threads of
one core each, or CUDA devices under a cap. Peers run in turn with the fleet, several rounds: plain training of two such
models side by side, each in a process and on a core of its own (what two devices could reach if everything fitted), and
naive model parallelism of one after the other, which is half of that by definition of its one busy device. The same
two trainings are also run with as many bytes moved beside them as the fleet moves, in vain: on a CPU lanes take cores,
caches and memory bandwidth from the computation, which a GPU's copy engines do not.
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Row, paired_ratio, parser, show, write
from penstock import fleet
from penstock.report import curves, gantt
from penstock.testing import GPT
from penstock.tiers import Budget, Handle, waterfall_for
from penstock.units import format_bytes, parse_bytes

TEXT = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare" / "input.txt"
RATES = (1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 6e-3)
BATCHES = (8, 16)
PIECE_BYTES = 4 * 2**20


def batches(batch: int, length: int, num_batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random places of the text, the same every time; random bytes where the text is missing."""
    generator = torch.Generator().manual_seed(0)
    raw = TEXT.read_bytes() if TEXT.is_file() else bytes(range(256)) * 4096
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    for _ in range(num_batches):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_job(rate: float, batch: int, steps: int, layers: int, width: int, length: int) -> fleet.Job:
    return fleet.Job(
        name=f"lr={rate} batch={batch}",
        model=lambda: GPT(num_layers=layers, width=width, num_heads=width // 64, context=length),
        data=lambda: list(batches(batch, length, 64)),
        loss=lambda model, given: model(*given),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, foreach=False),
        steps=steps,
        tags={"lr": rate, "batch": batch},
    )


def jobs_of(given: Any, num_jobs: int, steps: int) -> list[fleet.Job]:
    """All see about as many samples: half the batch, twice the steps."""
    made = [
        make_job(rate, batch, steps * BATCHES[-1] // batch, given.layers, given.width, given.length)
        for batch in BATCHES
        for rate in RATES
    ]
    return made[:: len(made) // num_jobs][:num_jobs]


class Traffic:
    """So many bytes that leave and come back beside a step, on lanes of their own, and that nobody needs."""

    def __init__(self, disk: Path, out_bytes: int, in_bytes: int):
        self._waterfall = waterfall_for(torch.device("cpu"), Budget(disk=disk))
        pieces = [
            torch.ones(PIECE_BYTES, dtype=torch.uint8).untyped_storage()
            for _ in range(max(1, out_bytes // PIECE_BYTES))
        ]
        self._pieces = pieces
        self._below = [self._waterfall.park(pieces[at % len(pieces)]) for at in range(in_bytes // PIECE_BYTES)]
        self._leaving: list[Handle] = []
        self._waterfall.drain()

    def begin(self) -> None:
        """Both lanes have the step's bytes to move from here on."""
        self._leaving = [self._waterfall.park(one) for one in self._pieces]
        for handle in self._below:
            handle.prefetch()

    def end(self) -> None:
        """Waits for them."""
        for handle in self._leaving:
            handle.finish_out()
            handle.release()
        for handle in self._below:
            handle.get()


def train_plainly(
    job: fleet.Job, device: str, steps: int, traffic: Traffic | None = None
) -> tuple[list[float], float, int]:
    """Losses, seconds and samples of the loop that everybody writes, after one step to warm up."""
    torch.manual_seed(job.seed)
    model = job.model().to(device)
    optimizer = job.optimizer(list(model.parameters()))
    losses, start_s, num_samples = [], 0.0, 0
    for number, batch in zip(range(steps + 1), job.data(), strict=False):
        if number == 1:
            start_s = time.perf_counter()
        if traffic is not None:
            traffic.begin()
        loss = job.loss(model, tuple(one.to(device) for one in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if traffic is not None:
            traffic.end()
        losses.append(loss.item())
        num_samples += len(batch[0]) if number else 0
    return losses, time.perf_counter() - start_s, num_samples


def side_by_side(given: Any, steps: int, moved: tuple[int, int] = (0, 0)) -> float:
    """Samples per second of two plain trainings at once, each in a process with one thread.

    ``moved``: bytes out and in per sample that each moves beside its steps, in vain.
    """
    command = [sys.executable, "-m", "benchmarks.fleet_training", "--plain", str(steps)]
    command += [f"--{name}={getattr(given, name)}" for name in ("layers", "width", "length", "disk")]
    command += ["--moved", str(moved[0]), str(moved[1])]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(given.devices)]
    found = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    return sum(one["samples"] / one["seconds"] for one in found)


def plain_child(given: Any) -> None:
    """One of them: half of its steps with the small batch, half with the large, as the fleet's jobs."""
    torch.set_num_threads(1)
    samples, seconds = 0, 0.0
    for batch in BATCHES:
        job = make_job(3e-4, batch, 1, given.layers, given.width, given.length)
        out_bytes, in_bytes = (one * batch for one in given.moved)
        traffic = Traffic(given.disk, out_bytes, in_bytes) if out_bytes + in_bytes else None
        _, taken_s, count = train_plainly(job, "cpu", given.plain * BATCHES[-1] // batch, traffic)
        samples, seconds = samples + count, seconds + taken_s
    print(json.dumps({"samples": samples, "seconds": seconds}))


class Run:
    """A fleet's run, measured while all devices had work."""

    def __init__(self, given: Any, jobs: list[fleet.Job], **options: Any):
        options = {"disk": given.disk, "progress": None, **options}
        with fleet.Fleet(devices_of(given), given.budget, **options) as made:
            for job in jobs:
                made.add(job)
            self.results = made.wait()
            self.records = made.records
        by_device: dict[int, list[fleet.UnitRecord]] = defaultdict(list)
        for record in self.records:
            by_device[record.device].append(record)
        self.begin_s = max(min(one.start_s for one in records) for records in by_device.values())
        self.end_s = min(max(one.end_s for one in records) for records in by_device.values())
        batch_of = {job.name: job.tags["batch"] for job in jobs}
        inside = [one for one in self.records if self.begin_s <= one.start_s and one.end_s <= self.end_s]
        num_units = {name: units_of_a_batch(self.records, name) for name in batch_of}
        samples = sum(batch_of[one.job] / num_units[one.job] for one in inside)
        span_s = self.end_s - self.begin_s
        self.samples_per_s = samples / span_s
        total_s = span_s * len(by_device)
        self.stall_share = sum(one.stall_s for one in inside) / total_s
        self.recompute_share = sum(one.recompute_s for one in inside) / total_s
        computes_s = sum(one.end_s - one.start_s - one.stall_s for one in inside)
        self.useful_share = computes_s / total_s - self.recompute_share
        self.stall_s = sum(one.stall_s for one in inside)
        devices, all_samples = self.results.devices, sum(batch_of[one.job] / num_units[one.job] for one in self.records)
        self.moved = (
            int(sum(one.parked_bytes for one in devices) / all_samples),
            int(sum(one.fetched_bytes for one in devices) / all_samples),
        )
        """Bytes out and in per sample."""
        self.failed = [one for one in self.results.values() if one.state is not fleet.JobState.DONE]


def units_of_a_batch(records: list[fleet.UnitRecord], job: str) -> int:
    """Units that one mini-batch of a job takes: all its shards forward but the last, and all backward."""
    num_shards = 1 + max(one.shard for one in records if one.job == job)
    return 2 * num_shards - 1


def devices_of(given: Any) -> list[fleet.Device]:
    if given.device == "cuda":
        return [fleet.Device(name=f"cuda:{at}") for at in range(torch.cuda.device_count())]
    return [fleet.Device(name="cpu", threads=1) for _ in range(given.devices)]


def state_bytes(given: Any) -> int:
    """Parameters, gradients and AdamW's state of one model."""
    with torch.device("meta"):
        model = GPT(num_layers=given.layers, width=given.width, num_heads=given.width // 64, context=given.length)
    return 4 * sum(one.nbytes for one in model.parameters())


def rounds_of(given: Any, rows: list[Row]) -> None:
    """The fleet and plain training in turn."""
    ours, plain, moving, shares = [], [], [], []
    for number in range(given.rounds):
        before = side_by_side(given, given.steps)
        run = Run(given, jobs_of(given, given.jobs, given.steps))
        after = side_by_side(given, given.steps)
        assert not run.failed, run.results
        ours.append(run.samples_per_s)
        plain.append((before + after) / 2)
        moving.append(side_by_side(given, given.steps, run.moved))
        shares.append((run.useful_share, run.stall_share, run.recompute_share))
        print(
            f"round {number + 1}: fleet {ours[-1]:.2f} samples/s, {given.devices} plain trainings side by side "
            f"{plain[-1]:.2f} ({before:.2f} before, {after:.2f} after), and {moving[-1]:.2f} with as many bytes moved "
            f"beside them; useful {shares[-1][0]:.1%}, stalls "
            f"{shares[-1][1]:.1%}, recomputes {shares[-1][2]:.1%}",
            flush=True,
        )
    middle, low, high = paired_ratio(ours, plain)
    peer = f"{given.devices} plain trainings side by side"
    rows += [
        Row(name="fleet", metric="throughput", value=median(ours), unit="samples/s", peer=peer, ratio=middle),
        Row(name="fleet", metric="the same, 95% low", value=low, unit="", peer=peer),
        Row(name="fleet", metric="the same, 95% high", value=high, unit="", peer=peer),
        Row(name="fleet", metric="useful computation", value=median(one[0] for one in shares), unit="of the time"),
        Row(name="fleet", metric="stalls", value=median(one[1] for one in shares), unit="of the time"),
        Row(name="fleet", metric="recomputation", value=median(one[2] for one in shares), unit="of the time"),
    ]
    as_moving = paired_ratio(ours, moving)[0]
    peer += ", each beside as many bytes moved"
    rows.append(Row(name="fleet", metric="the same", value=median(ours), unit="samples/s", peer=peer, ratio=as_moving))
    rows.append(Row(name=peer, metric="throughput", value=median(moving), unit="samples/s"))
    statistics = run.results.devices
    rows += [
        Row(name="fleet", metric="peak", value=max(one.peak_bytes for one in statistics), unit="bytes"),
        Row(name="fleet", metric="budget", value=statistics[0].budget_bytes, unit="bytes"),
        Row(name="fleet", metric="state of a model", value=state_bytes(given), unit="bytes"),
        Row(name="fleet", metric="state over budget", value=state_bytes(given) / statistics[0].budget_bytes, unit=""),
        Row(name="fleet", metric="moved in", value=sum(one.fetched_bytes for one in statistics), unit="bytes"),
        Row(name="fleet", metric="moved out", value=sum(one.parked_bytes for one in statistics), unit="bytes"),
    ]
    print(f"throughput over plain: {middle:.3f} [{low:.3f}, {high:.3f}]; as many bytes moved: {as_moving:.3f}")
    if given.json:
        draw(given.json, run)


def ablations(given: Any, rows: list[Row]) -> None:
    """What each part brings: the same few jobs, one thing switched off."""
    jobs = jobs_of(given, 4, max(1, given.steps // 2))
    off: dict[str, Callable[[], dict[str, Any]]] = {
        "all on": dict,
        "no double buffer": lambda: {"ablation": fleet.Ablation(double_buffer=False)},
        "no SHARP": lambda: {"ablation": fleet.Ablation(sharp=False)},
        "always recompute": lambda: {"ablation": fleet.Ablation(recompute=True)},
        "never recompute": lambda: {"ablation": fleet.Ablation(recompute=False)},
        "scheduler fifo": lambda: {"scheduler": "fifo"},
        "scheduler shortest-first": lambda: {"scheduler": "shortest-first"},
        "scheduler random": lambda: {"scheduler": "random"},
        "host memory only": lambda: {"host_budget": "8GiB", "disk": None},
        "host memory and disk": lambda: {"host_budget": "512MiB"},
    }
    table, first = [], 0.0
    for name, options in off.items():
        start_s = time.perf_counter()
        run = Run(given, jobs, **options())
        wall_s = time.perf_counter() - start_s
        first = first or run.samples_per_s
        moved = sum(one.fetched_bytes + one.parked_bytes for one in run.results.devices)
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


def equality(given: Any, rows: list[Row]) -> None:
    """Losses of two jobs at once equal to the loop's, and the measured peak."""
    jobs = jobs_of(given, 2, 3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {job.name: train_plainly(job, given.device, (job.steps or 1) - 1)[0] for job in jobs}
    torch.set_num_threads(num_threads)
    run = Run(given, jobs, verify=True)
    is_equal = all(list(run.results[name].losses) == losses for name, losses in expected.items())
    measured = max(one.measured_peak_bytes for one in run.results.devices)
    budget = run.results.devices[0].budget_bytes
    print(f"losses equal: {is_equal}; measured peak {format_bytes(measured)} of {format_bytes(budget)}", flush=True)
    rows.append(Row(name="fleet", metric="losses equal to plain training", value=is_equal, unit=""))
    rows.append(Row(name="fleet", metric="measured peak over budget", value=measured / budget, unit=""))


def draw(path: Path, run: Run) -> None:
    """Units per device in the middle of the run, and the losses."""
    middle_s = (run.begin_s + run.end_s) / 2
    rows: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for one in sorted(run.records, key=lambda record: record.start_s):
        if abs(one.start_s - middle_s) < 15:
            rows[f"device {one.device}"].append((one.start_s + one.stall_s - middle_s, one.end_s - middle_s, one.job))
    gantt(path.with_suffix(".units.png"), dict(sorted(rows.items())), title="which job is on which device")
    curves(path.with_suffix(".losses.png"), {name: one.losses for name, one in run.results.items()}, title="losses")


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--width", type=int, default=384)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--devices", type=int, default=2)
    options.add_argument("--jobs", type=int, default=12)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--budget", default="108MiB")
    options.add_argument("--part", action="append", choices=["equality", "rounds", "ablations"])
    options.add_argument("--plain", type=int, default=0, help="used by the benchmark itself")
    options.add_argument("--moved", type=int, nargs=2, default=(0, 0), help="used by the benchmark itself")
    given = options.parse_args(arguments)
    if given.plain:
        plain_child(given)
        return []
    if given.quick:
        given.layers, given.width, given.length, given.budget = 4, 64, 32, "4MiB"
        given.jobs, given.steps, given.rounds = 4, 2, 1
    rows: list[Row] = []
    share = state_bytes(given) / parse_bytes(given.budget)
    print(f"a model's state: {format_bytes(state_bytes(given))}, {share:.2f} budgets")
    parts = {"equality": equality, "rounds": rounds_of, "ablations": ablations}
    for name, part in parts.items():
        if name in (given.part or parts):
            part(given, rows)
    names = ("layers", "width", "length", "devices", "jobs", "steps", "rounds", "budget")
    text = "tinyshakespeare" if TEXT.is_file() else "bytes in order; tinyshakespeare was not beside the checkout"
    write(given.json, {"text": text, **{name: getattr(given, name) for name in names}}, rows)
    return rows


if __name__ == "__main__":
    main()
