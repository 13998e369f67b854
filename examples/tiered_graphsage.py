"""GraphSAGE on a graph whose features exceed their memory budget: hot rows in memory, the others on an SSD.

    python examples/tiered_graphsage.py --disk /nvme --host 1GiB --epochs 3 --picture curve.png

The graph is synthetic, so that accuracy means something: it has 2^20 nodes and 20M edges. Sources follow a power law,
and four of five are of the target's class. Features are 2,048 numbers of noise with a little of the class in them, 8
GiB in total, which are written once and are never all in memory. Sampling, reading and training run concurrently.
"""

import argparse
import time
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional

from penstock import unified

CHUNK = 4096
"""Rows that are generated at once."""


def made_up_graph(num_nodes: int, num_edges: int, num_classes: int, skew: float) -> tuple[unified.Graph, torch.Tensor]:
    """Return a synthetic graph and the class of every node."""
    generator = torch.Generator().manual_seed(0)
    named = torch.randperm(num_nodes, generator=generator)  # popularity does not follow node numbers
    classes = torch.empty(num_nodes, dtype=torch.int64)
    classes[named] = torch.arange(num_nodes) % num_classes
    targets = torch.randint(num_nodes, (num_edges,), generator=generator)
    fellows = torch.rand(num_edges, generator=generator) < 0.8
    wanted = torch.where(fellows, classes[targets], torch.randint(num_classes, (num_edges,), generator=generator))
    rank = (torch.rand(num_edges, generator=generator) ** skew * (num_nodes // num_classes)).long()
    sources = named[rank * num_classes + wanted]
    return unified.Graph(torch.stack([sources, targets]), num_nodes), classes


def made_up_features(path: Path, classes: torch.Tensor, width: int) -> Path:
    """Write noise with a little of the class, chunk by chunk; an existing file is kept."""
    if path.exists():
        return path
    num_classes = int(classes.max()) + 1
    centres = functional.normalize(torch.randn(num_classes, width, generator=torch.Generator().manual_seed(1)), dim=1)

    def chunks():
        for number, some in enumerate(classes.split(CHUNK)):
            noise = torch.randn(len(some), width, generator=torch.Generator().manual_seed(2 + number))
            yield noise.add_(centres[some], alpha=1.5)

    return unified.write_features(path, chunks())


class GraphSAGE(nn.Module):
    """Two layers, each of the node's own features and the mean of its sampled neighbors."""

    def __init__(self, width: int, hidden: int, num_classes: int):
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(width, hidden), nn.Linear(hidden, num_classes)])
        self.others = nn.ModuleList([nn.Linear(width, hidden), nn.Linear(hidden, num_classes)])

    def forward(self, sample: unified.Sample, x: torch.Tensor) -> torch.Tensor:
        """Return scores of the seeds, ``[seeds, classes]``; ``x``: features of the sample's nodes."""
        for layer, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            block = sample.block(layer)
            sources, targets = block.edge_index
            messages = others(x[: block.num_sources])  # narrow before they are gathered
            total = messages.new_zeros(block.num_targets, messages.shape[1]).index_add(0, targets, messages[sources])
            count = torch.bincount(targets, minlength=block.num_targets).clamp(min=1).unsqueeze(1)
            x = own(x[: block.num_targets]) + total / count
            x = x.relu() if layer == 0 else x
        return x


def train_epoch(model: GraphSAGE, optimizer: torch.optim.Optimizer, loader: unified.Loader, name: str) -> list[float]:
    """Train one epoch and return the loss of every step."""
    losses = []
    for batch in track(loader, description=name, total=len(loader), transient=True):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch.sample, batch.x), batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=int, default=2**20)
    options.add_argument("--edges", type=int, default=20_000_000)
    options.add_argument("--width", type=int, default=2048)
    options.add_argument("--classes", type=int, default=16)
    options.add_argument("--skew", type=float, default=4.0, help="of the power law")
    options.add_argument("--hidden", type=int, default=64)
    options.add_argument("--fanouts", type=int, nargs=2, default=[10, 5])
    options.add_argument("--seeds", type=int, default=20_000, help="training nodes")
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--host", default="1GiB", help="host memory for features; 'all' keeps every row in memory")
    options.add_argument("--disk", type=Path, default=Path("."), help="a directory on an SSD")
    options.add_argument("--checkpoint", type=Path, help="where the parameters are written (safetensors)")
    options.add_argument("--picture", type=Path, help="where the loss is drawn (png)")
    settings = options.parse_args()

    torch.manual_seed(0)
    graph, classes = made_up_graph(settings.nodes, settings.edges, settings.classes, settings.skew)
    path = settings.disk / f"features-{settings.nodes}-{settings.width}-{settings.classes}.rows"
    made_up_features(path, classes, settings.width)
    train, test = torch.randperm(settings.nodes)[: settings.seeds * 5 // 4].split([settings.seeds, settings.seeds // 4])
    scores = unified.expected_accesses(graph, train, settings.fanouts, batch_size=settings.batch)
    host = None if settings.host == "all" else settings.host
    with unified.TieredFeatures(path, host=host, scores=scores) as features:
        print(f"{graph}, features {tuple(features.shape)}\n{features.plan.explain()}", flush=True)
        sampler = unified.NeighborSampler(graph, settings.fanouts)
        loader = unified.Loader(sampler, features, train, batch_size=settings.batch, labels=classes)
        model = GraphSAGE(settings.width, settings.hidden, settings.classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-3)
        losses = list[float]()
        for epoch in range(1, settings.epochs + 1):
            features.reset_statistics()
            loader.reset_statistics()
            start_s = time.perf_counter()
            losses += train_epoch(model, optimizer, loader, f"epoch {epoch}")
            times, rows = loader.statistics(), features.statistics()
            print(
                f"epoch {epoch}: loss {losses[-1]:.3f}, {time.perf_counter() - start_s:.1f} s, of which waiting "
                f"{times.stall_s:.1f} s; hit rate {rows.hit_rate:.1%} (planned {features.plan.hit_rate:.1%}), "
                f"{rows.disk_rows / max(rows.disk_s, 1e-9):,.0f} rows/s from the disk",
                flush=True,
            )
            if settings.checkpoint:
                save_model(model, str(settings.checkpoint))
        if settings.picture:
            from penstock.report import curves

            curves(settings.picture, {"training": losses}, title="GraphSAGE over tiered features")
        tested = unified.Loader(sampler, features, test, batch_size=settings.batch, labels=classes, shuffle=False)
        with torch.no_grad():
            right = [model(batch.sample, batch.x).argmax(1) == batch.y for batch in tested]
    print(f"test accuracy: {torch.cat(right).float().mean():.1%}")


if __name__ == "__main__":
    main()
