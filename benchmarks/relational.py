"""Time and peak memory of relational layers, in inference and training, against PyG and hand-written PyTorch.

One layer on a whole graph, one head, tables of features as inputs that want gradients. Every peer runs in a process of
its own, after its bytes were predicted; what needs more than the limit, or more than the time, is reported so.
Our layer and the hand-written ones take turns in one process. The best of PyG's variants counts.

Run it with ``python -m benchmarks.relational --json relational.json``.
"""

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import geometric_mean, median
from typing import Any
from unittest import mock

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from benchmarks.common import Row, parser, show, synchronize, write
from benchmarks.forked import Forked
from benchmarks.relational_graphs import GRAPHS, Edges, synthetic
from benchmarks.relational_lookups import lookups
from benchmarks.relational_peers import ABLATIONS, BY_HAND, PEERS, Call, is_installed, make, predicted_bytes
from benchmarks.relational_products import best_rate, products
from penstock import relational
from penstock.probe import peak_bytes
from penstock.relational import RelationalGraph, RGATConv, RGCNConv, _run
from penstock.relational._cost import Cost, cost
from penstock.relational._domain import Domain
from penstock.relational._steps import Compiled
from penstock.units import format_bytes

LIMIT_S = 120.0
PARTS = ["peers", "ablations", "first", "blocks", "variants", "products", "lookups"]
REAL = ("AIFB", "FB15k-237", "WN18RR")
CASES = [
    *(("RGCN", graph, 64) for graph in (*REAL, "MUTAG-like", "BGS-like", "AM-like", "hub")),
    *(("RGAT", graph, 64) for graph in (*REAL, "MUTAG-like", "BGS-like", "hub")),
    *(("HGT", graph, 64) for graph in ("AIFB by class", "WN18RR", "MAG slice")),
    *((layer, graph, width) for layer in ("RGCN", "RGAT") for graph in REAL for width in (32, 128)),
]
ON_VARIANTS = {
    **{name: GRAPHS[name] for name in (*REAL, "MUTAG-like", "BGS-like", "hub")},
    "5 edges a pair": lambda: synthetic("", 50_000, 1_000_000, 20, 0.2),
    "12 edges a pair": lambda: synthetic("", 50_000, 2_000_000, 10, 0.1),
    "39 edges a pair": lambda: synthetic("", 20_000, 2_000_000, 10, 0.03),
}
LOOKED_UP = ("FB15k-237", "BGS-like", "MAG slice", "hub")
ON_A_GPU = [("RGAT", graph, 64) for graph in ("AM-like", "MAG", "WikiKG2-like")]


@relational.layer
def sum_of_products(g: Any, x: Any, weight: Any) -> Any:
    """Add up transformed neighbors: RGCN without a factor."""
    for e in g.edges():
        message = x[e.src] @ weight[e.etype]
    for n in g.nodes():
        total = n.sum(message)
    return total


def limit_bytes(device: str) -> int:
    """Return the bytes that a peer may take."""
    return 18 * 2**30 if device == "cpu" else torch.cuda.get_device_properties(device).total_memory


def measure(
    kinds: list[str], layer: str, edges: Edges, width: int, rounds: int, device: str
) -> dict[str, dict[str, float]]:
    """Return median seconds and peak bytes of inference and training, for all ``kinds`` in alternation."""
    calls = {kind: make(kind, layer, edges, width, device) for kind in kinds}
    results: dict[str, dict[str, float]] = {kind: {} for kind in kinds}

    def infer(call: Call) -> None:
        with torch.no_grad():
            call()
        synchronize(device)

    def train(call: Call, x: torch.Tensor) -> None:
        x.grad = None
        call().sum().backward()
        synchronize(device)

    for kind, (call, x) in calls.items():
        start_s = time.perf_counter()
        infer(call)
        train(call, x)
        results[kind]["first"] = time.perf_counter() - start_s
        if kind == "penstock":
            rates = machine_rates(device)
            results[kind]["inference limit"] = limit_s(lambda call=call: infer(call), *rates)
            results[kind]["training limit"] = limit_s(lambda call=call, x=x: train(call, x), *rates)
        results[kind]["inference peak"] = peak_bytes(lambda call=call: infer(call), device=device).activation_bytes
        results[kind]["training peak"] = peak_bytes(
            lambda call=call, x=x: train(call, x), device=device
        ).activation_bytes
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for kind, (call, x) in calls.items():
            start_s = time.perf_counter()
            infer(call)
            middle_s = time.perf_counter()
            train(call, x)
            seconds.setdefault((kind, "inference"), []).append(middle_s - start_s)
            seconds.setdefault((kind, "training"), []).append(time.perf_counter() - middle_s)
    for (kind, what), taken in seconds.items():
        results[kind][what] = median(taken)
    return results


