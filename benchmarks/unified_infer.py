"""Outputs of GraphSAGE for all nodes: layer by layer, beside a loader that takes all neighbors of all neighbors.

Features are in a file, four times the memory that either may hold of them. PyG's two layers run in both. The loader is
PyG's ``NodeLoader`` with our sampler and `TieredFeatures` of the same budget; it goes over ``--batches`` mini-batches,
from which its time for all nodes follows, since all are alike. Outputs of those nodes are compared.

Run it with ``python -m benchmarks.unified_infer --disk /nvme --json unified-infer.json``.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv

from benchmarks.common import Row, parser, show, write
from penstock import unified
from penstock.integrations import pyg_sampler
from penstock.testing.graphs import MadeGraph
from penstock.units import format_bytes

HIDDEN, CLASSES = 128, 16


class GraphSAGE(torch.nn.Module):
    """Two layers of PyG."""

    def __init__(self, width: int):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(width, HIDDEN), SAGEConv(HIDDEN, CLASSES)])

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def first(self, x: torch.Tensor, block: unified.Block) -> torch.Tensor:
        return self.convs[0]((x, x[: block.num_targets]), block.edge_index).relu()

    def second(self, x: torch.Tensor, block: unified.Block) -> torch.Tensor:
        return self.convs[1]((x, x[: block.num_targets]), block.edge_index)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--nodes", type=int, default=1_000_000)
    options.add_argument("--degree", type=int, default=20)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--batch", type=int, default=1024)
    options.add_argument("--batches", type=int, default=5, help="of each round of the loader")
    options.add_argument("--rounds", type=int, default=3)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.nodes, settings.width, settings.batch, settings.batches, settings.rounds = 8_000, 2048, 64, 2, 1
    made = MadeGraph(num_nodes=settings.nodes, num_edges=settings.nodes * settings.degree)
    edge_index = torch.cat(list(made.edges()), dim=1)
    graph = unified.Graph(edge_index, made.num_nodes)
    torch.manual_seed(0)
    model = GraphSAGE(settings.width).eval()
    host = settings.nodes * settings.width  # a quarter of the features' bytes
    ours, theirs, differences = [], [], []
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="penstock-infer-") as folder:
        file, out = Path(folder) / "rows.features", Path(folder) / "out.features"
        unified.write_features(file, made.features(settings.width))
        for number in range(settings.rounds):
            start_s = time.perf_counter()
            unified.infer([model.first, model.second], graph, file, out, host=host)
            ours.append(time.perf_counter() - start_s)
            with unified.TieredFeatures(file, host=host, scores=graph.out_degrees()) as table:
                data = Data(x=table, edge_index=edge_index)
                seeds = torch.randperm(made.num_nodes)[: settings.batch * settings.batches]
                loader = NodeLoader(data, pyg_sampler(data, [-1, -1]), input_nodes=seeds, batch_size=settings.batch)
                start_s, found = time.perf_counter(), []
                with torch.no_grad():
                    found = [model(batch.x, batch.edge_index)[: batch.batch_size] for batch in loader]
                theirs.append((time.perf_counter() - start_s) * made.num_nodes / len(seeds))
            with unified.TieredFeatures(out) as outputs:
                differences.append(float((torch.cat(found) - outputs[seeds]).abs().max()))
            print(f"round {number + 1} of {settings.rounds}", flush=True)
    rows = [
        Row(name="layer by layer", metric="time for all nodes", value=median(ours), unit="s"),
        Row(
            name="loader", metric="time for all nodes, from some mini-batches", value=median(theirs), unit="s",
            peer="layer by layer",
            ratio=median(their_s / our_s for their_s, our_s in zip(theirs, ours, strict=True)),
        ),
        Row(name="both", metric="largest difference of outputs", value=max(differences), unit=""),
    ]  # fmt: skip
    title = (
        f"{settings.nodes:,} nodes, {edge_index.shape[1]:,} edges, features of "
        f"{format_bytes(4 * settings.nodes * settings.width)}, host={format_bytes(host)}"
    )
    lines = []
    for row in rows:
        beside = f"{row.ratio:.1f} of {row.peer}" if row.ratio else ""
        lines.append([row.name, row.metric, f"{row.value:,.3g} {row.unit}", beside])
    show(title, ["how", "figure", "value", "beside"], lines)
    names = ("nodes", "degree", "width", "batch", "batches", "rounds")
    configuration = {name: getattr(settings, name) for name in names}
    write(settings.json, configuration | {"host": host, "hidden": HIDDEN}, rows)


if __name__ == "__main__":
    main()
