"""Rates of reading rows of features from memory, a disk and a CUDA device, next to the usual alternatives.

- gather: rows of 64 B to 4 KiB, 10^4 to 10^6 of them, from a table in memory: other ones at each call, uniform and by a
  power law, and the same ones again, which are cached then.
- disk: random rows of a file with cold cache: O_DIRECT where we read; for those that read through the page cache
  its pages are dropped before each turn. Beside it `numpy.memmap` as it is and with MADV_RANDOM, slices of
  safetensors, and a C program that reads as many blocks of the same size at the same depth and does nothing with them
  (pread_probe.c: the limit).
- cache: random rows of a file of which a share is in the page cache, beside `numpy.load(mmap_mode="r")`, and beside the
  same reads past the cache. The share is made anew before each read, since maps change it.
- depth: rows of 8 KiB a second, and processor time a row, by open requests, through io_uring and with threads.
- epochs: examples/tiered_graphsage.py under host budgets, beside all rows in memory; planned and measured hit rates.
- link (CUDA): rows read in place beside the CPU's gather with a pinned copy, a table on the device (the upper limit)
  and the bandwidth of a plain copy (the link's limit).

Run it with ``python -m benchmarks.unified --disk /nvme --json unified.json``.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.common import Row, paired_ratio, parser, show, synchronize, write
from penstock import native, unified
from penstock.unified._disk import RowFiles
from penstock.unified._files import find_table
from penstock.unified._rows import RowType

ROW_BYTES = (64, 256, 1024, 4096)
COUNTS = (10_000, 100_000, 1_000_000)
MOST_BYTES = 2 * 2**30
"""The most bytes of a table in memory, and of a result."""


def rows_like(access: str, num_rows: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return row numbers, uniform or by a power law over shuffled rows."""
    if access != "power law":
        return torch.randint(num_rows, (count,), generator=generator)
    rank = (torch.rand(count, generator=generator, dtype=torch.float64) ** 4 * num_rows).long()
    return rank * 2_654_435_761 % num_rows  # far apart


