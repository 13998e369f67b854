"""Entity classification on AIFB with two relational layers: to which research group does a person belong?

    python examples/entity_classification.py --data folder/with/aifb --seeds 10

The folder holds the graph as N-Triples (`aifb_stripped.nt.gz`, without the relations that tell the answer) and the
published split (`trainingSet.tsv`, `testSet.tsv`). Nodes have no features: each has a row of every relation's matrix.
"""

import argparse
import csv
from pathlib import Path
from statistics import mean

import torch
from rich.progress import track
from torch import nn
from torch.nn import functional

from penstock.relational import RelationalGraph, RGCNConv, Triples, read_ntriples


class Classifier(nn.Module):
    """Two layers of RGCN without bases."""

    def __init__(self, triples: Triples, hidden: int, num_classes: int):
        super().__init__()
        self.first = RGCNConv(len(triples.nodes), hidden, len(triples.relations))
        self.second = RGCNConv(hidden, num_classes, len(triples.relations))

    def forward(self, graph: RelationalGraph) -> torch.Tensor:
        """Return scores, ``[num_nodes, num_classes]``."""
        scores: torch.Tensor = self.second(torch.relu(self.first(None, graph)), graph)
        return scores


def labels(path: Path, triples: Triples, classes: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return nodes and their classes from a table with columns ``person`` and ``label_affiliation``."""
    with path.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    nodes = [triples.nodes[f"<{row['person']}>"] for row in rows]
    result = [classes.setdefault(row["label_affiliation"], len(classes)) for row in rows]
    return torch.tensor(nodes), torch.tensor(result)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--epochs", type=int, default=50)
    options.add_argument("--hidden", type=int, default=16)
    settings = options.parse_args()

    triples = read_ntriples(settings.data / "aifb_stripped.nt.gz", inverses=True)
    graph, classes = triples.graph(), dict[str, int]()
    train_nodes, train_labels = labels(settings.data / "trainingSet.tsv", triples, classes)
    test_nodes, test_labels = labels(settings.data / "testSet.tsv", triples, classes)
    print(f"{graph}: {len(train_nodes)} persons to learn from, {len(test_nodes)} to be told, {len(classes)} groups")

    results = []
    for seed in range(settings.seeds):
        torch.manual_seed(seed)
        model = Classifier(triples, settings.hidden, len(classes))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in track(range(settings.epochs), description=f"seed {seed}"):
            optimizer.zero_grad()
            functional.cross_entropy(model(graph)[train_nodes], train_labels).backward()
            optimizer.step()
        with torch.no_grad():
            results.append((model(graph)[test_nodes].argmax(1) == test_labels).float().mean().item())
        print(f"seed {seed}: {results[-1]:.1%} of test persons right")
    print(f"mean test accuracy over {settings.seeds} seeds: {mean(results):.1%}")


if __name__ == "__main__":
    main()
