"""Relational layers against PyG and hand-written PyTorch: time of inference and of a training step, and peak memory.

One layer on a whole graph, one head, tables of features as inputs that want gradients. Every peer runs in a process of
its own, after its bytes were predicted; what needs more than the limit, or more than the time, is reported so.
Our layer and the hand-written ones take turns in one process. The best of PyG's variants counts.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import geometric_mean, median

import torch

from benchmarks.common import Row, parser, show, write
from benchmarks.relational_graphs import GRAPHS, Edges
from penstock import relational
from penstock.probe import peak_bytes
from penstock.relational import RelationalGraph
from penstock.units import format_bytes

LIMIT_BYTES = 18 * 2**30
LIMIT_S = 120.0
PEERS = {
    "RGCN": ["RGCNConv", "FastRGCNConv"],
    "RGAT": ["RGATConv"],
    "HGT": ["HGTConv"],
}
Call = Callable[[], torch.Tensor]
CASES = [
    *(("RGCN", graph, 64) for graph in ("AIFB", "FB15k-237", "WN18RR", "MUTAG-like", "BGS-like", "hub")),
    *(("RGAT", graph, 64) for graph in ("AIFB", "FB15k-237", "WN18RR", "MUTAG-like", "hub")),
    *(("HGT", graph, 64) for graph in ("AIFB", "WN18RR", "MUTAG-like")),
    *((layer, "AIFB", width) for layer in ("RGCN", "RGAT") for width in (32, 128)),
    *((layer, "WN18RR", width) for layer in ("RGCN", "RGAT") for width in (32, 128)),
]


def predicted_bytes(variant: str, edges: Edges, width: int) -> int:
    """What a peer's largest tensors take at once in a training step: matrices gathered for every edge."""
    num_edges = edges.edge_index.shape[1]
    per_edge = {"FastRGCNConv": 2 * width * width, "RGATConv": 3 * width * width}.get(variant, 8 * width)
    per_node = edges.num_edge_types * 4 * width if variant == "HGTConv" else 0
    return 4 * (num_edges * per_edge + edges.num_nodes * per_node)


def hetero(edges: Edges) -> tuple[dict[str, int], dict[tuple[str, str, str], torch.Tensor]]:
    """The graph as PyG's HGT wants it, with one node type."""
    kinds = edges.edge_type.unique().tolist()
    return {"n": edges.num_nodes}, {
        ("n", f"r{kind}", "n"): edges.edge_index[:, edges.edge_type == kind] for kind in kinds
    }


def make(kind: str, layer: str, edges: Edges, width: int) -> tuple[Call, torch.Tensor]:
    """A forward pass, and the input whose gradient it wants. ``kind``: penstock, a PyG class, or a hand-written one."""
    torch.manual_seed(0)
    x = torch.randn(edges.num_nodes, width, requires_grad=True)
    if layer == "HGT":
        sizes, index = hetero(edges)
        metadata = (list(sizes), list(index))
        parts = dict(zip(sizes, x.split(list(sizes.values())), strict=True))
        if kind == "penstock":
            ours = relational.HGTConv(width, width, metadata)
            graph = RelationalGraph.from_types(index, sizes)
            return lambda: ours(x, graph), x
        import torch_geometric.nn as pyg

        theirs = pyg.HGTConv(width, width, metadata)
        return lambda: torch.cat(list(theirs(parts, index).values())), x
    options = {"aggr": "add", "root_weight": False, "bias": False} if layer == "RGCN" else {"bias": False}
    sizes_of = (width, width, edges.num_edge_types)
    if kind == "penstock":
        conv = {"RGCN": relational.RGCNConv, "RGAT": relational.RGATConv}[layer](*sizes_of, **options)
        whole = edges.graph()
        return lambda: conv(x, whole), x
    if kind in HAND_WRITTEN:
        return HAND_WRITTEN[kind](edges, width, x), x
    import torch_geometric.nn as pyg

    module = getattr(pyg, kind)(*sizes_of, **options)
    return lambda: module(x, edges.edge_index, edges.edge_type), x


def segments_and_index_add(edges: Edges, width: int, x: torch.Tensor) -> Call:
    """RGCN by hand: edges sorted by type, a product a segment, `index_add` into targets."""
    weight = torch.randn(edges.num_edge_types, width, width, requires_grad=True)
    order = edges.edge_type.argsort(stable=True)
    source, target = edges.edge_index[:, order]
    counts = edges.edge_type.bincount(minlength=edges.num_edge_types).tolist()

    def forward() -> torch.Tensor:
        rows = x.index_select(0, source).split(counts)
        message = torch.cat([part @ matrix for part, matrix in zip(rows, weight, strict=True)])
        return torch.zeros(edges.num_nodes, width).index_add(0, target, message)

    return forward


