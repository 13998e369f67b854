"""Misuses of `unified` and `relational` that no signature shows: indices, order, and objects that are shared."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.misuse_graphs import chosen, copied_sums, edge_index, equal_rows, graph, rows, typed, x
from benchmarks.misuse_table import require, scene
from benchmarks.soak_case import Case
from penstock import relational, unified


def features(case: Case, source: Any = None, **changes: Any) -> unified.TieredFeatures:
    arguments = {"host": 20 * 1024, "in_flight": 4096, "disk": case.disk()}
    return unified.TieredFeatures(rows() if source is None else source, **(arguments | changes))


@scene("unified: one table in two TieredFeatures")
def table_twice(case: Case) -> None:
    source = rows()
    first, second = features(case, source), features(case, source)
    equal_rows(first, rows())
    first.close()
    equal_rows(second, rows())
    second.close()


@scene("unified: one file in two TieredFeatures")
def file_twice(case: Case) -> None:
    path = unified.write_features(case.folder / "out" / "a.features", rows(), progress=False)
    first, second = features(case, path), features(case, path)
    first.close()
    equal_rows(second, rows())
    second.close()


@scene("unified: TieredFeatures of TieredFeatures")
def table_of_table(case: Case) -> None:
    first = features(case)
    try:
        second = features(case, first)
        equal_rows(second, rows())
        second.close()
    finally:
        first.close()


@scene("unified: TieredFeatures of a unified tensor")
def table_of_unified(case: Case) -> None:
    with features(case, unified.wrap(rows())) as table:
        equal_rows(table, rows())


@scene("unified: read in threads, closed meanwhile")
def closed_meanwhile(case: Case) -> None:
    table = features(case)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(200):
                require(torch.equal(table[chosen()], rows()[chosen()]), "rows differ")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    table.close()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@scene("unified: the file goes in use")
def file_gone(case: Case) -> None:
    path = unified.write_features(case.folder / "out" / "a.features", rows(), progress=False)
    with features(case, path) as table:
        path.unlink()
        equal_rows(table, rows())


@scene("unified: the file is written anew in use")
def file_replaced(case: Case) -> None:
    path = unified.write_features(case.folder / "out" / "a.features", rows(), progress=False)
    with features(case, path) as table:
        unified.write_features(path, rows() + 1, progress=False)
        equal_rows(table, rows())


for _label, _index in {
    "a row that is not there": 40, "a row before the first": -41, "fractions": torch.tensor([0.5]),
    "a mask that is too short": torch.ones(3, dtype=torch.bool), "text": "12 potatoes", "backwards": slice(5, 0, -1),
    "huge": 2**70, "None": None, "columns": (0, 99),
}.items():  # fmt: skip

    @scene(f"unified: features by {_label}")
    def indexed(case: Case, index: Any = _index) -> None:
        with features(case) as table:
            require(table[index].shape == rows()[index].shape, "as PyTorch's")

    @scene(f"unified: a unified tensor by {_label}")
    def unified_indexed(_: Case, index: Any = _index) -> None:
        require(unified.wrap(rows())[index].shape == rows()[index].shape, "as PyTorch's")


@scene("unified: a loader inside of itself")
def nested_loader(case: Case) -> None:
    loader = unified.Loader(unified.NeighborSampler(graph(), [2]), rows()[:4], torch.arange(4), batch_size=2)
    pairs = [(outer, inner) for outer in loader for inner in loader]
    require(len(pairs) == 4, "all pairs")


@scene("unified: a loader that is left early")
def left_early(case: Case) -> None:
    with features(case) as table:
        sampler = unified.NeighborSampler(unified.Graph(edge_index(), 40), [2])
        loader = unified.Loader(sampler, table, torch.arange(40), batch_size=2, ahead=4)
        for _ in loader:
            break
        require(len(list(loader)) == 20, "the next epoch is whole")


@scene("unified: a loader over features that are closed")
def loader_of_closed(case: Case) -> None:
    table = features(case)
    sampler = unified.NeighborSampler(unified.Graph(edge_index(), 40), [2])
    loader = unified.Loader(sampler, table, torch.arange(40), batch_size=2)
    table.close()
    list(loader)


@scene("unified: a loader whose features have too few rows")
def too_few_rows(_: Case) -> None:
    list(unified.Loader(unified.NeighborSampler(graph(), [2]), rows()[:2], torch.arange(4), batch_size=2))


@scene("unified: a loader whose labels are too few")
def too_few_labels(_: Case) -> None:
    list(
        unified.Loader(
            unified.NeighborSampler(graph(), [2]), rows()[:4], torch.arange(4), batch_size=2, labels=torch.ones(1)
        )
    )


@scene("unified: seeds that are no nodes")
def no_nodes(_: Case) -> None:
    list(unified.Loader(unified.NeighborSampler(graph(), [2]), rows()[:4], torch.tensor([9]), batch_size=2))


@scene("unified: a source that fails in the middle of writing")
def failing_source(case: Case) -> None:
    def blocks() -> Iterator[torch.Tensor]:
        yield rows()
        raise ValueError("`source` must be whole, such as the user says")

    path = case.folder / "out" / "a.features"
    try:
        unified.write_features(path, blocks(), progress=False)
    finally:
        require(not os.listdir(path.parent), "nothing is left")


@scene("unified: blocks of other widths")
def other_widths(case: Case) -> None:
    unified.write_features(case.folder / "out" / "a.features", [rows(), rows()[:, :3]], progress=False)


@scene("unified: more rows than the Budget has room for")
def no_room(case: Case) -> None:
    features(case, budget=case.budget(host="1KiB"))


# relational


@scene("relational: one graph on two layers")
def two_layers(_: Case) -> None:
    shared, fresh = typed(), typed()
    torch.manual_seed(0)
    first, second = (relational.RGCNConv(8, 8, 2) for _ in range(2))
    ours, expected = second(first(x(), shared), shared), second(first(x(), fresh), typed())
    require(torch.equal(ours, expected), "as on graphs of their own")
    ours.sum().backward()


@scene("relational: one graph in two threads")
def graph_in_threads(_: Case) -> None:
    shared, outputs = typed(), []
    conv = relational.RGCNConv(8, 8, 2)
    threads = [threading.Thread(target=lambda: outputs.append(conv(x(), shared))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(
        len(outputs) == 3 and all(torch.equal(output, conv(x(), typed())) for output in outputs), "as in one thread"
    )


@scene("relational: one graph in a forked child")
def graph_forked(_: Case) -> None:
    from benchmarks.misuse_case import in_child

    shared, conv = typed(), relational.RGCNConv(8, 8, 2)
    expected = conv(x(), shared)
    in_child(lambda: require(torch.equal(conv(x(), shared), expected), "as in the parent"))


@scene("relational: the caller's edges change")
def edges_change(_: Case) -> None:
    edges = edge_index()
    graph = relational.RelationalGraph(edges, torch.zeros(6, dtype=torch.int64))
    layer = relational.layer(copied_sums)
    expected = layer(graph, x())
    edges.fill_(99)
    require(torch.equal(layer(graph, x()), expected), "the graph has its own")


@scene("relational: one graph on two Budgets")
def two_accounts(case: Case) -> None:
    graph = typed()
    first, second = case.budget(device="1MiB"), case.budget(device="1MiB")
    graph.charge_to(first)
    graph.charge_to(second)
    relational.RGCNConv(8, 8, 2)(x(), graph)
    require(first.held_bytes("device") == 0 or second.held_bytes("device") == 0, "on one account at a time")
    del graph


@scene("relational: one graph on one Budget twice")
def one_account_twice(case: Case) -> None:
    graph, budget = typed(), case.budget(device="1MiB")
    graph.charge_to(budget)
    held_bytes = budget.held_bytes("device")
    graph.charge_to(budget)
    require(budget.held_bytes("device") == held_bytes, "counts once")


def _wrong_inputs() -> dict[str, Callable[[], Any]]:
    conv = relational.RGCNConv(8, 6, 2)
    return {
        "too few rows": lambda: conv(x()[:3], typed()),
        "too many rows": lambda: conv(torch.ones(9, 8), typed()),
        "another width": lambda: conv(torch.ones(4, 5), typed()),
        "whole numbers": lambda: conv(torch.ones(4, 8, dtype=torch.int64), typed()),
        "one dimension": lambda: conv(torch.ones(4), typed()),
        "another type of number": lambda: conv(x().double(), typed()),
        "edges without types": lambda: conv(x(), edge_index()),
        "types that the layer does not know": lambda: conv(x(), edge_index(), torch.full((6,), 9)),
        "types for other edges": lambda: conv(x(), edge_index(), torch.zeros(2, dtype=torch.int64)),
        "a graph of another number of types": lambda: conv(
            x(), relational.RelationalGraph(edge_index(), torch.arange(6), num_edge_types=6)
        ),
        "a graph of the other room": lambda: conv(x(), graph()),
    }


for _label in _wrong_inputs():

    @scene(f"relational: a layer's input, {_label}")
    def wrong_input(_: Case, label: str = _label) -> None:
        _wrong_inputs()[label]()


@scene("relational: the language outside of a layer")
def language_outside(_: Case) -> None:
    relational.exp(3.0)  # type: ignore[arg-type]


@scene("relational: a layer that returns nothing")
def returns_nothing(_: Case) -> None:
    relational.layer(lambda g, x: None)(typed(), x())


@scene("relational: a layer that takes nothing")
def takes_nothing(_: Case) -> None:
    relational.layer(lambda: None)(typed(), x())


@scene("relational: a layer that iterates over its graph")
def iterates(_: Case) -> None:
    relational.layer(lambda g, x: list(g))(typed(), x())


@scene("relational: a layer that asks a value whether it is true")
def asks(_: Case) -> None:
    def branching(g: Any, x: Any) -> Any:
        for e in g.edges():
            return x[e.src] if x[e.src] > 0 else x[e.dst]

    relational.layer(branching)(typed(), x())


@scene("relational: backward twice")
def relational_twice(_: Case) -> None:
    conv = relational.RGCNConv(8, 6, 2)
    loss = conv(x(), typed()).sum()
    loss.backward()
    loss.backward()


@scene("relational: double backward")
def relational_double(_: Case) -> None:
    conv = relational.RGCNConv(8, 6, 2)
    (gradient,) = torch.autograd.grad(conv(x(), typed()).square().sum(), conv.weight, create_graph=True)
    gradient.sum().backward()
