"""Outputs of a model's layers for all nodes, layer by layer: each layer once over the graph.

To compute the outputs of a few nodes by a model of ``n`` layers, one needs the neighbours of their neighbours, ``n``
times; to do that for all nodes computes most of the first layer again for each of them. Here a layer's outputs for all
nodes are written to a file before the next layer reads them, so that nothing is computed twice. Source: the layer-wise
inference of Yin et al., "DGI: An Easy and Efficient Framework for GNN Model Evaluation" (KDD 2023).
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from penstock.arguments import checked, must_be
from penstock.errors import BudgetError
from penstock.tiers import Size
from penstock.unified._files import find_table
from penstock.unified._graph import Graph
from penstock.unified._loader import Features, in_advance, read_features
from penstock.unified._sampler import Block, NeighborSampler, Sample
from penstock.unified._tiered import TieredFeatures
from penstock.unified._write import write_features
from penstock.units import format_bytes, parse_bytes

Layer = Callable[[torch.Tensor, Block], torch.Tensor]
"""A layer, called with the rows of a block's sources ``[sources, ...]`` (its targets come first) and the block; returns
rows for the block's targets ``[targets, ...]``."""

_EXAMPLE = "infer([layer], graph, features, 'outputs.features', host='1GiB')"
_EDGE_BYTES = 64
"""Bytes of memory for each edge of a block, beside its rows."""
_FILLED = 0.9
"""Share of a block's rows that its size is chosen for, from the blocks before it."""


@checked("penstock.unified." + _EXAMPLE)
def infer(
    layers: Sequence[Layer],
    graph: Graph,
    features: Features | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    host: Size = "1GiB",
    progress: bool = True,
) -> Path:
    """Compute all nodes' outputs layer by layer and write them, in order, to a `write_features` file. Return its path.

    ``layers``: functions ``layer(x, block)``, which are called without gradients for parts of the graph that cover
    every node once. ``x`` are the rows of the nodes that the part needs, ``[block.num_sources, ...]``, targets first;
    ``block.edge_index`` are all edges that enter its targets, in the graph's order, and ``block.edges`` their numbers.
    A layer returns ``[block.num_targets, ...]``. With PyG:
    ``lambda x, block: conv((x, x[: block.num_targets]), block.edge_index)``. Call ``model.eval()`` first.

    ``features``: rows of all nodes: a tensor, `TieredFeatures`, or a file, which is read in place. ``host`` bounds
    what is held in memory: a quarter for the current part, a quarter for the next, which is read meanwhile, and half
    for the most wanted rows of a file. The outputs of a layer are in a file beside ``path``, which is deleted when the
    next layer has read it. To choose these rows takes 40 bytes a node for a moment. Rows arrive where ``features``
    gives them; a layer moves them if it must.

    Raises ``ValueError`` for features or outputs that are not one row a node, ``BudgetError`` for too little memory.
    """
    path, host_bytes = Path(path), parse_bytes(host)
    if not layers or not all(callable(layer) for layer in layers):
        raise must_be("layers", "functions of rows and a block", layers, f"penstock.unified.{_EXAMPLE}")
    if graph.num_sources != graph.num_nodes:
        raise ValueError(
            f"`graph` must lead from nodes to the same nodes, got one from {graph.num_sources} sources to "
            f"{graph.num_nodes} targets: infer reads the outputs of one layer as the inputs of the next"
        )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.layers-") as folder:
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            with contextlib.ExitStack() as stack:
                table = stack.enter_context(_opened(features, graph, host_bytes))
                if len(table) != graph.num_nodes:
                    raise ValueError(
                        f"`features` must have one row for each of {graph.num_nodes} nodes, got {len(table)} rows"
                    )
                outputs = _outputs(layer, number, graph, table, host_bytes)
                target = path if is_last else Path(folder) / f"{number}.features"
                written = write_features(target, outputs, progress=progress)
            if number:
                Path(str(features)).unlink()
            features = written
    return path


def _opened(
    features: Features | str | os.PathLike[str], graph: Graph, host_bytes: int
) -> contextlib.AbstractContextManager[Features]:
    """Return the rows that a layer reads; those of a file with the most wanted of them in memory."""
    if isinstance(features, torch.Tensor):
        return contextlib.nullcontext(features)
    # in each layer every node is read once for each part that has an edge from it
    wanted = graph.out_degrees().double() + 1 if find_table(features).shape[0] == graph.num_nodes else None
    try:
        return TieredFeatures(features, host=host_bytes // 2, in_flight=0, scores=wanted)
    except BudgetError as error:
        raise BudgetError(f"half of `host` is for the rows that a layer reads, for which {error}") from None


def _outputs(layer: Layer, number: int, graph: Graph, table: Features, host_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a layer's outputs for all nodes, in order."""
    row_bytes, most_bytes = table[:1].nbytes, host_bytes // 4
    if most_bytes < 2 * (row_bytes + _EDGE_BYTES):
        raise BudgetError(
            f"`host` must be at least {8 * (row_bytes + _EDGE_BYTES)}, got {format_bytes(host_bytes)}: a quarter of it "
            "holds the rows of a part of the graph"
        )

    def read() -> Iterator[tuple[torch.Tensor, Block]]:
        for sample in _parts(graph, most_bytes, row_bytes):
            yield read_features(table, sample.nodes), sample.block(0)

    with contextlib.closing(in_advance(read(), ahead=1)) as parts:
        for rows, block in parts:
            with torch.no_grad():
                out = layer(rows, block)
            if not isinstance(out, torch.Tensor) or not out.dim() or len(out) != block.num_targets:
                shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
                raise ValueError(
                    f"layer {number} must return one row for each of the block's {block.num_targets} targets, got "
                    f"{shape}: "
                    "lambda x, block: conv((x, x[: block.num_targets]), block.edge_index)"
                )
            del rows
            yield out.detach().cpu()


def _parts(graph: Graph, most_bytes: int, row_bytes: int) -> Iterator[Sample]:
    """Yield samples of all edges that enter consecutive nodes, each with rows and edges of at most ``most_bytes``."""
    sampler, first, share = NeighborSampler(graph, [-1]), 0, 1.0
    while first < graph.num_nodes:
        # `share`: how many nodes the part before had for each of its targets and edges
        last = _end(graph, first, int(_FILLED * most_bytes / (share * row_bytes + _EDGE_BYTES)))
        while True:
            sample = sampler.sample(torch.arange(first, last, device="cpu"), number=0)
            size_bytes = len(sample.nodes) * row_bytes + len(sample.rows) * _EDGE_BYTES
            if size_bytes <= most_bytes or last == first + 1:
                break
            last = first + (last - first) // 2
        share = len(sample.nodes) / (last - first + len(sample.rows))
        yield sample
        first = last


def _end(graph: Graph, first: int, most: int) -> int:
    """Return the end of the nodes from ``first`` on that are, with their edges, at most so many; at least one node."""
    low, high = first + 1, graph.num_nodes
    before = int(graph.starts[first])
    while low < high:  # the largest end that fits
        middle = (low + high + 1) // 2
        if middle - first + int(graph.starts[middle]) - before <= most:
            low = middle
        else:
            high = middle - 1
    return low
