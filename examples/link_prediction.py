"""Link prediction with an R-GCN encoder and a DistMult decoder: which entity completes (head, relation, ?)?

    python examples/link_prediction.py --data folder/with/fb15k237 --picture curve.png

The folder has `train2id.txt`, `valid2id.txt` and `test2id.txt` (a count, then `head tail relation` in each line). Every
relation has an inverse, so that heads are predicted in the same way as tails. A batch's own edges are left out of the
graph that encodes it, by edge norms of 0: the answer is not among the messages, and the graph's indexes do not change.

The script reports the filtered mean reciprocal rank over all entities, for heads and tails (other known answers do not
count; equal scores share their mean rank), and how many answers rank among the first ten. `--encoder none` is DistMult
alone, `--encoder plain` is the same R-GCN in plain PyTorch.
"""

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from penstock.relational import RelationalGraph, RGCNConv, read_id_file


class Queries:
    """Queries (subject, relation) with the object to predict, in both directions, ``int64 [2 * triples]`` each."""

    def __init__(self, triples: torch.Tensor, num_relations: int):
        head, tail, relation = triples.t()
        self.subject, self.object = torch.cat([head, tail]), torch.cat([tail, head])
        self.relation = torch.cat([relation, relation + num_relations])

    def __len__(self) -> int:
        return len(self.subject)


class PlainRGCN(nn.Module):
    """The layer `RGCNConv` in plain PyTorch, with edges sorted by relation and one product per relation."""

    def __init__(self, like: RGCNConv, graph: RelationalGraph):
        super().__init__()
        self.weight, self.comp, self.root, self.bias = like.weight, like.comp, like.root, like.bias
        self.order = graph.edge_type.argsort(stable=True)
        self.source, self.target = graph.edge_index[:, self.order]
        kinds = graph.edge_type[self.order]
        self.counts = kinds.bincount(minlength=graph.num_edge_types).tolist()
        keys = self.target * graph.num_edge_types + kinds
        _, pair, siblings = keys.unique(return_inverse=True, return_counts=True)
        self.share = 1 / siblings[pair].float()

    def forward(self, x: torch.Tensor, graph: RelationalGraph, edge_norm: torch.Tensor | None) -> torch.Tensor:
        del graph
        weight = torch.einsum("rb,bio->rio", self.comp, self.weight)
        rows = x.index_select(0, self.source).split(self.counts)
        message = torch.cat([part @ matrix for part, matrix in zip(rows, weight, strict=True)])
        share = self.share if edge_norm is None else self.share * edge_norm[self.order]
        result = torch.zeros(len(x), weight.shape[2]).index_add(0, self.target, share.unsqueeze(1) * message)
        return result + x @ self.root + self.bias


class Model(nn.Module):
    """A model of entities, encoded from their neighbors, and relations, as DistMult's diagonal matrices."""

    def __init__(self, graph: RelationalGraph, width: int, bases: int, encoder: str, dropout: float):
        super().__init__()
        self.entities = nn.Parameter(torch.randn(graph.num_sources, width) / width**0.5)
        self.relations = nn.Parameter(torch.randn(graph.num_edge_types, width) / width**0.25)
        self.dropout = nn.Dropout(dropout)
        self.conv: Any = RGCNConv(width, width, graph.num_edge_types, num_bases=bases)
        if encoder == "plain":
            self.conv = PlainRGCN(self.conv, graph)
        elif encoder == "none":
            self.conv = None

    def forward(self, graph: RelationalGraph, edge_norm: torch.Tensor | None = None) -> torch.Tensor:
        """Return the encoded entities, ``[num_nodes, width]``."""
        if self.conv is None:
            return self.dropout(self.entities)
        return self.dropout(self.entities + torch.tanh(self.conv(self.entities, graph, edge_norm=edge_norm)))


def batches(queries: Queries, size: int) -> Iterator[torch.Tensor]:
    yield from torch.randperm(len(queries)).split(size)


def loss_of(model: Model, encoded: torch.Tensor, queries: Queries, batch: torch.Tensor, negatives: int) -> torch.Tensor:
    """Return the cross entropy of the answer against entities drawn for the whole batch."""
    asked = encoded[queries.subject[batch]] * model.relations[queries.relation[batch]]
    right = (asked * encoded[queries.object[batch]]).sum(1, keepdim=True)
    wrong = asked @ encoded[torch.randint(len(encoded), (negatives,))].t()
    return functional.cross_entropy(torch.cat([right, wrong], 1), torch.zeros(len(batch), dtype=torch.int64))


