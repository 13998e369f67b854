"""Saving graphs with their indexes to files, so that indexes are read instead of built again.

A file is safetensors: pairs and orders by the names of their domains, with sizes and names as JSON in the metadata.
Indexes that are cheap look-ups are not saved.
"""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.files import check_is_file, parse_json
from penstock.relational._domain import ENDS, Domain
from penstock.relational._indexes import Indexes, Pairs, SortedRows

_FORMAT = "penstock.relational 1"


class SavedGraph(Protocol):
    """The parts of a `RelationalGraph` that a file has."""

    indexes: Indexes
    """Edges and indexes."""
    node_type_names: tuple[str, ...]
    """Names of the node types."""
    edge_type_names: tuple[tuple[str, str, str], ...]
    """Names of the edge types."""


_Graph = TypeVar("_Graph", bound=SavedGraph)


def save_graph(graph: SavedGraph, path: Path) -> None:
    """Write to a temporary file next to ``path``, then replace ``path`` with it."""
    if not path.name:
        raise ValueError(f"`path` must name a file, got {str(path)!r}: graph.save('graph.pt')")
    tensors, edges = _tensors(graph.indexes), graph.indexes.edges
    about = {
        "num_nodes": [int(edges.num_sources), int(edges.num_targets)], "is_block": edges.is_block,
        "num_edge_types": int(edges.num_edge_types), "num_node_types": int(edges.num_node_types),
        "node_type_names": graph.node_type_names, "edge_type_names": graph.edge_type_names,
    }  # fmt: skip
    metadata = {"format": _FORMAT, "about": json.dumps(about)}
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        # Copies, because safetensors refuses tensors that share memory, as the types of sources and targets may.
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, part, metadata)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _tensors(indexes: Indexes) -> dict[str, torch.Tensor]:
    """Return a graph's tensors by name."""
    edges = indexes.edges
    tensors = {"edge_index": edges.edge_index, "edge_type": edges.edge_type}
    tensors["node_type 0"], tensors["node_type 1"] = edges.node_types
    pairs, orders = indexes.built()
    for domain, parts in pairs.items():
        tensors.update(zip(_names_of_pairs(domain), parts, strict=True))
    for (over, by), (positions, starts) in orders.items():
        tensors[f"starts {over.name} {by.name}"] = starts
        if positions is not None:
            tensors[f"positions {over.name} {by.name}"] = positions
    return tensors


