"""Ranks train GraphSAGE on one copy of a graph and its features for each machine, in files that may exceed memory.

    torchrun --nproc-per-node 2 examples/ranks_graphsage.py --disk /nvme --host 1GiB
    torchrun --nproc-per-node 4 examples/ranks_graphsage.py --disk /nvme --host 16GiB --edges 1000000000 --width 512

The second trains on 10^9 edges (a file of 4 GB) and 100 GB of features. The graph is synthetic (`MadeGraph`): features
are noisy class centres, and half of the edges join nodes of one class. One rank of each machine writes both files once;
they stay in the folder for the next run. With ``--peers copies`` several machines (``torchrun --nnodes``) hold the
features in their memories together. Runs on CPUs with gloo.
"""

import argparse
import gc
import os
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional

from penstock import unified
from penstock.testing.graphs import MadeGraph

CLASSES = 16


class GraphSAGE(nn.Module):
    """Two layers, each of the node's own features and the mean of its sampled neighbors."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * width, 64), nn.Linear(2 * 64, CLASSES)])

    def forward(self, sample: unified.Sample, x: torch.Tensor) -> torch.Tensor:
        """Return scores of the seeds, ``[seeds, classes]``; ``x``: features of the sample's nodes."""
        for number, layer in enumerate(self.layers):
            block = sample.block(number)
            sources, targets = block.edge_index
            total = x.new_zeros(block.num_targets, x.shape[1]).index_add(0, targets, x[sources])
            count = torch.bincount(targets, minlength=block.num_targets).clamp(min=1).unsqueeze(1)
            x = layer(torch.cat([x[: block.num_targets], total / count], dim=1))
            x = x if number else x.relu()
        return x


def files(settings: argparse.Namespace, made: MadeGraph) -> tuple[Path, Path]:
    """Return the files of edges and of features; ranks take turns in writing those that do not exist."""
    edges = settings.disk / f"made-{made.num_nodes}-{made.num_edges}.graph"
    features = settings.disk / f"made-{made.num_nodes}-{settings.width}.features"
    for turn in range(distributed.get_world_size()):
        if turn == distributed.get_rank():
            if not edges.exists():
                unified.write_graph(edges, made.edges(), num_nodes=made.num_nodes, positions=False)
            if not features.exists():
                unified.write_features(features, made.features(settings.width))
        distributed.barrier()
    return edges, features


def main() -> None:
    """Train as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, default=Path("."), help="folder for the files")
    parser.add_argument("--host", default="1GiB", help="memory for features, of all ranks of a machine together")
    parser.add_argument("--peers", choices=["copies"], help="let machines read rows in each other's memory")
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--width", type=int, default=512, help="numbers in a row of features")
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    settings = parser.parse_args()
    distributed.init_process_group("gloo")
    group, rank = distributed.group.WORLD, distributed.get_rank()
    torch.set_num_threads(1)
    made = MadeGraph(num_nodes=settings.edges // 20, num_edges=settings.edges, num_classes=CLASSES)
    edges, rows = files(settings, made)

    graph = unified.open_graph(edges, group=group)  # mapped: memory of the page cache only, once for all ranks
    seeds = torch.randperm(made.num_nodes, generator=torch.Generator().manual_seed(0))[: settings.seeds]
    scores = None
    if not int(os.environ["LOCAL_RANK"]):  # one rank of each machine says which rows are wanted most
        scores = unified.expected_accesses(graph, seeds, [10, 5], batch_size=settings.batch)
    features = unified.TieredFeatures(rows, host=settings.host, scores=scores, group=group, peers=settings.peers)
    loader = unified.Loader(
        unified.NeighborSampler(graph, [10, 5]), features, seeds, batch_size=settings.batch, group=group
    )
    if rank == 0:
        print(features.plan.explain())

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(GraphSAGE(settings.width))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(settings.epochs):
        start_s, right, count, loss = time.perf_counter(), 0, 0, torch.zeros(())
        for batch in loader:
            optimizer.zero_grad()
            labels = batch.seeds % CLASSES
            guess = model(batch.sample, batch.x)
            loss = functional.cross_entropy(guess, labels)
            loss.backward()
            optimizer.step()
            right, count = right + int((guess.argmax(1) == labels).sum()), count + len(labels)
        print(
            f"rank {rank}, epoch {epoch}: loss {loss.item():.3f}, {right / count:.1%} of {count:,} labels right, "
            f"{time.perf_counter() - start_s:.1f} s",
            flush=True,
        )
    counts = features.statistics()
    print(
        f"rank {rank}: {counts.hit_rate:.1%} of the rows from memory ({counts.peer_rows:,} of other machines), "
        f"{counts.disk_rows:,} from the disk, {counts.shared_rows:,} that had been read before"
    )
    features.close()
    del model, optimizer
    gc.collect()  # gloo's threads end with the model; Python must not end before them
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
