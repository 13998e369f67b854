"""Reading graphs from files: N-Triples (RDF) and lists of ids."""

import functools
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.arguments import checked
from penstock.files import check_is_file
from penstock.relational._graph import RelationalGraph

_NODE = r"<[^>]*>|_:\S+"
_LITERAL = r'".*"(?:@[\w-]+|\^\^<[^>]*>)?'
_MOST_CHARACTERS = 2**24
_COUNT = re.compile(r"[0-9]{1,18}")
_LINE = re.compile(rf"\s*({_NODE})\s+(<[^>]*>)\s+({_NODE}|{_LITERAL})\s*\.\s*(?:#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Triples:
    """A graph with named nodes and relations."""

    edge_index: torch.Tensor
    """Subjects and objects, ``int64 [2, num_edges]``."""
    edge_type: torch.Tensor
    """Type of each edge, ``int64 [num_edges]``; inverses, if requested, are the second half of the types."""
    nodes: dict[str, int]
    """Node numbers by name as written, in order of first appearance; literals are nodes too."""
    relations: dict[str, int]
    """Edge types by name; inverses end in ``~``."""

    def graph(self) -> RelationalGraph:
        """Return the triples as a graph, which builds the indexes that layers need."""
        return RelationalGraph(
            self.edge_index, self.edge_type, num_nodes=len(self.nodes), num_edge_types=max(1, len(self.relations))
        )


@checked("penstock.relational.read_ntriples('graph.nt')")
def read_ntriples(path: str | Path, *, inverses: bool = False) -> Triples:
    """Read an N-Triples file, which may end in ``.gz``.

    ``inverses`` adds, for every edge, one in the other direction with a relation of its own. Empty lines and comments
    are skipped. Raises ``ValueError`` with file and line for anything else that is not a triple.
    """
    path = Path(path)
    nodes: dict[str, int] = {}
    relations: dict[str, int] = {}
    rows: list[tuple[int, int, int]] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            text = line.strip()[:80]
            raise ValueError(f"{path}:{number}: expected a triple `<subject> <relation> <object> .`, got {text!r}")
        subject, relation, target = match.groups()
        rows.append(
            (
                nodes.setdefault(subject, len(nodes)),
                nodes.setdefault(target, len(nodes)),
                relations.setdefault(relation, len(relations)),
            )
        )
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    edge_index, edge_type = table[:, :2].t().contiguous(), table[:, 2].contiguous()
    if inverses:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        edge_type = torch.cat([edge_type, edge_type + len(relations)])
        relations = {**relations, **{f"{name}~": len(relations) + position for name, position in relations.items()}}
    return Triples(edge_index=edge_index, edge_type=edge_type, nodes=nodes, relations=relations)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text, which may be compressed.

    Raises ``ValueError`` for other data and for overlong lines.
    """
    check_is_file(path)
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    try:
        with opened as file:
            for line in iter(functools.partial(file.readline, _MOST_CHARACTERS), ""):
                if len(line) == _MOST_CHARACTERS:
                    raise ValueError(f"{path} has a line of more than {_MOST_CHARACTERS:,} characters")
                yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged, or is not compressed with gzip: {error}") from error


@checked("penstock.relational.read_id_file('train.tsv')")
def read_id_file(path: str | Path) -> torch.Tensor:
    """Read triples ``int64 [triples, 3]`` from a file: a count in the first line, then ``head tail relation`` per line.

    This is the format of OpenKE's data sets. Raises ``ValueError`` if the count or a line is wrong.
    """
    path = Path(path)
    lines = _lines(path)
    first = next(lines, "").split()
    if len(first) != 1 or _COUNT.fullmatch(first[0]) is None:
        raise ValueError(f"{path}:1: expected the number of triples that follow, got {' '.join(first)[:80]!r}")
    count, rest = int(first[0]), list(lines) if int(first[0]) else []
    try:
        table = np.loadtxt(rest, dtype=np.int64, ndmin=2) if any(map(str.strip, rest)) else np.empty((0, 3), np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: a line is not `head tail relation` in whole numbers: {error}") from error
    if table.shape != (count, 3):
        raise ValueError(
            f"{path}: its first line says {count} triples, but it has {len(table)} lines of {table.shape[1]} numbers"
        )
    return torch.from_numpy(table)
