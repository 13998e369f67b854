"""Activation offloading against keeping, recomputing and `save_on_cpu`: step time, activation peak, SSD wear.

    python -m benchmarks.offload                        # CPU: GPT 8 x 512, 16 x 512 tokens; about 25 minutes on 2 cores
    python -m benchmarks.offload --device cuda          # a slice of a large model, bf16
    python -m benchmarks.offload --quick                # seconds

All methods train the same model from the same weights on the same batches, in alternation, in one process.
"""

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Row, interleaved, paired_ratio, parser, show, write
from penstock import offload, probe
from penstock.errors import PenstockError
from penstock.report import throughput_curve
from penstock.testing import GPT
from penstock.tiers import Budget, Event, Waterfall, ssd_life_s, waterfall_for
from penstock.units import format_bytes, format_duration, format_rate

PLAIN, CHECKPOINT, BOTH = "plain", "checkpoint", "checkpoint + offloaded inputs"


@dataclass(frozen=True, kw_only=True)
class Size:
    num_layers: int
    width: int
    num_heads: int
    length: int
    batches: tuple[int, ...]
    rounds: int
    curve_rounds: int
    dtype: torch.dtype = torch.float32


def size_of(device: str, quick: bool) -> Size:
    if device == "cuda" and not quick:
        return Size(
            num_layers=3,
            width=8192,
            num_heads=64,
            length=1024,
            batches=(4, 8, 16),
            rounds=20,
            curve_rounds=5,
            dtype=torch.bfloat16,
        )
    if device == "cuda":
        return Size(
            num_layers=4,
            width=4096,
            num_heads=32,
            length=1024,
            batches=(4, 8),
            rounds=11,
            curve_rounds=4,
            dtype=torch.bfloat16,
        )
    if quick:
        return Size(num_layers=3, width=128, num_heads=4, length=128, batches=(2, 4), rounds=4, curve_rounds=3)
    return Size(num_layers=8, width=512, num_heads=8, length=512, batches=(4, 8, 16), rounds=20, curve_rounds=4)