def turns(calls: dict[str, Callable[[], Any]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of each call in every round; which comes first changes, since it warms the others' rows."""
    results: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name, call in order.sample(list(calls.items()), len(calls)):
            synchronize(device)
            start_s = time.perf_counter()
            call()
            synchronize(device)
            if number:  # the first round touches memory for the first time
                results[name].append(time.perf_counter() - start_s)
    return results


def each_of(indexes: list[torch.Tensor], read: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    """Return a function that reads by one index after the other, as a training does, whose batches have other rows."""
    indexes_in_turn = itertools.cycle(indexes)
    return lambda: read(next(indexes_in_turn))


def gather(settings: argparse.Namespace, rows: list[Row]) -> None:
    table, generator = [], torch.Generator().manual_seed(0)
    for row_bytes in settings.row_bytes:
        features = torch.empty(min(MOST_BYTES // row_bytes, 4_000_000), row_bytes // 4).normal_()
        wrapped = unified.wrap(features)
        for count in settings.counts:
            if count * row_bytes > MOST_BYTES:
                continue
            for access in ("uniform", "power law", "the same rows again"):
                number = 1 if access == "the same rows again" else settings.rounds + 1
                indexes = [rows_like(access, len(features), count, generator) for _ in range(3 * number)]
                assert torch.equal(wrapped[indexes[0]], features[indexes[0]])
                calls = {
                    "penstock": each_of(indexes[:number], wrapped.__getitem__),
                    "index_select": each_of(indexes[number : 2 * number], partial(features.index_select, 0)),
                    "index": each_of(indexes[2 * number :], features.__getitem__),
                }
                seconds = turns(calls, settings.rounds)
                name = f"{row_bytes} B x {count:,}, {access}"
                ratio, low, high = paired_ratio(seconds["index_select"], seconds["penstock"])
                rate = count * row_bytes / median(seconds["penstock"]) / 1e9
                table.append([name, f"{rate:.2f} GB/s", f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
                              f"{paired_ratio(seconds['index'], seconds['penstock'])[0]:.2f}"])  # fmt: skip
                print(table[-1], flush=True)
                rows += [
                    Row(name=name, metric="rate from memory", value=rate, unit="GB/s"),
                    Row(name=name, metric="index_select's time over ours", value=ratio, unit="", peer="index_select",
                        ratio=ratio),
                    Row(name=name, metric="tensor[index]'s time over ours", unit="", peer="tensor[index]",
                        value=(slower := paired_ratio(seconds["index"], seconds["penstock"])[0]), ratio=slower),
                    Row(name=name, metric="the same, 95% low", value=low, unit="", peer="index_select"),
                    Row(name=name, metric="the same, 95% high", value=high, unit="", peer="index_select"),
                ]  # fmt: skip
    show("rows from memory", ["", "ours", "index_select's time over ours", "tensor[index]'s"], table)


def drop(path: Path) -> None:
    """Drop the file's pages from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(settings: argparse.Namespace, rows: list[Row]) -> None:
    compiled = native.compile_source((Path(__file__).parent / "pread_probe.c").read_text(), "pread_probe", openmp=True)
    assert compiled is not None, "the probe needs a C compiler"
    compiled.probe.restype = ctypes.c_int64
    for row_bytes in settings.row_bytes:
        _disk_of(settings, rows, row_bytes, compiled)


def _disk_of(settings: argparse.Namespace, rows: list[Row], row_bytes: int, compiled: ctypes.CDLL) -> None:
    num_rows, width = settings.file_bytes // row_bytes, row_bytes // 4
    paths = {kind: settings.disk / f"benchmark-{row_bytes}.{kind}" for kind in ("rows", "npy", "safetensors")}
    features = torch.empty(num_rows, width).normal_()
    unified.write_features(paths["rows"], features)
    np.save(paths["npy"], features.numpy())
    save_file({"x": features}, paths["safetensors"])
    generator, count = torch.Generator().manual_seed(1), settings.disk_rows
    ours = unified.TieredFeatures(paths["rows"], host=_least(num_rows), in_flight=0)
    in_place = unified.TieredFeatures(paths["npy"], host=_least(num_rows), in_flight=0)
    depth, block = 64, max(512, row_bytes)
    state: dict[str, torch.Tensor] = {}

    def probe() -> None:
        offsets = 4096 + state["index"] * row_bytes // 512 * 512
        failed = compiled.probe(
            str(paths["rows"]).encode(), ctypes.c_void_p(offsets.data_ptr()), ctypes.c_int64(len(offsets)),
            ctypes.c_int64(block), ctypes.c_int64(depth),
        )  # fmt: skip
        assert not failed

    def mapped(advice: int | None) -> None:
        array = np.load(paths["npy"], mmap_mode="r")
        if advice is not None:
            array._mmap.madvise(advice)
        state["found"] = torch.from_numpy(array[state["few"].numpy()])

    def slices() -> None:
        with safe_open(paths["safetensors"], "pt") as file:
            whole = file.get_slice("x")
            state["found"] = torch.cat([whole[row : row + 1] for row in state["few"].tolist()])

    def read(source: unified.TieredFeatures, key: str) -> None:
        state["found"] = source[state[key]]

    calls: dict[str, tuple[str, Callable[[], None]]] = {
        "penstock": ("index", lambda: read(ours, "index")),
        "penstock, .npy in place": ("index", lambda: read(in_place, "index")),
        "C probe (the limit)": ("index", probe),
        "numpy.memmap, MADV_RANDOM": ("few", lambda: mapped(mmap.MADV_RANDOM)),
        "numpy.memmap": ("few", lambda: mapped(None)),
        "safetensors slices": ("few", slices),
    }
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(settings.rounds):
        for name, (key, call) in calls.items():
            state["index"] = torch.randint(num_rows, (count,), generator=generator)
            state["few"] = state["index"][: settings.few_rows]
            for path in paths.values():
                drop(path)
            start_s = time.perf_counter()
            call()
            rates[name].append(len(state[key]) / (time.perf_counter() - start_s))
            if "probe" not in name:
                assert torch.equal(state["found"], features[state[key]])
    _report(rows, f"{row_bytes} B, cold cache", rates, ours, in_place)
    for path in paths.values():
        path.unlink()
    for table in (ours, in_place):
        table.close()


def cache(settings: argparse.Namespace, rows: list[Row]) -> None:
    """Measure reads of a file that is in the page cache, whole, in part or not at all."""
    num_rows, width = settings.file_bytes // 1024 * 2 // 5, 256  # 800 MiB of 2 GiB
    path, generator, table = settings.disk / "benchmark-cache.npy", torch.Generator().manual_seed(3), []
    features = torch.empty(num_rows, width).normal_()
    np.save(path, features.numpy())
    for share in (1.0, 0.9, 0.5, 0.0):
        for count in (2_000, 10_000, 50_000):
            seconds: dict[str, list[float]] = {"penstock": [], "past the cache": [], "numpy's map": []}
            for number in range(settings.rounds + 1):
                for name, taken in seconds.items():
                    index = torch.randint(num_rows, (count,), generator=generator)
                    _cache_share(path, share)
                    with _reader(path, name, num_rows) as read:
                        start_s = time.perf_counter()
                        result = read(index)
                        if number:
                            taken.append(time.perf_counter() - start_s)
                    del read  # and with it the map, whose pages the cache would keep
                    assert torch.equal(result, features[index])
            row = f"{share:.0%} cached, {count:,} rows"
            for name, taken in seconds.items():
                ratio, low, high = paired_ratio(seconds["penstock"], taken)
                rate = count / median(taken)
                table.append([row, name, f"{rate:,.0f}", f"{ratio:.2f} [{low:.2f}, {high:.2f}]"])
                rows += [
                    Row(name=row, metric=f"rows a second, {name}", value=rate, unit="rows/s"),
                    Row(name=row, metric="our time over a peer's", value=ratio, unit="", peer=name, ratio=ratio),
                    Row(name=row, metric="the same, 95% low", value=low, unit="", peer=name),
                    Row(name=row, metric="the same, 95% high", value=high, unit="", peer=name),
                ]
    path.unlink()
    show("rows of 1 KiB of a file in the page cache", ["", "", "rows/s", "our time over its"], table)


@contextlib.contextmanager
def _reader(path: Path, name: str, num_rows: int) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Open the file, and read some rows as a loop of training has before."""
    some = torch.randint(num_rows, (2_000,))
    if name == "numpy's map":
        array = np.load(path, mmap_mode="r")
        array._mmap.madvise(mmap.MADV_RANDOM)
        array[some.numpy()]
        yield lambda index: torch.from_numpy(array[index.numpy()])
        return
    with unified.TieredFeatures(path, host=_least(num_rows)) as features:
        if name == "past the cache":
            assert features._store.files is not None
            features._store.files._cache = None
        features[some]
        yield lambda index: features[index]


def _cache_share(path: Path, share: float) -> None:
    """Make that share of the file's mebibytes cached, and no other."""
    drop(path)
    chosen = random.Random(4)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, path.stat().st_size, 2**20):
            if chosen.random() < share:
                os.pread(file.fileno(), 2**20, offset)


def depth(settings: argparse.Namespace, rows: list[Row]) -> None:
    """Measure the gain from open requests, and the processor time per row."""
    path, table, generator = settings.disk / "benchmark-depth.rows", [], torch.Generator().manual_seed(2)
    blocks = (torch.randn(4096, 2048) for _ in range(max(1, settings.file_bytes // (4096 * 8192))))
    result = find_table(unified.write_features(path, blocks))
    kind = RowType(result.shape[1:], result.dtype, result.dtype)
    count = min(settings.disk_rows, 10_000)
    out = kind.empty(count)
    ways = [(by_ring, requests) for requests in (1, 4, 16, 64) for by_ring in (False, True)]
    rates: dict[tuple[bool, int], tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    for _ in range(settings.rounds):
        for (by_ring, number), (seconds, processor) in rates.items():
            files = RowFiles([result], depth=number, by_ring=by_ring)
            drop(path)
            index = torch.randint(result.shape[0], (count,), generator=generator)
            start_s, used_s = time.perf_counter(), time.process_time()
            files.read(index, kind, out, None)
            seconds.append(time.perf_counter() - start_s)
            processor.append(time.process_time() - used_s)
            files.close()
    path.unlink()
    for (by_ring, number), (seconds, processor) in rates.items():
        rate, cost = count / median(seconds), 1e6 * median(processor) / count
        name = f"{number} open, {'io_uring' if by_ring else 'threads'}"
        table.append([name, f"{rate:,.0f}", f"{cost:.1f} us"])
        rows.append(Row(name=name, metric="rows of 8 KiB a second", value=rate, unit="rows/s"))
        rows.append(Row(name=name, metric="processor time a row", value=cost, unit="us"))
    show("rows of 8 KiB by open requests", ["requests", "rows/s", "processor time a row"], table)


def _least(num_rows: int) -> int:
    """Return a host budget with room for no rows."""
    return 4 * num_rows + 10 * 2**20


def _report(
    rows: list[Row],
    name: str,
    rates: dict[str, list[float]],
    ours: unified.TieredFeatures,
    in_place: unified.TieredFeatures,
) -> None:
    table = []
    for peer, peer_rates in rates.items():
        ratio, low, high = paired_ratio(rates["penstock"], peer_rates)
        table.append([peer, f"{median(peer_rates):,.0f}", f"{ratio:.2f} [{low:.2f}, {high:.2f}]"])
        rows += [
            Row(name=name, metric=f"rows a second, {peer}", value=median(peer_rates), unit="rows/s"),
            Row(name=name, metric="ours over a peer's rate", value=ratio, unit="", peer=peer, ratio=ratio),
            Row(name=name, metric="the same, 95% low", value=low, unit="", peer=peer),
            Row(name=name, metric="the same, 95% high", value=high, unit="", peer=peer),
        ]
    for what, features in (("aligned", ours), ("in place", in_place)):
        amplification = features.statistics().read_amplification
        table.append([f"bytes read a byte of a row, {what}", f"{amplification:.2f}", ""])
        rows.append(Row(name=name, metric=f"read amplification, {what}", value=amplification, unit=""))
    show(f"random rows from a file: {name}", ["", "rows/s", "ours over it"], table)


def epochs(settings: argparse.Namespace, rows: list[Row]) -> None:
    """Run the example's training under several budgets, in alternation, from the same seeds."""
    example = _example()
    graph, classes = example.made_up_graph(settings.nodes, 20 * settings.nodes, 16, 4.0)
    path = example.made_up_features(
        settings.disk / f"epochs-{settings.nodes}-{settings.width}.rows", classes, settings.width
    )
    train = torch.randperm(settings.nodes, generator=torch.Generator().manual_seed(0))[: settings.nodes // 50]
    scores = unified.expected_accesses(graph, train, [10, 5], batch_size=settings.batch)
    whole = settings.nodes * settings.width * 4
    budgets = {f"1/{share} of the bytes": whole // share for share in (16, 8, 4)} | {"all rows in memory": None}
    seconds: dict[str, list[float]] = {name: [] for name in budgets}
    if settings.device == "cuda":
        seconds["gathered by the CPU and copied"] = []
    results: dict[str, dict[str, Any]] = {}
    for number in range(settings.epochs + 1):
        for name, taken in seconds.items():
            budget = budgets.get(name)
            resident, cached = _resident_bytes(), _cached_bytes()
            with unified.TieredFeatures(path, host=budget, scores=scores, device=settings.device) as features:
                sampler = unified.NeighborSampler(graph, [10, 5], device=settings.device)
                rows_of = features if name in budgets else _Copied(features._host)
                loader = unified.Loader(
                    sampler, rows_of, train, batch_size=settings.batch, labels=classes.to(settings.device), seed=number
                )  # fmt: skip
                torch.manual_seed(0)
                model = example.GraphSAGE(settings.width, 64, 16).to(settings.device)
                optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
                synchronize(settings.device)
                start_s = time.perf_counter()
                losses = example.train_epoch(model, optimizer, loader, name)
                synchronize(settings.device)
                if number:  # the first of each warms up
                    taken.append(time.perf_counter() - start_s)
                times, counts = loader.statistics(), features.statistics()
                held = features.host_bytes - (features.in_flight_bytes or 0)
                held += max(features.in_flight_bytes or 0, times.peak_in_flight_bytes)
                results[name] = {
                    "last loss": losses[-1], "stall share": times.stall_s / times.wall_s,
                    "hit rate, measured": counts.hit_rate, "hit rate, planned": features.plan.hit_rate,
                    "share of the best hit rate": _oracle(loader, features) if number == settings.epochs else 0.0,
                    "bytes held over budget": held / budget if budget else 1.0,
                    "bytes of rows in flight, peak": times.peak_in_flight_bytes,
                    "resident set grew by": _resident_bytes() - resident,
                    "page cache grew by": _cached_bytes() - cached,
                    "rows a second from the disk": counts.disk_rows / counts.disk_s if counts.disk_s else 0.0,
                }  # fmt: skip
    table = []
    for name, figures in results.items():
        ratio, low, high = paired_ratio(seconds[name], seconds["all rows in memory"])
        table.append([name, f"{ratio:.2f} [{low:.2f}, {high:.2f}]", f"{figures['stall share']:.1%}",
                      f"{figures['hit rate, measured']:.1%}", f"{figures['hit rate, planned']:.1%}",
                      f"{figures['share of the best hit rate']:.1%}", f"{figures['rows a second from the disk']:,.0f}",
                      f"{figures['last loss']:.4f}"])  # fmt: skip
        rows.append(
            Row(
                name=name,
                metric="epoch over all in memory",
                value=ratio,
                unit="",
                peer="all rows in memory",
                ratio=ratio,
            )
        )
        rows += [Row(name=name, metric=metric, value=value, unit="") for metric, value in figures.items()]
        rows.append(Row(name=name, metric="epoch", value=median(seconds[name]), unit="s"))
    show(
        f"epochs of GraphSAGE, {settings.nodes:,} nodes, features of {whole / 2**30:.1f} GiB",
        ["", "epoch over all in memory", "waiting", "hit rate", "planned", "of the best", "rows/s from disk", "loss"],
        table,
    )  # fmt: skip
    path.unlink()


class _Copied:
    """Features as most loaders have them: gathered by the CPU into pinned memory, and copied."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def __getitem__(self, nodes: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(len(nodes), self.table.shape[1], pin_memory=True)
        torch.index_select(self.table, 0, nodes.cpu(), out=rows)
        return rows.to("cuda", non_blocking=True)


def _resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cached_bytes() -> int:
    """Return the bytes in the page cache."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Cached:")]
    return int(line.split()[1]) * 1024


def _oracle(loader: unified.Loader, features: unified.TieredFeatures) -> float:
    """Return the plan's hit rate over the one of as many rows chosen by the counts of ten epochs, on these counts."""
    num_hot = len(features.plan.host_rows) + len(features.plan.device_rows)
    samples = (
        loader._sample(epoch, number, seeds)[1]
        for epoch in range(10)
        for number, seeds in enumerate(loader._seeds_of(epoch))
    )
    counts = unified.count_accesses(samples, len(features))
    planned = counts[features.plan.host_rows].sum() + counts[features.plan.device_rows].sum()
    return float(planned / counts.sort(descending=True).values[:num_hot].sum())


def link(settings: argparse.Namespace, rows: list[Row]) -> None:
    """Measure gathering rows to a CUDA device."""
    generator, table = torch.Generator().manual_seed(0), []
    big = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(big, device="cuda")
    limit = len(big) / median(turns({"copy": lambda: there.copy_(big, non_blocking=True)}, 9, "cuda")["copy"]) / 1e9
    rows.append(Row(name="link", metric="bandwidth of a plain copy", value=limit, unit="GB/s"))
    for row_bytes in settings.row_bytes:
        features = unified.empty(min(MOST_BYTES // row_bytes, 4_000_000), row_bytes // 4)
        host = features.cpu().normal_()
        on_device, copied = host.cuda(), _Copied(host)
        for count in settings.counts:
            if count * row_bytes > MOST_BYTES // 2:
                continue
            for access in ("uniform", "power law"):
                index = rows_like(access, len(host), count, generator)
                index_there = index.cuda()
                calls = {
                    "penstock, in place": lambda rows=index_there, table=features: table[rows],
                    "penstock, sorted": lambda rows=index_there, table=features: unified.gather(table, rows, sort=True),
                    "CPU gather and pinned copy": lambda rows=index, table=copied: table[rows],
                    "table on the device": lambda rows=index_there, table=on_device: table.index_select(0, rows),
                }
                assert torch.equal(calls["penstock, in place"](), on_device[index_there])
                used = _processor_s(calls)
                seconds = turns(calls, settings.rounds, "cuda")
                name = f"{row_bytes} B x {count:,}, {access}"
                for peer, result in seconds.items():
                    rate = count * row_bytes / median(result) / 1e9
                    ratio = paired_ratio(result, seconds["penstock, in place"])[0]
                    table.append(
                        [name, peer, f"{rate:.2f} GB/s", f"{rate / limit:.1%}", f"{ratio:.2f}", f"{used[peer]:.4f} s"]
                    )
                    rows += [
                        Row(name=name, metric=f"rate, {peer}", value=rate, unit="GB/s", peer="penstock, in place",
                            ratio=ratio),
                        Row(name=name, metric=f"share of the link, {peer}", value=rate / limit, unit=""),
                        Row(name=name, metric=f"processor time, {peer}", value=used[peer], unit="s"),
                    ]  # fmt: skip
    show(
        f"rows to the device; a plain copy runs at {limit:.1f} GB/s",
        ["", "", "rate", "of the link", "time over ours", "processor"], table,
    )  # fmt: skip


def _processor_s(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the seconds of all cores for one call of each."""
    results = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start_s = time.process_time()
        call()
        torch.cuda.synchronize()
        results[name] = time.process_time() - start_s
    return results


def _example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "tiered_graphsage.py"
    spec = importlib.util.spec_from_file_location("tiered_graphsage", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--part", action="append", choices=["gather", "disk", "cache", "depth", "epochs", "link"])
    options.add_argument("--row-bytes", type=int, nargs="+", default=list(ROW_BYTES))
    options.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--file-bytes", type=int, default=2 * 2**30, help="of a file of rows")
    options.add_argument("--disk-rows", type=int, default=50_000, help="read at once")
    options.add_argument("--few-rows", type=int, default=2_000, help="read at once by what is slow")
    options.add_argument("--nodes", type=int, default=2**18, help="of the graph of epochs")
    options.add_argument("--width", type=int, default=2048)
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--epochs", type=int, default=5)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.row_bytes, settings.counts, settings.rounds, settings.file_bytes = [64, 1024], [2000], 2, 32 * 2**20
        settings.disk_rows, settings.few_rows, settings.nodes, settings.epochs = 1000, 50, 16384, 1
    parts = {"gather": gather, "disk": disk, "cache": cache, "depth": depth, "epochs": epochs}
    if settings.device == "cuda":
        parts["link"] = link
    rows: list[Row] = []
    for name, part in parts.items():
        if name in (settings.part or parts):
            part(settings, rows)
    names = (
        "row_bytes",
        "counts",
        "rounds",
        "file_bytes",
        "disk_rows",
        "few_rows",
        "nodes",
        "width",
        "batch",
        "epochs",
    )
    write(settings.json, {name: getattr(settings, name) for name in names}, rows, device=settings.device)
    return rows


if __name__ == "__main__":
    main()
