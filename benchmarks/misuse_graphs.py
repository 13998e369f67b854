"""Working calls of `unified` and `relational`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.misuse_table import RECORDS, UNCALLED, USES, Arguments, Use, require
from benchmarks.soak_case import Case
from penstock import relational, unified

ROWS, WIDTH = 40, 16
EDGES = [[0, 1, 2, 3, 3, 1], [1, 2, 3, 0, 1, 0]]
TYPES = [0, 1, 0, 1, 1, 0]


def rows() -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)


def chosen() -> torch.Tensor:
    return torch.tensor([3, 0, ROWS - 1, 3])


def edge_index() -> torch.Tensor:
    return torch.tensor(EDGES)


def graph() -> unified.Graph:
    return unified.Graph(edge_index(), 4)


def typed() -> relational.RelationalGraph:
    return relational.RelationalGraph(edge_index(), torch.tensor(TYPES))


def equal_rows(table: Any, expected: torch.Tensor) -> None:
    """Require that a table's rows equal the source's."""
    index = torch.tensor([0, len(expected) - 1, 0] if len(expected) else [], dtype=torch.int64)
    require(torch.equal(torch.as_tensor(table[index]), expected[index]), "rows differ from the source's")


def _tiered(table: Any, arguments: Arguments) -> None:
    try:
        require(table.shape[0] == len(table), "as many rows as its shape says")
        source = arguments["source"]
        if isinstance(source, torch.Tensor) and arguments.get("dtype") is None and arguments.get("scale") is None:
            equal_rows(table, source)
    finally:
        table.close()


def _features(case: Case) -> Arguments:
    budget = case.budget(host="1MiB", disk=case.disk())
    return {"source": rows(), "host": 20 * 1024, "in_flight": 4096, "disk": case.disk(), "budget": budget}


def _feature_file(case: Case) -> Path:
    path = case.folder / "features.npy"
    np.save(path, rows().numpy())
    return path


def _loader(case: Case) -> Arguments:
    sampler = unified.NeighborSampler(graph(), [2])
    return {
        "sampler": sampler, "features": rows()[:4], "seeds": torch.arange(4), "batch_size": 2, "labels": torch.ones(4)
    }  # fmt: skip


def _loads(loader: Any, _: Arguments) -> None:
    batches = list(loader)
    require(len(batches) == len(loader), "as many batches as it says")
    for batch in batches:
        x = loader.features if isinstance(loader.features, dict) else loader.features[batch.nodes]
        require(torch.equal(batch.x, x) if isinstance(x, torch.Tensor) else batch.x == x, "features of the nodes")


def _samples(sampler: Any, _: Arguments) -> None:
    sample = sampler.sample(torch.tensor([0, 2]))
    require(sample.nodes[:2].tolist() == [0, 2], "seeds first")


def _hetero(sampler: Any, _: Arguments) -> None:
    sample = sampler.sample({"a": torch.tensor([0, 2])})
    require(sample.nodes["a"][:2].tolist() == [0, 2], "seeds first")


def _tier_problem(**changes: Any) -> unified.TierProblem:
    arguments = {
        "num_rows": 10, "row_bytes": 64, "device_bytes": 64, "host_bytes": 128, "scores": torch.arange(10.0)
    }  # fmt: skip
    return unified.TierProblem(**(arguments | changes))


def _tier_plan() -> unified.TierPlan:
    return unified.plan_tiers(_tier_problem())


def _sample() -> unified.Sample:
    return unified.NeighborSampler(graph(), [2]).sample(torch.tensor([0]), number=0)


def _written(path: Any, arguments: Arguments) -> None:
    unified.check(path)
    with unified.TieredFeatures(path) as table:
        if isinstance(arguments["source"], torch.Tensor):
            equal_rows(table, arguments["source"])


def _opened(path: Any, _: Arguments) -> None:
    require(unified.open_graph(path, verify=True).num_nodes > 0, "a graph")


def _graph_file(case: Case) -> Path:
    return unified.write_graph(case.folder / "edges.graph", edge_index(), num_nodes=4, progress=False)


def _aligned(case: Case) -> Path:
    return unified.write_features(case.folder / "rows.features", rows(), progress=False)


_TENSOR: dict[str, Callable[[Any], Arguments]] = {"__getitem__": lambda _: {"index": chosen()}}

USES |= {
    "unified.wrap": Use(
        call=unified.wrap, good=lambda _: {"tensor": rows()},
        check=lambda result, arguments: equal_rows(result, arguments["tensor"]),
    ),
    "unified.empty": Use(
        call=unified.empty, good=lambda case: {"*shape": (4, 3), "budget": case.budget(host="1MiB")},
        check=lambda result, _: require(result.dim() >= 0, "a tensor"),
    ),
    "unified.from_file": Use(
        call=unified.from_file,
        good=lambda case: {"path": _feature_file(case), "budget": case.budget(host="1MiB")},
        check=lambda result, _: equal_rows(result, rows()),
    ),
    "unified.is_unified": Use(
        call=unified.is_unified, good=lambda _: {"tensor": unified.wrap(rows())},
        check=lambda is_unified, arguments: require(
            is_unified == isinstance(arguments["tensor"], unified.UnifiedTensor), "it tells"
        ),
    ),
    "unified.gather": Use(
        call=unified.gather, good=lambda _: {"table": unified.wrap(rows()), "index": chosen()},
        check=lambda result, arguments: require(len(result) == len(arguments["index"]), "a row per index"),
    ),
    "unified.advise": Use(
        call=unified.advise, good=lambda _: {"tensor": unified.wrap(rows()), "advice": "read mostly"}
    ),
    "unified.UnifiedTensor": Use(
        call=unified.wrap, good=lambda _: {"tensor": rows()}, made_by="unified.wrap", methods=_TENSOR,
        check=lambda result, arguments: equal_rows(result, arguments["tensor"]),
    ),
    "unified.place": Use(
        call=unified.place, good=lambda _: {"others": [unified.Operand.HOST], "preferences": ["device"]},
        check=lambda where, _: require(where in ("device", "host"), "a place"),
    ),
    "unified.operand_of": Use(call=unified.operand_of, good=lambda _: {"tensor": torch.ones(3)}),
    "unified.TieredFeatures": Use(
        call=unified.TieredFeatures, good=_features, check=_tiered,
        methods={
            "__getitem__": lambda _: {"index": chosen()},
            "index_select": lambda _: {"dim": 0, "index": chosen()},
            "size": lambda _: {"dim": 0},
        },
    ),
    "unified.write_graph": Use(
        call=unified.write_graph,
        good=lambda case: {"path": case.folder / "g", "edges": edge_index(), "num_nodes": 4, "memory": "1MiB"},
        check=_opened,
    ),
    "unified.open_graph": Use(
        call=unified.open_graph, good=lambda case: {"path": _graph_file(case)},
        check=lambda opened, _: require(opened.num_nodes == 4, "the graph of the file"),
    ),
    "unified.infer": Use(
        call=unified.infer,
        good=lambda case: {
            "layers": [lambda rows, block: rows[: block.num_targets]], "graph": graph(), "features": rows(),
            "path": case.folder / "out", "host": "1MiB",
        },
        check=lambda path, arguments: equal_rows(unified.TieredFeatures(path), arguments["features"]),
    ),
    "unified.plan_tiers": Use(
        call=unified.plan_tiers, good=lambda _: {"problem": _tier_problem()},
        check=lambda plan, arguments: unified.verify(arguments["problem"], plan),
    ),
    "unified.TierProblem": Use(
        call=unified.TierProblem,
        good=lambda _: {name: getattr(_tier_problem(), name) for name in _tier_problem().__slots__},
        check=lambda problem, _: unified.verify(problem, unified.plan_tiers(problem)),
    ),
    "unified.Peers": Use(
        call=unified.Peers,
        good=lambda _: {
            "num_machines": 2, "machine": 1, "peer_row_s": 1e-6, "disk_row_s": 1e-5, "part_rows": (6, 4)
        },
        check=lambda peers, _: unified.plan_tiers(_tier_problem(peers=peers, num_rows=sum(peers.part_rows or (10,)))),
    ),
    "unified.verify": Use(call=unified.verify, good=lambda _: {"problem": _tier_problem(), "plan": _tier_plan()}),
    "unified.expected_accesses": Use(
        call=unified.expected_accesses,
        good=lambda _: {"graph": graph(), "seeds": torch.arange(4), "fanouts": [2, 2], "batch_size": 2},
        check=lambda chances, _: require(bool(((chances >= 0) & (chances <= 1)).all()), "chances"),
    ),
    "unified.count_accesses": Use(
        call=unified.count_accesses,
        good=lambda _: {"indexes": [torch.tensor([0, 1]), torch.tensor([1])], "num_rows": 3},
        check=lambda counts, arguments: require(
            not isinstance(arguments["indexes"], list) or not arguments["indexes"] or counts[:2].tolist() == [1, 2],
            "counts",
        ),
    ),
    "unified.write_features": Use(
        call=unified.write_features,
        good=lambda case: {"path": case.folder / "rows.features", "source": rows(), "progress": False}, check=_written,
    ),
    "unified.check": Use(call=unified.check, good=lambda case: {"path": _aligned(case)}),
    "unified.Graph": Use(
        call=unified.Graph, good=lambda _: {"edge_index": edge_index(), "num_nodes": 4, "num_sources": None},
        check=lambda result, arguments: require(
            int(result.degrees().sum()) == arguments["edge_index"].shape[1], "each edge enters a node"
        ),
        methods={"from_csc": lambda subject: {"starts": subject.starts, "sources": subject.sources, "positions": None}},
    ),
    "unified.NeighborSampler": Use(
        call=unified.NeighborSampler, good=lambda _: {"graph": graph(), "fanouts": [2, 2]}, check=_samples,
        methods={"sample": lambda _: {"seeds": torch.tensor([0, 2]), "number": 0}},
    ),
    "unified.HeteroNeighborSampler": Use(
        call=unified.HeteroNeighborSampler,
        good=lambda _: {"graphs": {("a", "to", "a"): graph()}, "fanouts": [2, 2]}, check=_hetero,
        methods={"sample": lambda _: {"seeds": {"a": torch.tensor([0, 2])}, "number": 0}},
    ),
    "unified.Loader": Use(call=unified.Loader, good=_loader, check=_loads),
    "unified.in_advance": Use(
        call=unified.in_advance, good=lambda _: {"batches": [1, 2, 3], "ahead": 2},
        check=lambda result, arguments: require(
            len(list(result)) == len(arguments["batches"])
            if hasattr(arguments["batches"], "__len__")
            else list(result),
            "all",
        ),
    ),
}  # fmt: skip
RECORDS |= {
    "unified.TierPlan": _tier_plan,
    "unified.FeatureStatistics": unified.FeatureStatistics,
    "unified.LoaderStatistics": unified.LoaderStatistics,
    "unified.Operand": lambda: unified.Operand.HOST,
    "unified.Sample": _sample,
    "unified.Block": lambda: _sample().block(0),
    "unified.HeteroSample": lambda: unified.HeteroNeighborSampler({("a", "to", "a"): graph()}, [2]).sample(
        {"a": torch.tensor([0])}, number=0
    ),
    "unified.Batch": lambda: unified.Batch(sample=_sample(), seeds=torch.tensor([0]), x=None, y=None),
}
UNCALLED |= {"unified.Advice": "texts that advise takes", "unified.Preference": "texts that wrap takes"}


# relational


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 8).view(4, 8)


def copied_sums(g: Any, x: Any) -> Any:
    """Return the result of a user's layer."""
    for e in g.edges():
        message = x[e.src]
    for n in g.nodes():
        result = n.sum(message)
    return result


