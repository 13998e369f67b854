"""Saving graphs with their indexes to files, so that indexes are read instead of built again.

A file is safetensors: pairs and orders by the names of their domains, with sizes and names as JSON in the metadata.
Indexes that are cheap look-ups are not saved.
"""

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.files import check_is_file, parse_json
from penstock.relational._domain import ENDS, Domain

if TYPE_CHECKING:
    from penstock.relational._graph import RelationalGraph

_FORMAT = "penstock.relational 1"


def save_graph(graph: "RelationalGraph", path: Path) -> None:
    """Write to a temporary file next to ``path``, then replace ``path`` with it."""
    if not path.name:
        raise ValueError(f"`path` must name a file, got {str(path)!r}: graph.save('graph.pt')")
    with graph._lock:
        tensors = _tensors(graph)
    about = {
        "num_nodes": [int(graph.num_sources), int(graph.num_targets)], "is_block": graph.is_block,
        "num_edge_types": int(graph.num_edge_types), "num_node_types": int(graph.num_node_types),
        "node_type_names": graph.node_type_names, "edge_type_names": graph.edge_type_names,
    }  # fmt: skip
    metadata = {"format": _FORMAT, "about": json.dumps(about)}
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        save_file({name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()}, part, metadata)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _tensors(graph: "RelationalGraph") -> dict[str, torch.Tensor]:
    """Return the graph's tensors by name."""
    tensors = {"edge_index": graph.edge_index, "edge_type": graph.edge_type}
    tensors["node_type 0"], tensors["node_type 1"] = graph._node_types
    for of, to in _pair_indexes():
        if (of, to) in graph._indexes:
            tensors[f"index {of.name} {to.name}"] = graph._indexes[of, to]
    for (over, by), (positions, starts) in graph._orders.items():
        tensors[f"starts {over.name} {by.name}"] = starts
        if positions is not None:
            tensors[f"positions {over.name} {by.name}"] = positions
    return tensors


def load_graph(made: type["RelationalGraph"], path: Path) -> "RelationalGraph":
    """Load the graph with its indexes, after checking what kernels will use."""
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
        graph = _made(made, parse_json(metadata["about"], "its description"), tensors)
        _take(graph, tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the parts of {path} do not fit together ({error}); save the graph again") from error
    return graph


def _made(
    made: type["RelationalGraph"],
    about: dict[str, Any],
    tensors: dict[str, torch.Tensor],  # any: JSON
) -> "RelationalGraph":
    sources, targets = about["num_nodes"]
    for one in (sources, targets, about["num_edge_types"], about["num_node_types"]):
        if type(one) is not int or not 0 <= one < 2**48:
            raise ValueError(f"expected a number of nodes or types, got {one!r}")
    types = tensors.pop("node_type 0"), tensors.pop("node_type 1")
    graph = made(
        tensors.pop("edge_index"), tensors.pop("edge_type"),
        num_nodes=(sources, targets) if about["is_block"] else sources,
        num_edge_types=about["num_edge_types"], node_type=types if about["is_block"] else types[0],
        num_node_types=about["num_node_types"],
    )  # fmt: skip
    graph.node_type_names = tuple(about["node_type_names"])
    graph.edge_type_names = tuple((one[0], one[1], one[2]) for one in about["edge_type_names"])
    return graph


def _take(graph: "RelationalGraph", tensors: dict[str, torch.Tensor]) -> None:
    """Take the saved indexes into the graph, pairs first, because other sizes depend on them.

    Raises ``ValueError`` for indexes that a kernel could not use.
    """
    for domain, end in ENDS.items():
        three = _pair_indexes(domain)
        found = [tensors.pop(f"index {of.name} {to.name}", None) for of, to in three]
        if found[0] is None or found[1] is None or found[2] is None:
            continue
        pairs = len(found[0])
        sizes = (pairs, graph.count(end)), (pairs, graph.num_edge_types), (graph.num_edges, pairs)
        for (of, to), one, (rows, within) in zip(three, found, sizes, strict=True):
            assert one is not None
            graph._indexes[of, to] = _checked(one, torch.int64, rows, within)
        keys = found[1] * graph.count(end) + found[0]
        of_edges = graph.edge_type * graph.count(end) + graph.edge_index[0 if end is Domain.SOURCE else 1]
        if not bool((keys.diff() > 0).all()) or not torch.equal(keys[found[2]], of_edges):
            raise ValueError(f"pairs of {domain.name} do not match the edges")
        if bool((found[2].bincount(minlength=pairs) == 0).any()):
            raise ValueError(f"a pair of {domain.name} has no edge")
    for name in sorted(tensors):
        kind, *names = name.split()
        over, by = (Domain[one] for one in names)
        if kind == "starts":
            starts = _checked(tensors[name], torch.int64, graph.count(by) + 1, graph.count(over) + 1)
            if int(starts[0]) or int(starts[-1]) != graph.count(over) or bool((starts.diff() < 0).any()):
                raise ValueError(f"{name!r} is not a valid list of start positions")
            positions = tensors.get(f"positions {' '.join(names)}")
            if positions is not None:
                _checked(positions, torch.int32, graph.count(over), graph.count(over))
                if bool((positions.long().bincount(minlength=len(positions)) != 1).any()):
                    raise ValueError(f"{name!r} has an order that repeats rows")
            index = graph.index(over, by)
            keys = torch.zeros(graph.count(over), dtype=torch.int64) if index is None else index
            keys = keys if positions is None else keys[positions.long()]
            if not torch.equal(keys, torch.arange(graph.count(by)).repeat_interleave(starts.diff())):
                raise ValueError(f"{name!r} is not sorted")
            graph._orders[over, by] = (positions, starts)
        elif kind != "positions":
            raise ValueError(f"unknown entry {name!r}")


def _pair_indexes(*domains: Domain) -> list[tuple[Domain, Domain]]:
    """Return the indexes that are costly to build: nodes and types of pairs, and each edge's pair.

    Others are looked up.
    """
    return [
        index
        for domain in domains or ENDS
        for index in ((domain, ENDS[domain]), (domain, Domain.EDGE_TYPE), (Domain.EDGE, domain))
    ]


def _checked(index: torch.Tensor, dtype: torch.dtype, size: int, within: int) -> torch.Tensor:
    if index.dtype is not dtype or index.shape != (size,):
        raise ValueError(f"an index must be {dtype} of shape [{size}], got {index.dtype} of shape {list(index.shape)}")
    if size and (int(index.min()) < 0 or int(index.max()) >= within):
        raise ValueError(f"an index points outside of its {within} rows")
    return index
