"""Graphs with their indexes as files: what took a second to build is read in its place.

A file is safetensors, one tensor for each index by the names of its domains, and sizes and names as JSON beside them.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.relational._domain import Domain

if TYPE_CHECKING:
    from penstock.relational._graph import RelationalGraph

_FORMAT = "penstock.relational 1"
_GIVEN = {(Domain.EDGE, Domain.SOURCE), (Domain.EDGE, Domain.TARGET), (Domain.EDGE, Domain.EDGE_TYPE)}
"""Indexes that are the graph's own tensors."""


def save_graph(graph: "RelationalGraph", path: Path) -> None:
    """Writes beside ``path`` first and then takes its place."""
    tensors = {"edge_index": graph.edge_index, "edge_type": graph.edge_type}
    tensors["node_type 0"], tensors["node_type 1"] = graph._node_types
    for (of, to), index in graph._indexes.items():
        if (of, to) not in _GIVEN:
            tensors[f"index {of.name} {to.name}"] = index
    for (over, by), (positions, starts) in graph._orders.items():
        tensors[f"starts {over.name} {by.name}"] = starts
        if positions is not None:
            tensors[f"positions {over.name} {by.name}"] = positions
    for (over, by_or_none, to), index in graph._indexes_in_order.items():
        by_name = "-" if by_or_none is None else by_or_none.name
        tensors[f"in_order {over.name} {by_name} {to.name}"] = index
    about = {
        "num_nodes": [graph.num_sources, graph.num_targets], "is_block": graph.is_block,
        "num_edge_types": graph.num_edge_types, "num_node_types": graph.num_node_types,
        "node_type_names": graph.node_type_names, "edge_type_names": graph.edge_type_names,
    }  # fmt: skip
    metadata = {"format": _FORMAT, "about": json.dumps(about)}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file({name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()}, part, metadata)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_graph(made: type["RelationalGraph"], path: Path) -> "RelationalGraph":
    """The graph with its indexes; index tensors are checked for their sizes, the graph's own as always."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; graph.save({str(path)!r}) writes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is no graph that RelationalGraph.save wrote: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} is of format {metadata.get('format')!r}; RelationalGraph.save writes {_FORMAT!r}")
    about = json.loads(metadata["about"])
    sources, targets = about["num_nodes"]
    types = tensors.pop("node_type 0"), tensors.pop("node_type 1")
    num_nodes = (sources, targets) if about["is_block"] else sources
    graph = made(
        tensors.pop("edge_index"), tensors.pop("edge_type"), num_nodes=num_nodes,
        num_edge_types=about["num_edge_types"], node_type=types if about["is_block"] else types[0],
        num_node_types=about["num_node_types"],
    )  # fmt: skip
    graph.node_type_names = tuple(about["node_type_names"])
    graph.edge_type_names = tuple((one[0], one[1], one[2]) for one in about["edge_type_names"])
    _take(graph, tensors, path)
    return graph


def _take(graph: "RelationalGraph", tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Indexes first: how many pairs there are is known from them."""
    for name in sorted(tensors):
        kind, *names = name.split()
        domains = [None if one == "-" else Domain[one] for one in names]
        first = domains[0]
        assert first is not None
        one = tensors[name]
        if kind == "index":
            graph._indexes[first, domains[1]] = one  # type: ignore[index]
        elif kind == "in_order":
            graph._indexes_in_order[first, domains[1], domains[2]] = one  # type: ignore[index]
        elif kind == "starts":
            graph._orders[first, domains[1]] = (tensors.get(f"positions {' '.join(names)}"), one)  # type: ignore[index]
    for (of, to), one in graph._indexes.items():
        _check(len(one) == graph.count(of) and _is_within(one, graph.count(to)), path, f"index {of.name} {to.name}")
    for (over, _, to), one in graph._indexes_in_order.items():
        _check(len(one) == graph.count(over) and _is_within(one, graph.count(to)), path, f"in_order {over.name}")
    for (over, by), (positions, starts) in graph._orders.items():
        fits = len(starts) == graph.count(by) + 1 and int(starts[-1]) == graph.count(over) and int(starts[0]) == 0
        fits = fits and bool((starts.diff() >= 0).all())
        if positions is not None:
            fits = fits and len(positions) == graph.count(over) and _is_within(positions, graph.count(over))
        _check(fits, path, f"order {over.name} {by.name}")


def _is_within(index: torch.Tensor, count: int) -> bool:
    return not len(index) or (int(index.min()) >= 0 and int(index.max()) < count)


def _check(fits: bool, path: Path, name: str) -> None:
    if not fits:
        raise ValueError(f"{path}: its {name!r} does not fit the graph; save the graph again")