def load_graph(make: Callable[..., _Graph], path: Path) -> _Graph:
    """Load the graph with its indexes, after checking what kernels will use; ``make`` makes a graph of edges."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not a file; graph.save({str(path)!r}) writes one")
    check_is_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is not a graph that RelationalGraph.save wrote: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {metadata.get('format')!r}, but RelationalGraph.save writes {_FORMAT!r}")
    try:
        graph = _made(make, parse_json(metadata["about"], "its description"), tensors)
        _take(graph.indexes, tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the parts of {path} do not fit together ({error}); save the graph again") from error
    return graph


def _made(
    make: Callable[..., _Graph],
    about: dict[str, Any],  # any: JSON
    tensors: dict[str, torch.Tensor],
) -> _Graph:
    sources, targets = about["num_nodes"]
    for number in (sources, targets, about["num_edge_types"], about["num_node_types"]):
        if type(number) is not int or not 0 <= number < 2**48:
            raise ValueError(f"expected a number of nodes or types, got {number!r}")
    types = tensors.pop("node_type 0"), tensors.pop("node_type 1")
    graph = make(
        tensors.pop("edge_index"), tensors.pop("edge_type"),
        num_nodes=(sources, targets) if about["is_block"] else sources,
        num_edge_types=about["num_edge_types"], node_type=types if about["is_block"] else types[0],
        num_node_types=about["num_node_types"],
    )  # fmt: skip
    graph.node_type_names = tuple(about["node_type_names"])
    graph.edge_type_names = tuple((name[0], name[1], name[2]) for name in about["edge_type_names"])
    return graph


def _take(indexes: Indexes, tensors: dict[str, torch.Tensor]) -> None:
    """Take the saved indexes, pairs first, because other sizes depend on them.

    Raises ``ValueError`` for indexes that a kernel could not use.
    """
    for domain in ENDS:
        nodes, types, of_edges = (tensors.pop(name, None) for name in _names_of_pairs(domain))
        if nodes is not None and types is not None and of_edges is not None:
            indexes.take_pairs(domain, _checked_pairs(indexes, domain, Pairs(nodes, types, of_edges)))
    for name in sorted(tensors):
        kind, *names = name.split()
        over, by = (Domain[domain] for domain in names)
        if kind == "starts":
            rows = SortedRows(tensors.get(f"positions {' '.join(names)}"), tensors[name])
            indexes.take_order(over, by, _checked_order(indexes, over, by, rows, name))
        elif kind != "positions":
            raise ValueError(f"unknown entry {name!r}")


def _checked_pairs(indexes: Indexes, domain: Domain, pairs: Pairs) -> Pairs:
    edges, end, num_pairs = indexes.edges, ENDS[domain], len(pairs.nodes)
    _check(pairs.nodes, torch.int64, num_pairs, indexes.count(end))
    _check(pairs.types, torch.int64, num_pairs, edges.num_edge_types)
    _check(pairs.of_edges, torch.int64, edges.num_edges, num_pairs)
    keys = pairs.types * indexes.count(end) + pairs.nodes
    of_edges = edges.edge_type * indexes.count(end) + edges.edge_index[0 if end is Domain.SOURCE else 1]
    if not bool((keys.diff() > 0).all()) or not torch.equal(keys[pairs.of_edges], of_edges):
        raise ValueError(f"pairs of {domain.name} do not match the edges")
    if bool((pairs.of_edges.bincount(minlength=num_pairs) == 0).any()):
        raise ValueError(f"a pair of {domain.name} has no edge")
    return pairs


def _checked_order(indexes: Indexes, over: Domain, by: Domain, rows: SortedRows, name: str) -> SortedRows:
    positions, starts = rows
    _check(starts, torch.int64, indexes.count(by) + 1, indexes.count(over) + 1)
    if int(starts[0]) or int(starts[-1]) != indexes.count(over) or bool((starts.diff() < 0).any()):
        raise ValueError(f"{name!r} is not a valid list of start positions")
    if positions is not None:
        _check(positions, torch.int32, indexes.count(over), indexes.count(over))
        if bool((positions.long().bincount(minlength=len(positions)) != 1).any()):
            raise ValueError(f"{name!r} has an order that repeats rows")
    index = indexes.index(over, by)
    keys = torch.zeros(indexes.count(over), dtype=torch.int64) if index is None else index
    keys = keys if positions is None else keys[positions.long()]
    if not torch.equal(keys, torch.arange(indexes.count(by)).repeat_interleave(starts.diff())):
        raise ValueError(f"{name!r} is not sorted")
    return rows


def _names_of_pairs(domain: Domain) -> tuple[str, str, str]:
    """Return the names of nodes, types and each edge's pair.

    Pairs and orders are costly to build; other indexes are looked up, and not saved.
    """
    return (
        f"index {domain.name} {ENDS[domain].name}",
        f"index {domain.name} {Domain.EDGE_TYPE.name}",
        f"index {Domain.EDGE.name} {domain.name}",
    )


def _check(index: torch.Tensor, dtype: torch.dtype, size: int, within: int) -> None:
    if index.dtype is not dtype or index.shape != (size,):
        raise ValueError(f"an index must be {dtype} of shape [{size}], got {index.dtype} of shape {list(index.shape)}")
    if size and (int(index.min()) < 0 or int(index.max()) >= within):
        raise ValueError(f"an index points outside of its {within} rows")
