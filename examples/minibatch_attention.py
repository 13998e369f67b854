"""Node classification with two RGAT layers on sampled blocks: graph and features may be larger than memory.

    python examples/minibatch_attention.py --epochs 5 --host 12MiB --disk /nvme --picture curve.png

The graph is synthetic, so that accuracy means something: a node's class is that of most of its neighbors over one
relation, and the other relations are random. Features are on an SSD, except for the most frequently used rows;
mini-batches are sampled and read while the step runs. A mini-batch has a block for each layer, whose targets are the
first of its sources. Layers are compiled once and run on every block.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional

from penstock import unified
from penstock.relational import RelationalGraph, RGATConv


@dataclass
class Data:
    """A graph with typed edges, features and classes."""

    graph: unified.Graph
    kinds: torch.Tensor
    """Edge types, ``int64 [edges]``."""
    features: torch.Tensor
    """Features, ``float [nodes, width]``."""
    classes: torch.Tensor
    """Classes, ``int64 [nodes]``."""


def made_up(num_nodes: int, degree: int, num_types: int, num_classes: int, width: int) -> Data:
    """Return a synthetic graph: four of five edges of type 0 come from the target's class; features say little."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(num_classes, (num_nodes,), generator=generator)
    target = torch.arange(num_nodes).repeat_interleave(degree)
    kinds = torch.randint(num_types, (len(target),), generator=generator)
    sources = torch.randint(num_nodes, (len(target),), generator=generator)
    order = classes.argsort(stable=True)
    counts = classes.bincount(minlength=num_classes)
    of_class = classes[target]
    fellow = order[
        (counts.cumsum(0) - counts)[of_class] + (torch.rand(len(target), generator=generator) * counts[of_class]).long()
    ]
    tells = (kinds == 0) & (torch.rand(len(target), generator=generator) < 0.8)
    centres = torch.randn(num_classes, width, generator=generator)
    features = 4 / width**0.5 * centres[classes] + torch.randn(num_nodes, width, generator=generator)
    graph = unified.Graph(torch.stack([torch.where(tells, fellow, sources), target]), num_nodes)
    return Data(graph, kinds, features, classes)


def blocks_of(sample: unified.Sample, kinds: torch.Tensor, num_types: int) -> list[RelationalGraph]:
    """Return a graph for each layer, with its sources, of which the first are the targets."""
    blocks = [sample.block(layer) for layer in range(2)]
    return [
        RelationalGraph(
            block.edge_index,
            kinds[block.edges],
            num_nodes=(block.num_sources, block.num_targets),
            num_edge_types=num_types,
        )
        for block in blocks
    ]


class Classifier(nn.Module):
    """Two layers of attention, each added to the node's own features."""

    def __init__(self, width: int, hidden: int, num_classes: int, num_types: int, heads: int):
        super().__init__()
        self.first = RGATConv(width, hidden, num_types, heads=heads)
        self.second = RGATConv(heads * hidden, num_classes, num_types)
        self.own = nn.ModuleList([nn.Linear(width, heads * hidden), nn.Linear(heads * hidden, num_classes)])

    def forward(self, blocks: list[RelationalGraph], x: torch.Tensor) -> torch.Tensor:
        """Return scores of the last block's targets, ``[targets, classes]``; ``x``: features of the first's sources."""
        hidden = functional.elu(self.first(x, blocks[0]) + self.own[0](x[: blocks[0].num_targets]))
        scores: torch.Tensor = self.second(hidden, blocks[1]) + self.own[1](hidden[: blocks[1].num_targets])
        return scores


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=int, default=100_000)
    options.add_argument("--degree", type=int, default=15)
    options.add_argument("--types", type=int, default=8)
    options.add_argument("--classes", type=int, default=6)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--hidden", type=int, default=16)
    options.add_argument("--heads", type=int, default=2)
    options.add_argument("--fanout", type=int, default=10)
    options.add_argument("--batch", type=int, default=1024)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--host", default="12MiB", help="host memory for features")
    options.add_argument("--disk", type=Path, default=Path("."), help="a directory on an SSD")
    options.add_argument("--checkpoint", type=Path, help="where the parameters are written (safetensors)")
    options.add_argument("--picture", type=Path, help="where the loss is drawn (png)")
    settings = options.parse_args()

    torch.manual_seed(0)
    data = made_up(settings.nodes, settings.degree, settings.types, settings.classes, settings.width)
    train, test = torch.randperm(settings.nodes).split(
        [settings.nodes * 4 // 5, settings.nodes - settings.nodes * 4 // 5]
    )
    fanouts = [settings.fanout, settings.fanout]
    scores = unified.expected_accesses(data.graph, train, fanouts, batch_size=settings.batch)
    features = unified.TieredFeatures(data.features, host=settings.host, disk=settings.disk, scores=scores)
    print(f"{data.graph} of {settings.types} types, {settings.classes} classes\n{features.plan.explain()}")
    sampler = unified.NeighborSampler(data.graph, fanouts)

    def batches(seeds: torch.Tensor, **options: bool) -> unified.Loader:
        return unified.Loader(sampler, features, seeds, batch_size=settings.batch, labels=data.classes, **options)

    model = Classifier(settings.width, settings.hidden, settings.classes, settings.types, settings.heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, loader = list[float](), batches(train)
    for epoch in range(1, settings.epochs + 1):
        for batch in track(loader, description=f"epoch {epoch}", total=len(loader), transient=True):
            optimizer.zero_grad()
            scores = model(blocks_of(batch.sample, data.kinds, settings.types), batch.x)
            loss = functional.cross_entropy(scores, batch.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        rows = features.reset_statistics()
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, {rows.hit_rate:.1%} of the rows from memory", flush=True)
        if settings.checkpoint:
            save_model(model, str(settings.checkpoint))
    if settings.picture:
        from penstock.report import curves

        curves(settings.picture, {"training": losses}, title="sampled RGAT")
    with torch.no_grad():
        right = [
            model(blocks_of(batch.sample, data.kinds, settings.types), batch.x).argmax(1) == batch.y
            for batch in batches(test, shuffle=False)
        ]
    print(f"test accuracy: {torch.cat(right).float().mean():.1%}")


if __name__ == "__main__":
    main()
