"""Write your own relational layer in ten lines, compare it with the same layer in plain PyTorch, and train it.

    python examples/own_layer.py --epochs 60 --picture curves.png

The layer is gated: a message is the source mapped by its relation, times a gate computed from source and target; a node
takes the largest message and the mean. The task is synthetic: a node's class follows from the features of the neighbors
that one relation connects it with.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional

from penstock.relational import RelationalGraph, concat, dot, layer, sigmoid


@layer
def gated(g: Any, x: Any, weight: Any, at_source: Any, at_target: Any) -> Any:
    for e in g.edges():
        gate = sigmoid(dot(x[e.src], at_source[e.etype]) + dot(x[e.dst], at_target[e.etype]))
        message = gate.unsqueeze(-1) * (x[e.src] @ weight[e.etype])
    for n in g.nodes():
        both = concat(n.max(message), n.mean(message))
    return both


def gated_plainly(
    graph: RelationalGraph, x: torch.Tensor, weight: torch.Tensor, at_source: torch.Tensor, at_target: torch.Tensor
) -> torch.Tensor:
    """Compute the same layer by gathering a matrix for every edge."""
    (source, target), kind = graph.edge_index, graph.edge_type
    score = (x[source] * at_source[kind]).sum(1) + (x[target] * at_target[kind]).sum(1)
    message = torch.sigmoid(score).unsqueeze(1) * torch.bmm(x[source].unsqueeze(1), weight[kind]).squeeze(1)
    places = target.unsqueeze(1).expand_as(message)
    empty = x.new_zeros(len(x), message.shape[1])
    largest = empty.scatter_reduce(0, places, message, "amax", include_self=False)
    mean = empty.scatter_reduce(0, places, message, "mean", include_self=False)
    return torch.cat([largest, mean], 1)


class Classifier(nn.Module):
    """One gated layer and a linear one."""

    def __init__(self, width: int, hidden: int, num_types: int, num_classes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_types, width, hidden) / width**0.5)
        self.at_source = nn.Parameter(torch.randn(num_types, width) / width**0.5)
        self.at_target = nn.Parameter(torch.randn(num_types, width) / width**0.5)
        self.last = nn.Linear(2 * hidden, num_classes)

    def forward(self, graph: RelationalGraph, x: torch.Tensor, call: Any = gated) -> torch.Tensor:
        """Return scores, ``[num_nodes, classes]``."""
        scores: torch.Tensor = self.last(call(graph, x, self.weight, self.at_source, self.at_target))
        return scores


def made_up(num_nodes: int, num_types: int, num_classes: int) -> tuple[RelationalGraph, torch.Tensor, torch.Tensor]:
    """Return a graph, features and classes: relation 0 comes from nodes whose features show the target's class."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(num_classes, (num_nodes,), generator=generator)
    shown = torch.randint(num_classes, (num_nodes,), generator=generator)
    target = torch.arange(num_nodes).repeat(12)
    kind = torch.randint(num_types, (len(target),), generator=generator)
    order, counts = shown.argsort(), shown.bincount(minlength=num_classes)
    wanted = classes[target]
    drawn = (torch.rand(len(target), generator=generator) * counts[wanted]).long()
    telling = order[(counts.cumsum(0) - counts)[wanted] + drawn]
    anyone = torch.randint(num_nodes, (len(target),), generator=generator)
    edge_index = torch.stack([torch.where(kind == 0, telling, anyone), target])
    features = torch.randn(num_classes, 24, generator=generator)[shown]
    graph = RelationalGraph(edge_index, kind, num_nodes=num_nodes, num_edge_types=num_types)
    return graph, features + 0.5 * torch.randn(num_nodes, 24, generator=generator), classes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=int, default=4000)
    options.add_argument("--epochs", type=int, default=60)
    options.add_argument("--checkpoint", type=Path, help="where the parameters are written (safetensors)")
    options.add_argument("--picture", type=Path, help="where the losses are drawn (png)")
    settings = options.parse_args()

    graph, features, classes = made_up(settings.nodes, num_types=6, num_classes=5)
    train, test = torch.arange(settings.nodes) % 5 > 0, torch.arange(settings.nodes) % 5 == 0
    losses = dict[str, list[float]]()
    for name, call in (("compiled", gated), ("plain PyTorch", gated_plainly)):
        torch.manual_seed(0)
        model = Classifier(24, 16, graph.num_edge_types, 5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        losses[name], start_s = [], time.perf_counter()
        for _ in track(range(settings.epochs), description=name):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(graph, features, call)[train], classes[train])
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
        taken_s = time.perf_counter() - start_s
        with torch.no_grad():
            right = (model(graph, features, call)[test].argmax(1) == classes[test]).float().mean()
        print(f"{name}: {taken_s:.1f} s, loss {losses[name][-1]:.4f}, test accuracy: {right:.1%}")
        if settings.checkpoint and name == "compiled":
            save_model(model, str(settings.checkpoint))
    apart = max(abs(loss - other) for loss, other in zip(*losses.values(), strict=True))
    print(f"losses apart by {apart:.1e} at most")
    if settings.picture:
        from penstock.report import curves

        curves(settings.picture, losses, title="a gated layer of one's own")


if __name__ == "__main__":
    main()
