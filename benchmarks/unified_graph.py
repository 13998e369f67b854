"""A graph in a file: writing it in bounded memory, and sampling it where it is.

- write: edges that a generator makes (`penstock.testing.graphs`) are sorted into a file; seconds, and peak memory.
- cold: nothing of the file is in the page cache; mini-batches as samplers draw them, with pages asked for hop by hop,
  beside the same map without that.
- warm: all of it is in the page cache; beside the same arrays in memory (``--warm``, since they must fit).

Run it with ``python -m benchmarks.unified_graph --disk /nvme --edges 1000000000 --json unified-graph.json``.
"""

import os
import resource
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import Row, paired_ratio, parser, show, write
from penstock import unified
from penstock.testing.graphs import MadeGraph
from penstock.units import format_bytes

FANOUTS = [10, 5]
SEEDS = 1024
BATCHES = 6


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--edges", type=int, default=200_000_000)
    options.add_argument("--degree", type=int, default=20, help="edges for each node")
    options.add_argument("--memory", default="1GiB", help="memory for sorting")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--warm", action="store_true", help="compare with the graph in memory too")
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.edges, settings.rounds, settings.warm = 2_000_000, 2, True
    made = MadeGraph(num_nodes=settings.edges // settings.degree, num_edges=settings.edges)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="penstock-graph-") as folder:
        path, before, start_s = Path(folder) / "edges.graph", _peak_bytes(), time.perf_counter()
        unified.write_graph(path, made.edges(), num_nodes=made.num_nodes, positions=False, memory=settings.memory)
        rows.append(Row(name="write", metric="time", value=time.perf_counter() - start_s, unit="s"))
        rows.append(Row(name="write", metric="peak memory of the process", value=_peak_bytes(), unit="bytes"))
        rows.append(Row(name="write", metric="the same before", value=before, unit="bytes"))
        rows.append(Row(name="write", metric="file", value=path.stat().st_size, unit="bytes"))
        _cold(path, settings.rounds, rows)
        rows.append(Row(name="cold", metric="peak memory of the process", value=_peak_bytes(), unit="bytes"))
        if settings.warm:
            _warm(path, 2 * settings.rounds, rows)
    _show(rows, settings.edges)
    configuration = {name: getattr(settings, name) for name in ("edges", "degree", "memory", "rounds")}
    write(settings.json, configuration | {"fanouts": FANOUTS, "seeds": SEEDS}, rows)


def _cold(path: Path, rounds: int, rows: list[Row]) -> None:
    """Sample from a file of which nothing is in memory, in turn with and without asking for pages."""
    times: dict[str, list[float]] = {"asked for": [], "one by one": []}
    nodes: list[int] = []
    for number in range(rounds):
        for name, values in times.items():
            _forget(path)
            graph = unified.open_graph(path)
            if name == "one by one":
                graph.ahead = None
            start_s = time.perf_counter()
            count = _sampled(graph, number)
            values.append(time.perf_counter() - start_s)
            nodes.append(count)
            del graph
        print(f"cold: round {number + 1} of {rounds}", flush=True)
    asked, one_by_one = times.values()
    ratio = paired_ratio(asked, one_by_one).median
    rows.append(
        Row(
            name="cold", metric="time of a mini-batch", value=median(asked) / BATCHES, unit="s",
            peer="pages one by one", ratio=ratio,
        )
    )  # fmt: skip
    rows.append(Row(name="cold", metric="nodes of a mini-batch", value=median(nodes) / BATCHES, unit="nodes"))


def _warm(path: Path, rounds: int, rows: list[Row]) -> None:
    mapped = unified.open_graph(path, verify=True)
    with path.open("rb", buffering=0) as file:
        while file.read(2**24):
            pass
    graphs = {"file": mapped, "memory": unified.Graph.from_csc(mapped.starts.clone(), mapped.sources.clone())}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 1):
        turn = list(graphs.items())
        for name, graph in turn if number % 2 else reversed(turn):  # the second finds caches of the processor filled
            start_s = time.perf_counter()
            _sampled(graph, number)
            if number:
                times[name].append(time.perf_counter() - start_s)
    rows.append(
        Row(
            name="warm", metric="time of a mini-batch", value=median(times["file"]) / BATCHES, unit="s",
            peer="arrays in memory", ratio=paired_ratio(times["file"], times["memory"]).median,
        )
    )  # fmt: skip


def _sampled(graph: unified.Graph, number: int) -> int:
    """Sample mini-batches and return how many nodes they have."""
    sampler, generator = unified.NeighborSampler(graph, FANOUTS), torch.Generator().manual_seed(number)
    count = 0
    for batch in range(BATCHES):
        seeds = torch.randint(graph.num_nodes, (SEEDS,), generator=generator).unique()
        count += len(sampler.sample(seeds, number=BATCHES * number + batch).nodes)
    return count


def _forget(path: Path) -> None:
    """Take a file's pages out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _show(rows: list[Row], num_edges: int) -> None:
    lines = []
    for row in rows:
        value = format_bytes(int(row.value)) if row.unit == "bytes" else f"{row.value:,.3g} {row.unit}"
        lines.append([row.name, row.metric, value, "" if row.ratio is None else f"{row.ratio:.2f} of {row.peer}"])
    show(f"{num_edges:,} edges", ["part", "figure", "value", "beside"], lines)


if __name__ == "__main__":
    main()
