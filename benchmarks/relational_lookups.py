"""Rates of rows that edges look up: our traversals, and PyTorch's `embedding_bag`, which also takes bfloat16."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import embedding_bag

from benchmarks.common import Row, show
from benchmarks.relational_graphs import Edges
from penstock import relational
from penstock.probe import in_rounds


@relational.layer
def sum_of_rows(g: Any, x: Any) -> Any:
    """Add up the sources' rows."""
    for e in g.edges():
        row = x[e.src]
    for n in g.nodes():
        total = n.sum(row)
    return total


@relational.layer
def weighted(g: Any, x: Any, weight: Any) -> Any:
    """Add up the sources' rows, each times a number of its edge."""
    for e in g.edges():
        row = weight[e] * x[e.src]
    for n in g.nodes():
        total = n.sum(row)
    return total


@relational.layer
def dots(g: Any, x: Any) -> Any:
    """Multiply the rows of both ends."""
    for e in g.edges():
        score = relational.dot(x[e.src], x[e.dst])
    return score


class Lookups:
    """Calls that read one row of 64 numbers, or two, for each edge of a graph."""

    def __init__(self, edges: Edges):
        graph, by_target = edges.graph(), edges.edge_index[1].argsort(stable=True)
        counts = torch.bincount(edges.edge_index[1], minlength=edges.num_nodes)
        sources, starts = edges.edge_index[0][by_target], torch.cat([torch.zeros(1), counts.cumsum(0)])
        self._sources, self._starts = sources.int(), starts.int()
        x, weight = torch.randn(edges.num_nodes, 64), torch.randn(len(sources), 1)
        half, sorted_weight = x.bfloat16(), weight[by_target].flatten()
        self.calls: dict[str, Callable[[], torch.Tensor]] = {
            "sum": lambda: sum_of_rows(graph, x),
            "sum, embedding_bag": lambda: self._bag(x),
            "weighted sum": lambda: weighted(graph, x, weight),
            "weighted sum, embedding_bag": lambda: self._bag(x, sorted_weight),
            "dot of two rows": lambda: dots(graph, x),
            "sum of bfloat16, embedding_bag": lambda: self._bag(half),
        }

    def _bag(self, table: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return embedding_bag(
            self._sources, table, self._starts, mode="sum", include_last_offset=True, per_sample_weights=weight
        )


@torch.no_grad()
def lookups(graphs: dict[str, Callable[[], Edges]], rows: list[Row], rounds: int) -> None:
    """Measure all calls in turn; the rate of bytes counts a row of 256 bytes for each that is looked up."""
    lines = []
    for name, make_graph in graphs.items():
        edges = make_graph()
        calls = Lookups(edges).calls
        torch.testing.assert_close(calls["sum"](), calls["sum, embedding_bag"](), rtol=1e-3, atol=1e-3)
        taken = {call: median(times) for call, times in in_rounds(calls, rounds=5 * rounds, device="cpu").items()}
        for call, seconds in taken.items():
            rate = edges.edge_index.shape[1] * 256 / seconds / 1e9
            ratio = taken[f"{call}, embedding_bag"] / seconds if f"{call}, embedding_bag" in taken else None
            rows.append(Row(name=f"lookups {name}", metric=call, value=rate, unit="GB/s", ratio=ratio))
        gain = taken["sum, embedding_bag"] / taken["sum of bfloat16, embedding_bag"]
        rows.append(
            Row(
                name=f"lookups {name}", metric="bfloat16's rate of rows over float32's", value=gain, unit="", ratio=gain
            )
        )
        lines.append([name, *(f"{edges.edge_index.shape[1] / seconds / 1e6:,.0f}" for seconds in taken.values())])
    show("million rows of 64 numbers a second", ["", *taken], lines)
