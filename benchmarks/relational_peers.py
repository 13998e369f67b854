"""The peers of `benchmarks.relational`: our layers, whole and with passes off, PyG's, DGL's, and PyTorch by hand."""

import importlib.util
from collections.abc import Callable
from unittest import mock

import torch

from benchmarks.relational_graphs import Edges
from penstock import relational
from penstock.relational import RelationalGraph, _hgt, _rgat, _rgcn
from penstock.relational._run import Layer

Call = Callable[[], torch.Tensor]
PEERS = {
    "RGCN": ["RGCNConv", "FastRGCNConv", "RGCNConv, compiled", "dgl"],
    "RGAT": ["RGATConv", "RGATConv, compiled"],
    "HGT": ["HGTConv", "HGTConv, compiled"],
}
"""Peers, each in its own process; "compiled" is under `torch.compile`."""
ABLATIONS = {
    "without compaction": {"compact": False},
    "without reordering": {"reorder": False},
    "without sum first": {"sum_first": False},
    "without reused sums": {"reuse_sums": False},
    "without fusion": {"fuse": False},
    "without any pass": {
        "compact": False,
        "reorder": False,
        "sum_first": False,
        "reuse_sums": False,
        "fuse": False,
    },
    "eager emitter": {"emitter": "eager"},
}
"""Our layers, compiled otherwise."""


def is_installed(variant: str) -> bool:
    """Return whether a peer can be run here."""
    return importlib.util.find_spec("dgl" if variant == "dgl" else "torch_geometric") is not None


def predicted_bytes(variant: str, edges: Edges, width: int) -> int:
    """Return bytes of a peer's largest tensors in a training step: matrices gathered for every edge, rows of all
    nodes for every relation.
    """
    num_edges, variant = edges.edge_index.shape[1], variant.removesuffix(", compiled")
    per_edge = {"FastRGCNConv": 2 * width * width, "RGATConv": 3 * width * width, "RGCNConv": 2 * width}
    per_node = {"RGCNConv": edges.num_edge_types * width, "HGTConv": 4 * edges.num_edge_types * width}
    return 4 * (num_edges * per_edge.get(variant, 8 * width) + edges.num_nodes * per_node.get(variant, 0))


def hetero(edges: Edges) -> tuple[dict[str, int], dict[tuple[str, str, str], torch.Tensor]]:
    """Return the graph for PyG's HGT: nodes numbered within their type, edges by their type and both ends' types."""
    node_type = torch.zeros(edges.num_nodes, dtype=torch.int64) if edges.node_type is None else edges.node_type
    counts = node_type.bincount()
    order = node_type.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[node_type[order]]
    ends = node_type[edges.edge_index]
    keys = (ends[0] * edges.num_edge_types + edges.edge_type) * len(counts) + ends[1]
    results = {}
    for key in keys.unique().tolist():
        source, kind, target = key // len(counts) // edges.num_edge_types, key // len(counts), key % len(counts)
        name = (f"n{source}", f"r{kind % edges.num_edge_types}", f"n{target}")
        results[name] = place[edges.edge_index[:, keys == key]]
    return {f"n{number}": int(count) for number, count in enumerate(counts)}, results


def make(kind: str, layer: str, edges: Edges, width: int, device: str) -> tuple[Call, torch.Tensor]:
    """Return a forward pass, and the input that requires a gradient, on the device."""
    with torch.device(device):
        return _made(kind, layer, edges.to(device), width)


def _made(kind: str, layer: str, edges: Edges, width: int) -> tuple[Call, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(edges.num_nodes, width, requires_grad=True)
    if kind in ABLATIONS:
        with_other_passes(ABLATIONS[kind])
        kind = "penstock"
    name = kind.removesuffix(", compiled")
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
        called = torch.compile(theirs) if kind != name else theirs
        return lambda: torch.cat([tensor for tensor in called(parts, index).values() if tensor is not None]), x
    options = {"aggr": "add", "root_weight": False, "bias": False} if layer == "RGCN" else {"bias": False}
    sizes_of = (width, width, edges.num_edge_types)
    if kind == "penstock":
        conv = {"RGCN": relational.RGCNConv, "RGAT": relational.RGATConv}[layer](*sizes_of, **options)
        whole = edges.graph()
        return lambda: conv(x, whole), x
    if kind in HAND_WRITTEN:
        return HAND_WRITTEN[kind](edges, width, x), x
    if kind == "dgl":
        return by_dgl(edges, width, x), x
    import torch_geometric.nn as pyg

    module = getattr(pyg, name)(*sizes_of, **options)
    called = torch.compile(module) if kind != name else module
    return lambda: called(x, edges.edge_index, edges.edge_type), x


def by_dgl(edges: Edges, width: int, x: torch.Tensor) -> Call:
    """Make DGL's RGCN."""
    import dgl

    graph = dgl.graph(tuple(edges.edge_index), num_nodes=edges.num_nodes)
    conv = dgl.nn.RelGraphConv(width, width, edges.num_edge_types, self_loop=False, bias=False)
    return lambda: conv(graph, x, edges.edge_type)


def with_other_passes(options: dict[str, object]) -> None:
    """Compile our layers with other passes, from now on in this process."""
    for module in (_rgcn, _rgat, _hgt):
        for name, value in list(vars(module).items()):
            if isinstance(value, Layer):
                mock.patch.object(module, name, value.with_options(**options)).start()


def segments_and_index_add(edges: Edges, width: int, x: torch.Tensor) -> Call:
    """Make RGCN by hand: edges sorted by type, a product per segment, `index_add` into targets."""
    weight = torch.randn(edges.num_edge_types, width, width, requires_grad=True)
    order = edges.edge_type.argsort(stable=True)
    source, target = edges.edge_index[:, order]
    counts = edges.edge_type.bincount(minlength=edges.num_edge_types).tolist()

    def forward() -> torch.Tensor:
        rows = x.index_select(0, source).split(counts)
        message = torch.cat([part @ matrix for part, matrix in zip(rows, weight, strict=True)])
        return x.new_zeros(edges.num_nodes, width).index_add(0, target, message)

    return forward


def sum_first_by_sparse_mm(edges: Edges, width: int, x: torch.Tensor) -> Call:
    """Make RGCN by hand: sparse sums per (target, type), a product per segment, a sparse sum per target."""
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
        return torch.sparse.mm(spread, torch.cat([part @ matrix for part, matrix in zip(rows, weight, strict=True)]))

    return forward


def compacted_attention(edges: Edges, width: int, x: torch.Tensor) -> Call:
    """Make RGAT by hand: products once per pair of end and type, softmax and sums by `scatter` and `index_add`."""
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
        largest = x.new_full((nodes,), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
        raised = (score - largest[target]).exp()
        share = raised / x.new_zeros(nodes).index_add(0, target, raised)[target]
        message = share.unsqueeze(1) * at_source.index_select(0, ends[0][2])
        return x.new_zeros(nodes, width).index_add(0, target, message)

    return forward


HAND_WRITTEN: dict[str, Callable[[Edges, int, torch.Tensor], Call]] = {
    "segments and index_add": segments_and_index_add,
    "sum first by sparse.mm": sum_first_by_sparse_mm,
    "compacted, eager": compacted_attention,
}
BY_HAND = {"RGCN": ["segments and index_add", "sum first by sparse.mm"], "RGAT": ["compacted, eager"], "HGT": []}
