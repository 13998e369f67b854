"""The edges of a graph, checked once: kernels rely on it."""

from dataclasses import dataclass

import torch

from penstock.storages import as_plain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edges:
    """Typed edges between typed nodes."""

    edge_index: torch.Tensor
    """Sources and targets, ``int64 [2, num_edges]``."""
    edge_type: torch.Tensor
    """Type of each edge, ``int64 [num_edges]``."""
    node_types: tuple[torch.Tensor, torch.Tensor]
    """Types of sources and of targets, ``int64``, in ascending order."""
    num_sources: int
    """Number of nodes that edges may leave."""
    num_targets: int
    """Number of nodes that edges may enter."""
    is_block: bool
    """Whether sources and targets are different nodes."""
    num_edge_types: int
    """Number of edge types."""
    num_node_types: int
    """Number of node types."""

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.edge_index.device

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edge_index.shape[1]

    @property
    def num_nodes(self) -> int | tuple[int, int]:
        """Number of nodes as given: one number, or two for sources and targets."""
        return (self.num_sources, self.num_targets) if self.is_block else self.num_sources

    def __str__(self) -> str:
        types = f", num_node_types={self.num_node_types}" if self.num_node_types > 1 else ""
        return (
            f"RelationalGraph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, "
            f"num_edge_types={self.num_edge_types}{types})"
        )


def edges_of(
    edge_index: torch.Tensor,
    edge_type: torch.Tensor | None,
    num_nodes: int | tuple[int, int] | None,
    num_edge_types: int | None,
    node_type: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    num_node_types: int | None,
) -> Edges:
    """Return the edges with the sizes that are not given, as `RelationalGraph` describes. Raises ``ValueError``."""
    edge_index = as_plain("edge_index", edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            f"edge_index must be int64 of shape [2, num_edges] with sources first, got {edge_index.dtype} of shape "
            f"{list(edge_index.shape)}: torch.stack([sources, targets])"
        )
    device, num_edges = edge_index.device, edge_index.shape[1]
    if edge_type is None:
        edge_type = torch.zeros(num_edges, dtype=torch.int64, device=device)
    edge_type = as_plain("edge_type", edge_type)
    _check_ids("edge_type", edge_type, num_edges, device)
    if num_nodes is None:
        num_nodes = max(int(row.max()) + 1 if num_edges else 0 for row in edge_index)
    sizes = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
    if min(sizes) < 0:
        raise ValueError(f"`num_nodes` must be at least 0, got {num_nodes}: RelationalGraph(edge_index, num_nodes=10)")
    for row, size, end in zip(edge_index, sizes, ("source", "target"), strict=True):
        check_range(f"the {end} of an edge (below `num_nodes`)", row, size)
    if num_edge_types is None:
        num_edge_types = max(int(edge_type.max()) + 1 if num_edges else 0, 1)
    check_range("edge_type", edge_type, num_edge_types)
    if num_edge_types * max(sizes) >= 2**63:
        raise ValueError(f"{num_edge_types} edge types of {max(sizes)} nodes have more pairs than an int64 can count")
    node_types, num_node_types = _node_types_of(node_type, num_node_types, sizes, device)
    return Edges(
        edge_index=edge_index.detach().clone(),  # the caller may write to the originals
        edge_type=edge_type.detach().clone(),
        node_types=node_types,
        num_sources=sizes[0],
        num_targets=sizes[1],
        is_block=isinstance(num_nodes, tuple),
        num_edge_types=num_edge_types,
        num_node_types=num_node_types,
    )


def _node_types_of(
    node_type: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    num_node_types: int | None,
    sizes: tuple[int, int],
    device: torch.device,
) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """Return the types of sources and targets, and the number of types."""
    if node_type is None:
        node_type = (
            torch.zeros(sizes[0], dtype=torch.int64, device=device),
            torch.zeros(sizes[1], dtype=torch.int64, device=device),
        )
    pair = node_type if isinstance(node_type, tuple) else (node_type, node_type)
    pair = as_plain("node_type", pair[0]), as_plain("node_type", pair[1])
    for types, size in zip(pair, sizes, strict=True):
        _check_ids("node_type", types, size, device)
        if len(types) and bool((types[1:] < types[:-1]).any()):
            raise ValueError(
                "node_type must be in ascending order: number the nodes type by type, as PyG's HeteroData and "
                "penstock.relational.RelationalGraph.from_pyg do"
            )
    if num_node_types is None:
        num_node_types = max([1, *(int(types[-1]) + 1 for types in pair if len(types))])
    for types in pair:
        check_range("node_type", types, num_node_types)
    return pair, num_node_types


def _check_ids(name: str, ids: torch.Tensor, size: int, device: torch.device) -> None:
    if ids.dtype != torch.int64 or ids.shape != (size,):
        raise ValueError(f"{name} must be int64 of shape [{size}], got {ids.dtype} of shape {list(ids.shape)}")
    if ids.device != device:
        raise ValueError(
            f"{name} must be on the device of edge_index, {device}, got {ids.device}: {name}.to(edge_index.device)"
        )


def check_range(name: str, ids: torch.Tensor, size: int) -> None:
    """Raise ``ValueError`` unless all numbers are from 0 to ``size - 1``."""
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise ValueError(f"{name} must be from 0 to {size - 1} (there are {size}), got numbers from {low} to {high}")
