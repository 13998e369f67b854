"""Node classification with two RGAT layers on sampled mini-batches: the graph may be larger than what a step can hold.

    python examples/minibatch_attention.py --epochs 5 --picture curve.png

The graph is made up, so that accuracy means something: a node's class is the class that most of its neighbours of a
telling relation were drawn for, and the other relations lead anywhere. A mini-batch is a block for each layer: its
targets, and as sources the targets first and then whoever was sampled. Layers are compiled once and run on every block.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional

from penstock.relational import RelationalGraph, RGATConv


@dataclass
class Data:
    """A graph by the edges that enter each node, with features and classes."""

    starts: torch.Tensor
    """Where a node's edges begin, ``int64 [nodes + 1]``."""
    sources: torch.Tensor
    """``int64 [edges]``."""
    kinds: torch.Tensor
    """Edge types, ``int64 [edges]``."""
    features: torch.Tensor
    """``float [nodes, width]``."""
    classes: torch.Tensor
    """``int64 [nodes]``."""


def made_up(num_nodes: int, degree: int, num_types: int, num_classes: int, width: int) -> Data:
    """Edges of type 0 come from nodes of the target's class in four cases of five; features say little."""
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
    features = 0.7 * centres[classes] + torch.randn(num_nodes, width, generator=generator)
    starts = torch.arange(num_nodes + 1) * degree
    return Data(starts, torch.where(tells, fellow, sources), kinds, features, classes)


def sample(data: Data, targets: torch.Tensor, fanout: int, num_types: int) -> tuple[RelationalGraph, torch.Tensor]:
    """A block of up to ``fanout`` incoming edges a target, drawn with replacement, and its sources, targets first."""
    first, count = data.starts[targets], data.starts[targets + 1] - data.starts[targets]
    drawn = (torch.rand(len(targets), fanout) * count.unsqueeze(1)).long()
    edges = (first.unsqueeze(1) + drawn)[count > 0].flatten()
    owner = torch.arange(len(targets))[count > 0].repeat_interleave(fanout)
    others = data.sources[edges]
    sources = torch.cat([targets, others[~torch.isin(others, targets)].unique()])
    place = torch.empty(len(data.features), dtype=torch.int64)
    place[sources] = torch.arange(len(sources))
    block = RelationalGraph(
        torch.stack([place[others], owner]), data.kinds[edges],
        num_nodes=(len(sources), len(targets)), num_edge_types=num_types,
    )  # fmt: skip
    return block, sources


class Classifier(nn.Module):
    """Two layers of attention, each added to what the node is itself."""

    def __init__(self, width: int, hidden: int, num_classes: int, num_types: int, heads: int):
        super().__init__()
        self.first = RGATConv(width, hidden, num_types, heads=heads)
        self.second = RGATConv(heads * hidden, num_classes, num_types)
        self.own = nn.ModuleList([nn.Linear(width, heads * hidden), nn.Linear(heads * hidden, num_classes)])

    def forward(self, blocks: list[RelationalGraph], x: torch.Tensor) -> torch.Tensor:
        """Scores of the last block's targets, ``[targets, classes]``; ``x``: features of the first one's sources."""
        hidden = functional.elu(self.first(x, blocks[0]) + self.own[0](x[: blocks[0].num_targets]))
        scores: torch.Tensor = self.second(hidden, blocks[1]) + self.own[1](hidden[: blocks[1].num_targets])
        return scores


def step(model: Classifier, data: Data, seeds: torch.Tensor, fanout: int, num_types: int) -> torch.Tensor:
    """Scores of the seeds, through two sampled blocks."""
    last, middle = sample(data, seeds, fanout, num_types)
    first, sources = sample(data, middle, fanout, num_types)
    return model([first, last], data.features[sources])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=int, default=100_000)
    options.add_argument("--degree", type=int, default=15)
    options.add_argument("--types", type=int, default=8)
    options.add_argument("--classes", type=int, default=6)
    options.add_argument("--width", type=int, default=32)
    options.add_argument("--hidden", type=int, default=16)
    options.add_argument("--heads", type=int, default=2)
    options.add_argument("--fanout", type=int, default=10)
    options.add_argument("--batch", type=int, default=1024)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--checkpoint", type=Path, help="where the parameters are written (safetensors)")
    options.add_argument("--picture", type=Path, help="where the loss is drawn (png)")
    given = options.parse_args()

    torch.manual_seed(0)
    data = made_up(given.nodes, given.degree, given.types, given.classes, given.width)
    train, test = torch.randperm(given.nodes).split([given.nodes * 4 // 5, given.nodes - given.nodes * 4 // 5])
    print(f"{given.nodes:,} nodes, {len(data.sources):,} edges of {given.types} types, {given.classes} classes")
    model = Classifier(given.width, given.hidden, given.classes, given.types, given.heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = list[float]()
    for epoch in range(1, given.epochs + 1):
        order = train[torch.randperm(len(train))]
        for seeds in track(order.split(given.batch), description=f"epoch {epoch}", transient=True):
            optimizer.zero_grad()
            scores = step(model, data, seeds, given.fanout, given.types)
            loss = functional.cross_entropy(scores, data.classes[seeds])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.3f}", flush=True)
        if given.checkpoint:
            save_model(model, str(given.checkpoint))
    if given.picture:
        from penstock.report import curves

        curves(given.picture, {"training": losses}, title="sampled RGAT")
    with torch.no_grad():
        batches = test.split(given.batch)
        right = [
            step(model, data, seeds, given.fanout, given.types).argmax(1) == data.classes[seeds] for seeds in batches
        ]
    print(f"test accuracy: {torch.cat(right).float().mean():.1%}")


if __name__ == "__main__":
    main()