def _sums() -> torch.Tensor:
    return torch.zeros(4, 8).index_add_(0, edge_index()[1], x()[edge_index()[0]])


def _layer(layer: Any, _: Arguments) -> None:
    require(torch.equal(layer(typed(), x()), _sums()), "sums over edges")


def language(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of the language so that it is called inside of a layer, on values of edges."""

    def run(*by_place: Any, **by_name: Any) -> torch.Tensor:
        arguments = dict(inspect.signature(call).bind(*by_place, **by_name).arguments)

        def body(g: Any, x: Any) -> Any:
            for e in g.edges():
                mine = {name: x[e.src] if value is _VALUE else value for name, value in arguments.items()}
                places = mine.pop("values", ())
                message = call(*(x[e.src] if place is _VALUE else place for place in places), **mine)
            for n in g.nodes():
                result = n.sum(message)
            return result

        return relational.layer(body)(typed(), x().abs() + 1)

    run.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    return run


_VALUE = object()
_ELEMENTWISE = ("elu", "exp", "gelu", "log", "relu", "sigmoid", "sqrt", "tanh")


def _softmaxed(*by_place: Any, **by_name: Any) -> torch.Tensor:
    arguments = dict(inspect.signature(relational.softmax).bind(*by_place, **by_name).arguments)

    def body(g: Any, x: Any) -> Any:
        for e in g.edges():
            score = relational.softmax(
                **(arguments | ({"score": x[e.src].sum(-1)} if arguments["score"] is _VALUE else {}))
            )
        for n in g.nodes():
            result = n.sum(score)
        return result

    return relational.layer(body)(typed(), x())


_softmaxed.__signature__ = inspect.signature(relational.softmax)  # type: ignore[attr-defined]


def _rgcn(conv: Any, arguments: Arguments) -> None:
    out = conv(torch.ones(4, arguments["in_channels"]), typed())
    require(out.shape == (4, arguments["out_channels"]), "an output per node")
    out.sum().backward()


def _rgat(conv: Any, arguments: Arguments) -> None:
    out = conv(torch.ones(4, arguments["in_channels"]), typed())
    require(len(out) == 4, "an output per node")
    out.sum().backward()


def _plain_conv(conv: Any, arguments: Arguments) -> None:
    require(conv(torch.ones(4, arguments["in_channels"]), typed()).shape[0] == 4, "an output per node")


def with_inverses(num_relations: int = 2) -> relational.RelationalGraph:
    types = torch.tensor(TYPES)
    both = torch.cat((edge_index(), edge_index().flip(0)), dim=1)
    return relational.RelationalGraph(both, torch.cat((types, types + num_relations)), num_edge_types=2 * num_relations)


def _compgcn(conv: Any, arguments: Arguments) -> None:
    width = arguments["in_channels"]
    nodes, relations = conv(torch.ones(4, width), torch.ones(4, width), with_inverses(arguments["num_relations"]))
    require(len(nodes) == len(relations) == 4, "an output per node and relation")


METADATA = (["a", "b"], [("a", "to", "b"), ("b", "of", "a")])


def _hgt_graph() -> relational.RelationalGraph:
    return relational.RelationalGraph.from_types(
        {METADATA[1][0]: torch.tensor([[0, 1], [1, 0]]), METADATA[1][1]: torch.tensor([[0, 1], [1, 1]])},
        {"a": 2, "b": 2},
    )


def _hgt(conv: Any, arguments: Arguments) -> None:
    out = conv({name: torch.ones(2, arguments["in_channels"]) for name in METADATA[0]}, _hgt_graph())
    require(set(out) == set(METADATA[0]), "an output per node type")


def _triples(case_file: str = "../out/triples.nt") -> Path:
    path = Path(case_file).resolve()
    path.write_text("<a> <likes> <b> .\n<b> <likes> <a> .\n")
    return path


def _ids() -> Path:
    path = Path("../out/ids.tsv").resolve()
    path.write_text("2\n0 1 0\n1 0 1\n")
    return path


def _saved_graph(subject: relational.RelationalGraph) -> Path:
    path = Path("../out/graph.pt").resolve()
    subject.save(path)
    return path


def _written_graph() -> Path:
    return unified.write_graph(Path("../out/edges.graph").resolve(), (edge_index(), torch.tensor(TYPES)), num_nodes=4)


_CONV = {"in_channels": 8, "out_channels": 6, "num_relations": 2}
_FORWARD: dict[str, Callable[[Any], Arguments]] = {"forward": lambda _: {"x": x(), "graph": typed()}}

USES |= {
    "relational.RelationalGraph": Use(
        call=relational.RelationalGraph,
        good=lambda _: {
            "edge_index": edge_index(), "edge_type": torch.tensor(TYPES), "num_nodes": 4, "num_edge_types": 2,
            "node_type": torch.tensor([0, 0, 1, 1]), "num_node_types": 2,
        },
        check=lambda graph, _: require(
            torch.equal(relational.layer(copied_sums)(graph, x()), _sums()), "sums over edges"
        ),
        methods={
            "from_types": lambda _: {"edge_index": {("a", "to", "a"): edge_index()}, "num_nodes": {"a": 4}},
            "load": lambda subject: {"path": _saved_graph(subject)},
            "save": lambda _: {"path": "../out/graph.pt"},
            "to": lambda _: {"device": "cpu"},
            "stream": lambda _: {
                "path": _written_graph(), "budget": "1MiB", "node_counts": [2, 2], "device": "cpu",
            },
            "charge_to": lambda _: {"budget": __import__("penstock").tiers.Budget(host="1MiB")},
        },
        skips=frozenset(
            {
                "from_pyg", "from_dgl", "count", "index", "index_in_order", "order", "segments", "remember", "of_edges",
                "take",
            }
        ),
    ),
    "relational.layer": Use(call=relational.layer, good=lambda _: {"function": copied_sums}, check=_layer),
    "relational.Layer": Use(
        call=relational.Layer, good=lambda _: {"function": copied_sums, "options": None}, check=_layer,
        methods={
            name: lambda _: {"graph": typed(), "*args": (x(),)} for name in ("__call__", "costs", "explain", "source")
        },
        skips=frozenset({"compute", "program_of", "trace_of"}),
    ),
    "relational.Options": Use(
        call=relational.Options,
        good=lambda _: {"compact": True, "reorder": True, "sum_first": True, "emitter": "eager"},
        check=lambda options, _: _layer(relational.Layer(copied_sums, options), {}),
    ),
    **{
        f"relational.{name}": Use(call=language(getattr(relational, name)), good=lambda _: {"value": _VALUE})
        for name in _ELEMENTWISE
    },
    "relational.leaky_relu": Use(
        call=language(relational.leaky_relu), good=lambda _: {"value": _VALUE, "slope": 0.1}
    ),
    "relational.dropout": Use(
        call=language(relational.dropout), good=lambda _: {"value": _VALUE, "probability": 0.1}
    ),
    "relational.dot": Use(call=language(relational.dot), good=lambda _: {"left": _VALUE, "right": _VALUE}),
    "relational.maximum": Use(call=language(relational.maximum), good=lambda _: {"left": _VALUE, "right": 0.5}),
    "relational.concat": Use(call=language(relational.concat), good=lambda _: {"*values": (_VALUE, _VALUE)}),
    "relational.softmax": Use(call=_softmaxed, good=lambda _: {"score": _VALUE, "per_type": False}),
    "relational.RGCNConv": Use(
        call=relational.RGCNConv, good=lambda _: {**_CONV, "num_bases": None, "aggr": "mean"}, check=_rgcn,
        methods=_FORWARD,
    ),
    "relational.RGATConv": Use(
        call=relational.RGATConv, good=lambda _: {**_CONV, "heads": 2}, check=_rgat, methods=_FORWARD
    ),
    "relational.HGTConv": Use(
        call=relational.HGTConv,
        good=lambda _: {"in_channels": 8, "out_channels": 6, "metadata": METADATA, "heads": 2}, check=_hgt,
        methods={"forward": lambda _: {"x": {name: torch.ones(2, 8) for name in METADATA[0]}, "graph": _hgt_graph()}},
    ),
    "relational.CompGCNConv": Use(
        call=relational.CompGCNConv, good=lambda _: {**_CONV, "composition": "subtract"}, check=_compgcn,
        methods={"forward": lambda _: {"x": x(), "relation": torch.ones(4, 8), "graph": with_inverses()}},
    ),
    "relational.RGraphSAGEConv": Use(
        call=relational.RGraphSAGEConv, good=lambda _: {**_CONV, "normalize": True}, check=_plain_conv,
        methods=_FORWARD,
    ),
    "relational.SimpleHGNConv": Use(
        call=relational.SimpleHGNConv, good=lambda _: {**_CONV, "heads": 2, "edge_dim": 4}, check=_plain_conv,
        methods=_FORWARD,
    ),
    "relational.read_id_file": Use(
        call=relational.read_id_file, good=lambda _: {"path": _ids()},
    ),
    "relational.read_ntriples": Use(
        call=relational.read_ntriples, good=lambda _: {"path": _triples(), "inverses": True},
        check=lambda triples, _: require(len(triples.nodes) == 2 and triples.graph().num_nodes == 2, "two nodes"),
    ),
}  # fmt: skip
RECORDS |= {
    "relational.Triples": lambda: relational.Triples(
        edge_index=edge_index(), edge_type=torch.tensor(TYPES), nodes={}, relations={}
    )
}