def machine_rates(device: str) -> tuple[float, float]:
    """Measure floating-point operations per second of products, PyTorch's or ours, and bytes per second of a copy.

    The best of five counts, and the faster of both products.
    """
    size = 1024 if device == "cpu" else 8192
    a, big = torch.randn(size, size, device=device), torch.zeros(2**25 if device == "cpu" else 2**28, device=device)
    other = torch.empty_like(big)

    def best_s(run: Callable[[], object]) -> float:
        taken = []
        for _ in range(6):
            start_s = time.perf_counter()
            run()
            synchronize(device)
            taken.append(time.perf_counter() - start_s)
        return min(taken[1:])

    ours = best_rate() if device == "cpu" else 0.0
    return max(ours, 2 * size**3 / best_s(lambda: a @ a)), 2 * big.nbytes / best_s(lambda: other.copy_(big))


def limit_s(run: Callable[[], None], flops_per_s: float, bytes_per_s: float) -> float:
    """Return the seconds that our steps would take if each reached the machine's rate of products or of copies."""
    costs: list[Cost] = []
    run_compiled = Compiled.run

    def counted(self: Compiled, graph: Any, inputs: Any) -> list[torch.Tensor]:
        costs.extend(cost(self.lowered, index, graph, self.dtype.itemsize) for index in range(len(self.lowered.steps)))
        return run_compiled(self, graph, inputs)

    with mock.patch.object(Compiled, "run", counted):
        run()
    return sum(max(price.flops / flops_per_s, price.bytes / bytes_per_s) for price in costs)


def in_child(
    kinds: list[str], layer: str, graph: str, width: int, rounds: int, device: str
) -> dict[str, dict[str, float]] | str:
    """Measure in a separate process; return a text if it did not end as it should."""
    arguments = ["--child", json.dumps([kinds, layer, graph, width, rounds, device])]
    if graph == "small":  # times do not matter: a forked child imports nothing, but computes with one thread
        child = Forked(main, arguments)
        status, said = child.wait(LIMIT_S), child.said
    else:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.relational", *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            status, said = done.returncode, done.stdout.splitlines()
        except subprocess.TimeoutExpired:
            status = None
    if status is None:
        return f"exceeded {LIMIT_S:.0f} s"
    if status:
        return f"failed: {said[-1].strip()[:100] if said else status}"
    result: dict[str, dict[str, float]] = json.loads(next(line for line in reversed(said) if line.startswith("{")))
    return result