def sum_first_by_sparse_mm(edges: Edges, width: int, x: torch.Tensor) -> Call:
    """RGCN by hand: rows summed per (target, type) by a sparse matrix, a product a segment, a sparse sum per target."""
    weight = torch.randn(edges.num_edge_types, width, width, requires_grad=True)
    keys, pair = torch.unique(edges.edge_type * edges.num_nodes + edges.edge_index[1], return_inverse=True)
    counts = (keys // edges.num_nodes).bincount(minlength=edges.num_edge_types).tolist()
    ones = torch.ones(edges.edge_index.shape[1])
    gather = torch.sparse_coo_tensor(
        torch.stack([pair, edges.edge_index[0]]), ones, (len(keys), edges.num_nodes)
    ).to_sparse_csr()
    spread = torch.sparse_coo_tensor(
        torch.stack([keys % edges.num_nodes, torch.arange(len(keys))]),
        torch.ones(len(keys)),
        (edges.num_nodes, len(keys)),
    ).to_sparse_csr()

    def forward() -> torch.Tensor:
        rows = torch.sparse.mm(gather, x).split(counts)
        return torch.sparse.mm(spread, torch.cat([part @ one for part, one in zip(rows, weight, strict=True)]))

    return forward


def compacted_attention(edges: Edges, width: int, x: torch.Tensor) -> Call:
    """RGAT by hand: products once per pair of an end and a type, softmax and sums by `scatter` and `index_add`."""
    weight = torch.randn(edges.num_edge_types, width, width, requires_grad=True)
    query, key = (torch.randn(width, 1, requires_grad=True) for _ in range(2))
    count, nodes = edges.num_edge_types, edges.num_nodes
    ends = []
    for end in edges.edge_index:
        keys, pair = torch.unique(edges.edge_type * nodes + end, return_inverse=True)
        ends.append((keys % nodes, (keys // nodes).bincount(minlength=count).tolist(), pair))
    target = edges.edge_index[1]

    def products(end: tuple[torch.Tensor, list[int], torch.Tensor]) -> torch.Tensor:
        rows = x.index_select(0, end[0]).split(end[1])
        return torch.cat([part @ matrix for part, matrix in zip(rows, weight, strict=True)])

    def forward() -> torch.Tensor:
        at_source, at_target = products(ends[0]), products(ends[1])
        score = (at_target @ query)[ends[1][2], 0] + (at_source @ key)[ends[0][2], 0]
        score = torch.nn.functional.leaky_relu(score, 0.2)
        largest = torch.full((nodes,), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
        raised = (score - largest[target]).exp()
        share = raised / torch.zeros(nodes).index_add(0, target, raised)[target]
        message = share.unsqueeze(1) * at_source.index_select(0, ends[0][2])
        return torch.zeros(nodes, width).index_add(0, target, message)

    return forward


HAND_WRITTEN: dict[str, Callable[[Edges, int, torch.Tensor], Call]] = {
    "segments and index_add": segments_and_index_add,
    "sum first by sparse.mm": sum_first_by_sparse_mm,
    "compacted, eager": compacted_attention,
}
BY_HAND = {"RGCN": ["segments and index_add", "sum first by sparse.mm"], "RGAT": ["compacted, eager"], "HGT": []}


def measure(kinds: list[str], layer: str, edges: Edges, width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds and peak bytes of inference and training, of all ``kinds`` in turn."""
    made = {kind: make(kind, layer, edges, width) for kind in kinds}
    found: dict[str, dict[str, float]] = {kind: {} for kind in kinds}

    def infer(call: Call) -> None:
        with torch.no_grad():
            call()

    def train(call: Call, x: torch.Tensor) -> None:
        x.grad = None
        call().sum().backward()

    for kind, (call, x) in made.items():
        start_s = time.perf_counter()
        infer(call)
        train(call, x)
        found[kind]["first"] = time.perf_counter() - start_s
        found[kind]["inference peak"] = peak_bytes(lambda call=call: infer(call)).activation_bytes
        found[kind]["training peak"] = peak_bytes(lambda call=call, x=x: train(call, x)).activation_bytes
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for kind, (call, x) in made.items():
            start_s = time.perf_counter()
            infer(call)
            middle_s = time.perf_counter()
            train(call, x)
            seconds.setdefault((kind, "inference"), []).append(middle_s - start_s)
            seconds.setdefault((kind, "training"), []).append(time.perf_counter() - middle_s)
    for (kind, what), taken in seconds.items():
        found[kind][what] = median(taken)
    return found


def in_child(kinds: list[str], layer: str, graph: str, width: int, rounds: int) -> dict[str, dict[str, float]] | str:
    """The same in a process of its own; a text where it did not end as it should."""
    request = json.dumps([kinds, layer, graph, width, rounds])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.relational", "--child", request],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"exceeded {LIMIT_S:.0f} s"
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1][:100] if done.stderr.strip() else done.returncode}"
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def case(layer: str, graph: str, width: int, rounds: int, rows: list[Row]) -> None:
    """One line of the table."""
    edges = GRAPHS[graph]()
    name = f"{layer} {graph} {width}"
    found = in_child(["penstock", *BY_HAND[layer]], layer, graph, width, rounds)
    if isinstance(found, str):
        raise RuntimeError(f"{name}: {found}")
    for variant in PEERS[layer]:
        needed = predicted_bytes(variant, edges, width)
        result: dict[str, dict[str, float]] | str
        if needed > LIMIT_BYTES:
            result = f"needs {format_bytes(needed)}, not run"
        else:
            result = in_child([variant], layer, graph, width, max(1, rounds // 3))
        if isinstance(result, str):
            rows.append(Row(name=name, metric=f"{variant}: {result}", value=needed, unit="bytes", peer=variant))
            print(f"{name}: {variant} {result}", flush=True)
        else:
            found |= result
    ours = found["penstock"]
    for kind, one in found.items():
        for metric in ("inference", "training", "first"):
            ratio = one[metric] / ours[metric]
            rows.append(Row(name=name, metric=metric, value=one[metric], unit="s", peer=kind, ratio=ratio))
        for metric in ("inference peak", "training peak"):
            ratio = one[metric] / max(1.0, ours[metric])
            rows.append(Row(name=name, metric=metric, value=one[metric], unit="bytes", peer=kind, ratio=ratio))
    lines = [
        [kind, *(f"{one[what] * 1e3:.1f} ms" for what in ("inference", "training")),
         *(f"{one[what] / ours[what]:.2f}" for what in ("inference", "training")),
         *(format_bytes(int(one[f"{what} peak"])) for what in ("inference", "training"))]
        for kind, one in found.items()
    ]  # fmt: skip
    header = ["", "inference", "training", "over ours", "over ours", "inference peak", "training peak"]
    show(f"{name}: {edges.num_nodes:,} nodes, {edges.edge_index.shape[1]:,} edges", header, lines)


def summary(rows: list[Row]) -> None:
    """Geometric means over the real graphs at width 64, against the best PyG variant."""
    for layer, variants in PEERS.items():
        for metric in ("inference", "training", "inference peak", "training peak"):
            best: dict[str, float] = {}
            for row in rows:
                is_real = any(row.name == f"{layer} {graph} 64" for graph in ("AIFB", "FB15k-237", "WN18RR"))
                if is_real and row.metric == metric and row.peer in variants and row.ratio is not None:
                    best[row.name] = min(best.get(row.name, float("inf")), row.ratio)
            if best:
                mean = geometric_mean(best.values())
                rows.append(Row(name=layer, metric=f"{metric}, best of PyG over ours", value=mean, unit="", ratio=mean))
                each = ", ".join(f"{name.split()[1]} {ratio:.1f}" for name, ratio in best.items())
                print(f"{layer} {metric}: PyG over ours {mean:.1f} ({each})", flush=True)


def main(arguments: list[str] | None = None) -> list[Row]:
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("--child", help="used by the benchmark itself")
    options.add_argument("--layer", action="append", choices=list(PEERS))
    options.add_argument("--graph", action="append", choices=list(GRAPHS))
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args(arguments)
    if given.child:
        kinds, layer, graph, width, rounds = json.loads(given.child)
        print(json.dumps(measure(kinds, layer, GRAPHS[graph](), width, rounds)))
        return []
    cases = [("RGCN", "small", 16), ("RGAT", "small", 16), ("HGT", "small", 16)] if given.quick else CASES
    rounds = 3 if given.quick else given.rounds
    rows: list[Row] = []
    for layer, graph, width in cases:
        if (given.layer is None or layer in given.layer) and (given.graph is None or graph in given.graph):
            case(layer, graph, width, rounds, rows)
            write(given.json, {"rounds": rounds, "limit_bytes": LIMIT_BYTES, "limit_s": LIMIT_S}, rows)
    summary(rows)
    write(given.json, {"rounds": rounds, "limit_bytes": LIMIT_BYTES, "limit_s": LIMIT_S}, rows)
    return rows


if __name__ == "__main__":
    main()