class Known:
    """All answers in any split, which are left out of the ranking of the others."""

    def __init__(self, splits: list[Queries], num_entities: int):
        keys = torch.cat([split.relation * num_entities + split.subject for split in splits])
        self.keys, order = keys.sort(stable=True)
        self.objects = torch.cat([split.object for split in splits])[order]
        self.num_entities = num_entities

    def of(self, subject: torch.Tensor, relation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of queries and columns of answers, one pair for each known answer."""
        keys = relation * self.num_entities + subject
        first, last = torch.searchsorted(self.keys, keys), torch.searchsorted(self.keys, keys, right=True)
        counts = last - first
        rows = torch.arange(len(keys)).repeat_interleave(counts)
        places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows] + first[rows]
        return rows, self.objects[places]


@torch.no_grad()
def ranks(model: Model, graph: RelationalGraph, queries: Queries, known: Known) -> torch.Tensor:
    """Return filtered ranks from 1, with ties at their mean, ``float [queries]``."""
    model.eval()
    encoded, result = model(graph), []
    for batch in torch.arange(len(queries)).split(512):
        subject, relation = queries.subject[batch], queries.relation[batch]
        scores = (encoded[subject] * model.relations[relation]) @ encoded.t()
        right = scores.gather(1, queries.object[batch].unsqueeze(1))
        scores[known.of(subject, relation)] = -torch.inf  # the right one among them
        result.append(1 + (scores > right).sum(1) + (scores == right).sum(1) / 2)
    model.train()
    return torch.cat(result)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--encoder", choices=["penstock", "plain", "none"], default="penstock")
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--bases", type=int, default=16)
    options.add_argument("--negatives", type=int, default=1024)
    options.add_argument("--batch", type=int, default=16384)
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--patience", type=int, default=3, help="evaluations without a better one before it stops")
    options.add_argument("--every", type=int, default=4, help="epochs from one evaluation to the next")
    options.add_argument("--learning-rate", type=float, default=0.01)
    options.add_argument("--dropout", type=float, default=0.2)
    options.add_argument("--triples", type=int, help="only so many of each split, for a short try")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--checkpoint", type=Path, help="where the best parameters are written (safetensors)")
    options.add_argument("--picture", type=Path, help="where the curves are drawn (png)")
    settings = options.parse_args()

    splits = {
        name: read_id_file(settings.data / f"{name}2id.txt")[: settings.triples] for name in ("train", "valid", "test")
    }
    whole = torch.cat(list(splits.values()))
    num_entities, num_relations = int(whole[:, :2].max()) + 1, int(whole[:, 2].max()) + 1
    asked = {name: Queries(triples, num_relations) for name, triples in splits.items()}
    train, known = asked["train"], Known(list(asked.values()), num_entities)
    graph = RelationalGraph(
        torch.stack([train.subject, train.object]), train.relation,
        num_nodes=num_entities, num_edge_types=2 * num_relations,
    )  # fmt: skip
    print(f"{graph}: {len(splits['valid'])} triples to stop by, {len(splits['test'])} to be told")

    torch.manual_seed(settings.seed)
    model = Model(graph, settings.width, settings.bases, settings.encoder, settings.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    best, best_state, waited = 0.0, copy.deepcopy(model.state_dict()), 0
    losses, quality, start_s = list[float](), list[float](), time.perf_counter()
    for epoch in range(1, settings.epochs + 1):
        total = 0.0
        for batch in track(list(batches(train, settings.batch)), description=f"epoch {epoch}", transient=True):
            is_message = torch.ones(len(train))
            is_message[batch] = 0
            is_message[(batch + len(train) // 2) % len(train)] = 0  # their inverses
            optimizer.zero_grad()
            loss = loss_of(model, model(graph, is_message), train, batch, settings.negatives)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(train))
        if epoch % settings.every and epoch < settings.epochs:
            continue
        quality.append((1 / ranks(model, graph, asked["valid"], known)).mean().item())
        print(
            f"epoch {epoch}: loss {losses[-1]:.3f}, validation MRR {quality[-1]:.4f}, "
            f"{time.perf_counter() - start_s:.0f} s",
            flush=True,
        )
        if quality[-1] > best:
            best, best_state, waited = quality[-1], copy.deepcopy(model.state_dict()), 0
            if settings.checkpoint:
                save_file(best_state, settings.checkpoint)
        else:
            waited += 1
        if waited == settings.patience:
            break
    model.load_state_dict(best_state)
    if settings.picture:
        from penstock.report import curves

        curves(settings.picture, {"training loss": losses}, title="link prediction", x_label="epoch")
    result = ranks(model, graph, asked["test"], known)
    print(f"test: Hits@10 {(result <= 10).float().mean():.4f}, filtered MRR: {(1 / result).mean():.4f}")


if __name__ == "__main__":
    main()
