"""Graphs from files: N-Triples (RDF) and lists of ids."""

import gzip
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.relational._graph import RelationalGraph

_NODE = r"<[^>]*>|_:\S+"
_LITERAL = r'".*"(?:@[\w-]+|\^\^<[^>]*>)?'
_LINE = re.compile(rf"\s*({_NODE})\s+(<[^>]*>)\s+({_NODE}|{_LITERAL})\s*\.\s*(?:#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Triples:
    """A graph of names."""

    edge_index: torch.Tensor
    """``int64 [2, num_edges]``: subjects and objects."""
    edge_type: torch.Tensor
    """``int64 [num_edges]``; inverses, if asked for, in the second half of types."""
    nodes: dict[str, int]
    """Node numbers by name as written, in order of first appearance; literals are nodes."""
    relations: dict[str, int]
    """Edge types by name; inverses end in ``~``."""

    def graph(self) -> RelationalGraph:
        """With room for the indexes that layers ask for."""
        return RelationalGraph(
            self.edge_index, self.edge_type, num_nodes=len(self.nodes), num_edge_types=max(1, len(self.relations))
        )


def read_ntriples(path: str | Path, *, inverses: bool = False) -> Triples:
    """Reads an N-Triples file, also one that ends in ``.gz``.

    ``inverses`` adds, for every edge, one in the other direction of a relation of its own. Empty lines and comments are
    skipped. Raises ``ValueError`` with file and line for anything else that is no triple.
    """
    path = Path(path)
    nodes: dict[str, int] = {}
    relations: dict[str, int] = {}
    rows: list[tuple[int, int, int]] = []
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _LINE.match(line)
            if found is None:
                text = line.strip()[:80]
                raise ValueError(f"{path}:{number}: {text!r} is no triple `<subject> <relation> <object> .`")
            subject, relation, other = found.groups()
            rows.append(
                (
                    nodes.setdefault(subject, len(nodes)),
                    nodes.setdefault(other, len(nodes)),
                    relations.setdefault(relation, len(relations)),
                )
            )
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    edge_index, edge_type = table[:, :2].t().contiguous(), table[:, 2].contiguous()
    if inverses:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        edge_type = torch.cat([edge_type, edge_type + len(relations)])
        relations = {**relations, **{f"{name}~": len(relations) + at for name, at in relations.items()}}
    return Triples(edge_index=edge_index, edge_type=edge_type, nodes=nodes, relations=relations)


def read_id_file(path: str | Path) -> torch.Tensor:
    """``int64 [triples, 3]`` of a file with a count in its first line and then ``head tail relation`` in each.

    The form of OpenKE's data sets. Raises ``ValueError`` where the count or a line is wrong.
    """
    path = Path(path)
    with path.open() as lines:
        first = lines.readline().split()
        if len(first) != 1 or not first[0].isdigit():
            raise ValueError(f"{path}:1: {' '.join(first)[:80]!r} is no count of the triples that follow")
        count = int(first[0])
        try:
            table = np.empty((0, 3), dtype=np.int64) if not count else np.loadtxt(lines, dtype=np.int64, ndmin=2)
        except ValueError as error:
            raise ValueError(f"{path}: a line is not `head tail relation` in whole numbers: {error}") from error
    if table.shape != (count, 3):
        raise ValueError(
            f"{path}: its first line says {count} triples; it has {len(table)} lines of {table.shape[1]} numbers"
        )
    return torch.from_numpy(table)