def case(layer: str, graph: str, width: int, rounds: int, rows: list[Row], device: str) -> None:
    """Measure one line of the table."""
    edges = GRAPHS[graph]()
    name = f"{layer} {graph} {width}"
    by_hand = BY_HAND[layer] if edges.edge_index.shape[1] < 2_000_000 or device != "cpu" else []
    results = in_child(["penstock", *by_hand], layer, graph, width, rounds, device)
    if isinstance(results, str):
        raise RuntimeError(f"{name}: {results}")
    ours = results["penstock"]
    for metric in ("inference", "training"):
        share = ours[f"{metric} limit"] / ours[metric]
        rows.append(Row(name=name, metric=f"{metric}, share of the machine's limit", value=share, unit=""))
    for variant in PEERS[layer]:
        if ("compiled" in variant or variant == "dgl") and (graph not in REAL or width != 64):
            continue
        if not is_installed(variant):
            rows.append(Row(name=name, metric=f"{variant}: not installed", value=0, unit="", peer=variant))
            continue
        needed = predicted_bytes(variant, edges, width)
        result: dict[str, dict[str, float]] | str
        if needed > limit_bytes(device):
            result = f"needs {format_bytes(needed)}, not run"
        else:
            result = in_child([variant], layer, graph, width, max(1, rounds // 3), device)
        if isinstance(result, str):
            rows.append(Row(name=name, metric=f"{variant}: {result}", value=needed, unit="bytes", peer=variant))
            print(f"{name}: {variant} {result}", flush=True)
        else:
            results |= result
    for kind, figures in results.items():
        for metric in ("inference", "training", "first"):
            ratio = figures[metric] / ours[metric]
            rows.append(Row(name=name, metric=metric, value=figures[metric], unit="s", peer=kind, ratio=ratio))
        for metric in ("inference peak", "training peak"):
            ratio = figures[metric] / max(1.0, ours[metric])
            rows.append(Row(name=name, metric=metric, value=figures[metric], unit="bytes", peer=kind, ratio=ratio))
    lines = [
        [kind, *(f"{figures[what] * 1e3:.1f} ms" for what in ("inference", "training")),
         *(f"{figures[what] / ours[what]:.2f}" for what in ("inference", "training")),
         *(format_bytes(int(figures[f"{what} peak"])) for what in ("inference", "training"))]
        for kind, figures in results.items()
    ]  # fmt: skip
    header = ["", "inference", "training", "over ours", "over ours", "inference peak", "training peak"]
    title = f"{name}: {edges.num_nodes:,} nodes, {edges.edge_index.shape[1]:,} edges, {edges.distinct:.2f} distinct"
    show(title, header, lines)
    rows.append(Row(name=name, metric="distinct (source, type) pairs over edges", value=edges.distinct, unit=""))


def ablation(layer: str, graph: str, width: int, rounds: int, rows: list[Row], device: str) -> None:
    """Compare our layer with and without passes, one process each."""
    name, lines = f"{layer} {graph} {width}", []
    whole = in_child(["penstock"], layer, graph, width, rounds, device)
    assert not isinstance(whole, str), whole
    for kind in ABLATIONS:
        result = in_child([kind], layer, graph, width, rounds, device)
        if isinstance(result, str):
            lines.append([kind, result, "", "", ""])
            continue
        ratios = []
        for metric in ("inference", "training", "inference peak", "training peak"):
            unit = "bytes" if "peak" in metric else "s"
            ratios.append(result[kind][metric] / max(1e-9, whole["penstock"][metric]))
            value = result[kind][metric]
            rows.append(Row(name=f"{name}, {kind}", metric=metric, value=value, unit=unit, ratio=ratios[-1]))
        lines.append([kind, *(f"{ratio:.2f}" for ratio in ratios)])
    show(f"{name}, over all passes on", ["", "inference", "training", "inference peak", "training peak"], lines)


def first_calls(graph: str, rows: list[Row], device: str) -> None:
    """Measure the time from index tensors to gradients in a new process, with and without compiled layers on disk."""
    lines = []
    for layer in ("RGCN", "RGAT"):
        with tempfile.TemporaryDirectory() as cache:
            for when in ("first process", "next process"):
                request = json.dumps(["first", layer, graph, 64, 0, device])
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.relational", "--child", request],
                    capture_output=True, text=True, check=True, env={**os.environ, "XDG_CACHE_HOME": cache},
                )  # fmt: skip
                taken_s = json.loads(done.stdout.splitlines()[-1])
                rows.append(Row(name=f"{layer} {graph} 64, {when}", metric="first call", value=taken_s, unit="s"))
                lines.append([f"{layer} {graph} 64", when, f"{taken_s:.2f} s"])
    show("graph, compilation, inference and a training step", ["", "", ""], lines)


def first_call_s(layer: str, graph: str, width: int, device: str) -> float:
    """Return the seconds of a first call in this process, with index tensors at hand."""
    edges = GRAPHS[graph]()
    start_s = time.perf_counter()
    call, _ = make("penstock", layer, edges, width, device)
    with torch.no_grad():
        call()
    call().sum().backward()
    synchronize(device)
    return time.perf_counter() - start_s


def blocks(rows: list[Row], rounds: int) -> None:
    """Measure building indexes of sampled blocks (4,096 targets, 10 edges each) against a training step on them."""
    whole, lines = GRAPHS["hub"](), []
    generator = torch.Generator().manual_seed(0)
    for layer in ("RGCN", "RGAT"):
        shares, steps = [], []
        conv = {"RGCN": RGCNConv, "RGAT": RGATConv}[layer](64, 64, whole.num_edge_types)
        for _ in range(rounds + 1):
            chosen = torch.randperm(whole.edge_index.shape[1], generator=generator)[:40_960]
            sources, place = whole.edge_index[0, chosen].unique(return_inverse=True)
            target = torch.arange(4096).repeat_interleave(10)
            x = torch.randn(len(sources), 64, requires_grad=True)

            def block(place: Any = place, target: Any = target, chosen: Any = chosen, count: int = len(sources)) -> Any:
                index, types = torch.stack([place, target]), whole.edge_type[chosen]
                return RelationalGraph(index, types, num_nodes=(count, 4096), num_edge_types=whole.num_edge_types)

            used = block()
            conv(x, used).sum().backward()
            start_s = time.perf_counter()
            conv(x, used).sum().backward()
            middle_s = time.perf_counter()
            fresh = block()
            for kind, *domains in used.indexes.kept.snapshot():
                if kind == "order":
                    fresh.indexes.order(*domains)
                elif kind == "in order":
                    fresh.indexes.index_in_order(*domains)
            steps.append(middle_s - start_s)
            shares.append((time.perf_counter() - middle_s) / steps[-1])
        rows.append(
            Row(name=f"{layer} block", metric="indexes over a training step", value=median(shares[1:]), unit="")
        )
        lines.append([layer, f"{median(steps[1:]) * 1e3:.1f} ms", f"{median(shares[1:]):.1%}"])
    show("blocks of 40,960 edges", ["", "training step", "indexes over it"], lines)


def variants(graphs: Mapping[str, Callable[[], Edges]], rows: list[Row], rounds: int) -> None:
    """Compare RGCN's steps by what the layer chooses on a CPU: where products are, and whether they are stored.

    The choices are those of `column_parts` and `cover_of`; the fewest products are those of a maximum matching.
    """
    lines = []
    for name, make_graph in graphs.items():
        edges = make_graph()
        graph, x = edges.graph(), torch.randn(edges.num_nodes, 64, requires_grad=True)
        weight = torch.randn(edges.num_edge_types, 64, 64, requires_grad=True)
        indexes, threads = graph.indexes, torch.get_num_threads()
        pairs = [indexes.pairs(domain) for domain in (Domain.SOURCE_AND_TYPE, Domain.TARGET_AND_TYPE)]
        ones = torch.ones(graph.num_edges).numpy()
        joined = coo_matrix((ones, [end.of_edges.numpy() for end in pairs])).tocsr()
        fewest = int((maximum_bipartite_matching(joined, perm_type="column") >= 0).sum())
        fewer = min(len(end.nodes) for end in pairs)
        layers = {
            (is_covered, parts): sum_of_products.with_options(cover=is_covered)
            for is_covered in (True, False)
            for parts in (0, threads)
        }
        seconds: dict[Any, list[float]] = {key: [] for key in layers}
        for _ in range(rounds + 1):
            for (is_covered, parts), compiled in layers.items():
                forced = {"column_parts": lambda *_, parts=parts: parts, "PAYS": 1.0 if is_covered else 0.0}
                with mock.patch.multiple(_run, **forced):
                    start_s = time.perf_counter()
                    compiled(graph, x, weight).sum().backward()
                    seconds[is_covered, parts].append(time.perf_counter() - start_s)
        chosen = (
            indexes.cover().num_rows <= _run.PAYS * fewer,
            _run.column_parts(graph.num_edges, fewer, threads),
        )
        taken = {key: median(values[1:]) for key, values in seconds.items()}
        best = min(taken.values())
        rows += [
            Row(name=f"variants {name}", metric="products at the better end", value=fewer, unit=""),
            Row(name=f"variants {name}", metric="products of the cover", value=indexes.cover().num_rows, unit=""),
            Row(name=f"variants {name}", metric="fewest products", value=fewest, unit=""),
            Row(name=f"variants {name}", metric="chosen over the fastest", value=taken[chosen] / best, unit=""),
        ]
        for (is_covered, parts), value in taken.items():
            what = f"{'each edge chooses' if is_covered else 'one end'}, {'added at once' if parts else 'stored'}"
            rows.append(Row(name=f"variants {name}", metric=what, value=value, unit="s", ratio=value / taken[chosen]))
        lines.append(
            [name, f"{fewer:,}", f"{indexes.cover().num_rows:,}", f"{fewest:,}",
             *(f"{value * 1e3:.1f} ms{' *' if key == chosen else ''}" for key, value in taken.items()),
             f"{taken[chosen] / best:.2f}"]
        )  # fmt: skip
        print(lines[-1], flush=True)
    header = ["RGCN, training", "one end", "cover", "fewest", "cover, stored", "cover, at once", "end, stored",
              "end, at once", "chosen (*) over best"]  # fmt: skip
    show("products, and where they go", header, lines)


def summary(rows: list[Row]) -> None:
    """Print geometric means over the real graphs at width 64: PyG's best variant, the same compiled, DGL, by hand."""
    groups: dict[tuple[str, str], list[str]] = {}
    for layer, variants in PEERS.items():
        groups[layer, "PyG"] = [variant for variant in variants if variant.endswith("Conv")]
        groups[layer, "PyG compiled"] = [variant for variant in variants if variant.endswith("compiled")]
        groups[layer, "DGL"] = [variant for variant in variants if variant == "dgl"]
        for variant in BY_HAND[layer]:
            groups[layer, variant] = [variant]
    for (layer, group), variants in groups.items():
        for metric in ("inference", "training", "inference peak", "training peak"):
            best: dict[str, float] = {}
            for row in rows:
                is_real = any(row.name == f"{layer} {graph} 64" for graph in (*REAL, "AIFB by class"))
                if is_real and row.metric == metric and row.peer in variants and row.ratio is not None:
                    best[row.name] = min(best.get(row.name, float("inf")), row.ratio)
            if best:
                mean = geometric_mean(best.values())
                rows.append(Row(name=layer, metric=f"{metric}, {group} over ours", value=mean, unit="", ratio=mean))
                each = ", ".join(f"{name.split()[1]} {ratio:.1f}" for name, ratio in best.items())
                print(f"{layer} {metric}: {group} over ours {mean:.1f} ({each})", flush=True)


def main(arguments: list[str] | None = None) -> list[Row]:
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("--child", help="used by the benchmark itself")
    options.add_argument("--layer", action="append", choices=list(PEERS))
    options.add_argument("--graph", action="append", choices=list(GRAPHS))
    options.add_argument("--width", action="append", type=int)
    options.add_argument("--part", action="append", choices=PARTS)
    options.add_argument("--rounds", type=int, default=9)
    settings = options.parse_args(arguments)
    if settings.child:
        kinds, layer, graph, width, rounds, device = json.loads(settings.child)
        if device == "cpu":
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes(device), resource.RLIM_INFINITY))
        if kinds == "first":
            print(json.dumps(first_call_s(layer, graph, width, device)))
            return []
        print(json.dumps(measure(kinds, layer, GRAPHS[graph](), width, rounds, device)))
        return []
    declared = CASES if settings.device == "cpu" else [*CASES, *ON_A_GPU]
    cases = [("RGCN", "small", 16), ("RGAT", "small", 16), ("HGT", "small", 16)] if settings.quick else declared
    rounds = 3 if settings.quick else settings.rounds
    rows: list[Row] = []
    parts, config = (
        settings.part or PARTS,
        {"rounds": rounds, "limit_bytes": limit_bytes(settings.device), "limit_s": LIMIT_S},
    )
    for layer, graph, width in cases:
        is_asked = (settings.layer is None or layer in settings.layer) and (
            settings.graph is None or graph in settings.graph
        )
        if not is_asked or (settings.width and width not in settings.width):
            continue
        if "peers" in parts:
            case(layer, graph, width, rounds, rows, settings.device)
        if "ablations" in parts and width in (16, 64) and graph in (*REAL, "small", "AIFB by class"):
            ablation(layer, graph, width, rounds, rows, settings.device)
        write(settings.json, config, rows, device=settings.device)
    if "first" in parts:
        first_calls("small" if settings.quick else "FB15k-237", rows, settings.device)
    if "blocks" in parts and settings.device == "cpu":
        blocks(rows, rounds)
    if "variants" in parts and settings.device == "cpu":
        variants({"small": GRAPHS["small"]} if settings.quick else ON_VARIANTS, rows, rounds)
    if "products" in parts and settings.device == "cpu":
        products(rows, rounds, is_quick=settings.quick)
    if "lookups" in parts and settings.device == "cpu":
        lookups({name: GRAPHS[name] for name in (["small"] if settings.quick else LOOKED_UP)}, rows, rounds)
    summary(rows)
    write(settings.json, config, rows, device=settings.device)
    return rows


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["benchmarks.relational"])
    main()