class Method:
    """A way to train: its own copy of the model, and the context around forward and backward."""

    def __init__(self, name: str, size: Size, device: str, disk: Path, quick: bool):
        self.name = name
        torch.manual_seed(0)
        self.model = GPT(
            num_layers=size.num_layers,
            width=size.width,
            num_heads=size.num_heads,
            context=size.length,
            checkpointed=name in (CHECKPOINT, BOTH),
        ).to(device=device, dtype=size.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.offloader = self._offloader(disk, quick)
        self.losses: list[torch.Tensor] = []

    def _offloader(self, disk: Path, quick: bool) -> offload.Offloader | None:
        options: dict[str, Any] = {"min_size": "16KiB", "max_stall": 1.0} if quick else {}
        if self.name == BOTH:
            options["checkpoint_inputs_only"] = True
            options["min_saving"] = 0.0
        if self.name.endswith("to host") or (self.name == BOTH and self.model.token.weight.is_cuda):
            return offload.activations(self.model, host="80GiB", **options)
        if self.name.endswith("to disk") or self.name == BOTH:
            return offload.activations(self.model, disk=disk, **options)
        return None

    def forward_and_backward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with self._context():
            loss = self.model(*batch)
            loss.backward()
        self.losses.append(loss.detach())

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.forward_and_backward(batch)
        self.optimizer.step()

    def peak(self, batch: tuple[torch.Tensor, torch.Tensor], device: str) -> probe.PeakReport:
        self.optimizer.zero_grad(set_to_none=False)
        return probe.peak_bytes(lambda: self.forward_and_backward(batch), device=device)

    def close(self) -> None:
        if self.offloader is not None:
            self.offloader.close()

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self.offloader is not None:
            return self.offloader
        if self.name == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return contextlib.nullcontext()


def methods_for(device: str) -> list[str]:
    if device == "cuda":
        return [PLAIN, "Penstock to host", "Penstock to disk", CHECKPOINT, BOTH, "save_on_cpu"]
    return [PLAIN, "Penstock to disk", CHECKPOINT, BOTH]


def batch_of(size: Size, batch: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    tokens = torch.randint(256, (batch, size.length + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def compare(size: Size, device: str, disk: Path, quick: bool) -> list[Row]:
    """Compare methods at the largest batch: paired times, peaks, and equality of losses and gradients with plain."""
    methods = [Method(name, size, device, disk, quick) for name in methods_for(device)]
    batch = batch_of(size, size.batches[-1], device)
    for method in methods:  # two steps to record, plan and warm up
        method.step(batch)
        method.step(batch)
    checked = [method for method in methods if method.name.startswith("Penstock")]
    num_equal = 0

    def check() -> None:
        nonlocal num_equal
        num_equal += all(_equal(methods[0], method) for method in checked)

    steps = {method.name: _bound(method, batch) for method in methods}
    seconds = interleaved(steps, rounds=size.rounds, device=device, after_round=check)
    peaks = {method.name: method.peak(batch, device) for method in methods}
    rows = [Row(name="gradients and losses equal to plain", metric="steps", value=num_equal, unit=f"of {size.rounds}")]
    lines = []
    for method in methods:
        ratio, low, high = paired_ratio(seconds[method.name], seconds[PLAIN])
        share = peaks[method.name].activation_bytes / peaks[PLAIN].activation_bytes
        step_s = median(seconds[method.name])
        rows += [
            Row(name=method.name, metric="step time", value=step_s, unit="s", peer=PLAIN, ratio=ratio),
            Row(name=method.name, metric="step time ratio, 95% low", value=low, unit="", peer=PLAIN),
            Row(name=method.name, metric="step time ratio, 95% high", value=high, unit="", peer=PLAIN),
            Row(
                name=method.name, metric="activation peak", value=peaks[method.name].activation_bytes, unit="bytes",
                peer=PLAIN, ratio=share,
            ),
            Row(name=method.name, metric="device peak", value=peaks[method.name].peak_bytes, unit="bytes"),
        ]  # fmt: skip
        stall = ""
        if method.offloader is not None:
            statistics = method.offloader.statistics()
            stall = format_duration(statistics.stall_s)
            rows += _traffic(method, statistics, step_s, disk)
        lines.append(
            [
                method.name,
                f"{step_s:.3f} s",
                f"{ratio:.3f} [{low:.3f}, {high:.3f}]",
                format_bytes(peaks[method.name].activation_bytes),
                f"{share:.1%}",
                stall,
            ]
        )
    header = ["method", "median step", "ratio to plain [95%]", "activation peak", "of plain's", "stall"]
    show(f"batch {size.batches[-1]} x {size.length}: {size.rounds} rounds in turn", header, lines)
    print(f"losses and gradients equal to plain, bit for bit, in {num_equal} of {size.rounds} steps")
    if device == "cuda":
        rows += _hidden_fraction(methods, peaks, batch, disk)
    for method in methods:
        method.close()
    return rows


def _bound(method: Method, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    return lambda: method.step(batch)


def _equal(plain: Method, other: Method) -> bool:
    pairs = zip(plain.model.parameters(), other.model.parameters(), strict=True)
    return torch.equal(plain.losses[-1], other.losses[-1]) and all(torch.equal(a.grad, b.grad) for a, b in pairs)


def _traffic(method: Method, statistics: offload.OffloadStatistics, step_s: float, disk: Path) -> list[Row]:
    capacity_bytes = os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize
    rows = [
        Row(name=method.name, metric="moved out a step", value=statistics.parked_bytes, unit="bytes"),
        Row(name=method.name, metric="moved back a step", value=statistics.fetched_bytes, unit="bytes"),
        Row(name=method.name, metric="stall a step", value=statistics.stall_s, unit="s"),
        Row(name=method.name, metric="written to disk a step", value=statistics.written_to_disk_bytes, unit="bytes"),
    ]
    if statistics.written_to_disk_bytes:
        life_s = ssd_life_s(
            capacity_bytes=capacity_bytes, written_bytes=statistics.written_to_disk_bytes, duration_s=step_s
        )
        rows.append(Row(name=method.name, metric="projected SSD life", value=life_s, unit="s"))
        print(
            f"{method.name}: {format_bytes(statistics.written_to_disk_bytes)} written a step; at this rate a disk of "
            f"{format_bytes(capacity_bytes)} rated for 600 full writes lasts {format_duration(life_s)}"
        )
    return rows


def _hidden_fraction(
    methods: list[Method], peaks: dict[str, probe.PeakReport], batch: tuple[torch.Tensor, ...], disk: Path
) -> list[Row]:
    """Compare the offloaded share of activations with what the link hides: min(1/2, rate x forward / activations)."""
    plain = methods[0]
    with torch.no_grad():
        seconds = interleaved({"forward": lambda: plain.model(*batch)}, rounds=5, device="cuda")["forward"]
    rates = {lane.lane: lane.bandwidth_bytes_per_s for lane in probe.bandwidths(disk)}
    rows = []
    for method, lane in (("Penstock to host", "device->host"), ("Penstock to disk", "host->disk")):
        predicted = min(0.5, rates[lane] * median(seconds) / peaks[PLAIN].activation_bytes)
        reached = 1 - peaks[method].activation_bytes / peaks[PLAIN].activation_bytes
        rows += [
            Row(name=method, metric="fraction the link can hide", value=predicted, unit=""),
            Row(name=method, metric="fraction of the activation peak saved", value=reached, unit=""),
        ]
        print(f"{method}: the link can hide {predicted:.1%} of the activations; the peak fell by {reached:.1%}")
    return rows


def curve(size: Size, device: str, disk: Path, quick: bool, picture: Path | None) -> list[Row]:
    """Measure throughput against activation peak at several batch sizes: keep, recompute, offload."""
    rows: list[Row] = []
    lines: list[list[str]] = []
    points: dict[str, list[tuple[float, float, str]]] = {}
    for batch_size in size.batches:
        batch = batch_of(size, batch_size, device)
        methods = [Method(name, size, device, disk, quick) for name in methods_for(device)]
        for method in methods:
            method.step(batch)
            method.step(batch)
        seconds = interleaved({m.name: _bound(m, batch) for m in methods}, rounds=size.curve_rounds, device=device)
        for method in methods:
            peak_bytes = method.peak(batch, device).activation_bytes
            rate = batch_size / median(seconds[method.name])
            points.setdefault(method.name, []).append((peak_bytes, rate, str(batch_size)))
            name = f"{method.name}, batch {batch_size}"
            rows += [
                Row(name=name, metric="throughput", value=rate, unit="samples/s"),
                Row(name=name, metric="activation peak", value=peak_bytes, unit="bytes"),
            ]
            lines.append([method.name, str(batch_size), f"{rate:.2f}", format_bytes(peak_bytes)])
            method.close()
        del methods
        gc.collect()
    show("throughput against activation peak", ["method", "batch", "samples/s", "activation peak"], lines)
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        try:
            throughput_curve(picture, points, title="Keep, recompute or offload: throughput against activation peak")
            print(f"wrote {picture}")
        except PenstockError as error:
            print(f"no picture: {error}")
    return rows


def lanes(device: str, disk: Path, quick: bool) -> list[Row]:
    """Measure the lanes' bandwidth without computation, and the probe's on the same disk in the same round.

    It is measured twice: with every storage freed as soon as it has left, as in training, and with storages that stay
    referenced, as the probe's are. On a CPU, giving pages back takes time, and holds the lock that direct I/O needs to
    pin others. The first round is not counted: it writes blocks that the file system has not written before.
    """
    size_bytes = (4 if quick else 64) * 2**20
    waterfall = waterfall_for(device, Budget(disk=disk), max_in_flight=8 * size_bytes)
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(3 if quick else 9):
        probed = probe.bandwidths(disk, refresh=True)
        for what in ("freed as they leave", "held by somebody"):
            before = waterfall.events.num_recorded
            _move_some(waterfall, device, size_bytes, is_held=what == "held by somebody")
            for lane in probed if number else ():
                rate = _rate([event for event in waterfall.events.since(before) if event.lane == lane.lane])
                measured.setdefault((lane.lane, what), []).append((rate, rate / lane.bandwidth_bytes_per_s))
    waterfall.close()
    rows = []
    for (lane_name, what), pairs in measured.items():
        rate, share = (median(column) for column in zip(*pairs, strict=True))
        metric = f"rate while active, storages {what}"
        rows.append(Row(name=lane_name, metric=metric, value=rate, unit="bytes/s", peer="probe", ratio=share))
        low, high = (pick(share for _, share in pairs) for pick in (min, max))
        print(f"{lane_name}, {what}: {format_rate(rate)}, {share:.0%} of the probe's ({low:.0%} to {high:.0%})")
    return rows


def _move_some(waterfall: Waterfall, device: str, size_bytes: int, *, is_held: bool) -> None:
    """Park 24 storages and fetch them again, four ahead."""
    storages = [torch.ones(size_bytes, dtype=torch.uint8, device=device).untyped_storage() for _ in range(24)]
    held = list(storages) if is_held else []
    handles = []
    while storages:
        handles.append(waterfall.park(storages.pop()))
    waterfall.drain()
    held.clear()
    for index in range(24):
        handles[index].prefetch()
        if index >= 4:
            handles[index - 4].get()
    waterfall.drain()


def _rate(events: list[Event]) -> float:
    """Return bytes per second of the time in which at least one copy was in progress."""
    busy_s = covered_s = 0.0
    for event in sorted(events, key=lambda event: event.start_s):
        busy_s += max(0.0, event.end_s - max(event.start_s, covered_s))
        covered_s = max(covered_s, event.end_s)
    return sum(event.size_bytes for event in events) / busy_s


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__)
    options.add_argument("--picture", type=Path, help="write the curve here (.png)")
    options.add_argument("--only", choices=["compare", "curve", "lanes"], help="run one part")
    settings = options.parse_args(arguments)
    size = size_of(settings.device, settings.quick)
    picture = settings.picture or (settings.json.with_suffix(".png") if settings.json else None)
    configuration = {**{name: str(value) for name, value in vars(size).items()}, "device": settings.device}
    rows: list[Row] = []
    if settings.only in (None, "lanes") and settings.device == "cpu":
        rows += lanes(settings.device, settings.disk, settings.quick)
    if settings.only in (None, "compare"):
        rows += compare(size, settings.device, settings.disk, settings.quick)
        write(
            settings.json, configuration, rows, device=settings.device
        )  # what is measured is kept, whatever comes after
    if settings.only in (None, "curve"):
        rows += curve(size, settings.device, settings.disk, settings.quick, picture)
    write(settings.json, configuration, rows, device=settings.device)
    return rows


if __name__ == "__main__":
    main()
