"""Domains: what a value has one row for, an edge or a class of edges that agree in some respect.

Every domain is a property of an edge: its source, its type, its source and type together. A value with rows per source
may be read by a value with rows per edge, since an edge has one source. The rows of the wider domain are the classes of
a partition of the narrower one's rows. So one rule says which value may read which, where a gradient has to be summed,
and how few rows an operation needs: those of the widest domain that still distinguishes all of its operands.
"""

from collections.abc import Iterable
from enum import Enum


class Domain(Enum):
    """The kind of thing that a value has one row for."""

    EDGE = "edge"
    """Every edge."""
    EDGE_AT_SOURCE = "edge of a source's product"
    """Every edge of which `_cover` takes the source's row for a product."""
    EDGE_AT_TARGET = "edge of a target's product"
    """Every other edge."""
    COVER_SOURCE = "(source, edge type) of the cover"
    """Every pair of a source and a type of such an edge that leaves it."""
    COVER_TARGET = "(target, edge type) of the cover"
    """Every pair of a target and a type of such an edge that enters it."""
    SOURCE_AND_TYPE = "(source, edge type)"
    """Every pair of a source and a type of edge that leaves it."""
    TARGET_AND_TYPE = "(target, edge type)"
    """Every pair of a target and a type of edge that enters it."""
    SOURCE = "source"
    """Every node that edges may leave."""
    TARGET = "target"
    """Every node that edges may enter; the same nodes as sources, but for blocks."""
    SOURCE_TYPE = "source's node type"
    """Every node type, looked up by an edge's source."""
    TARGET_TYPE = "target's node type"
    """Every node type, looked up by an edge's target."""
    EDGE_TYPE = "edge type"
    """Every edge type."""
    ONE = "all"
    """One row for the whole graph."""

    def tells(self, other: "Domain") -> bool:
        """Return whether each row belongs to one row of ``other``, so that it may read ``other``'s values."""
        return other is self or other in _WIDER[self]


def common(domains: Iterable[Domain]) -> Domain:
    """Return the domain with the fewest rows that determines the rows of all ``domains``."""
    wanted = set(domains)
    return next(candidate for candidate in _FROM_FEW_ROWS if all(candidate.tells(domain) for domain in wanted))


ENDS = {
    Domain.SOURCE_AND_TYPE: Domain.SOURCE,
    Domain.TARGET_AND_TYPE: Domain.TARGET,
    Domain.COVER_SOURCE: Domain.SOURCE,
    Domain.COVER_TARGET: Domain.TARGET,
}
"""The node domain of each domain of pairs. Pairs are ordered by type, and within a type by node."""
EDGES = {
    Domain.SOURCE_AND_TYPE: Domain.EDGE,
    Domain.TARGET_AND_TYPE: Domain.EDGE,
    Domain.COVER_SOURCE: Domain.EDGE_AT_SOURCE,
    Domain.COVER_TARGET: Domain.EDGE_AT_TARGET,
}
"""The edges of each domain of pairs."""
OF_COVERS = frozenset(pairs for pairs, edges in EDGES.items() if edges is not Domain.EDGE)
"""Domains of the pairs that are multiplied if each edge has chosen an end (`_cover`)."""
OF_TYPES = frozenset({Domain.EDGE_TYPE, Domain.SOURCE_TYPE, Domain.TARGET_TYPE, Domain.ONE})
"""Domains with few rows."""
_SOURCE = {Domain.SOURCE_TYPE, Domain.ONE}
_TARGET = {Domain.TARGET_TYPE, Domain.ONE}
_WIDER: dict[Domain, set[Domain]] = {
    Domain.ONE: set(),
    Domain.EDGE_TYPE: {Domain.ONE},
    Domain.SOURCE_TYPE: {Domain.ONE},
    Domain.TARGET_TYPE: {Domain.ONE},
    Domain.SOURCE: _SOURCE,
    Domain.TARGET: _TARGET,
    Domain.SOURCE_AND_TYPE: {Domain.SOURCE, Domain.EDGE_TYPE} | _SOURCE,
    Domain.TARGET_AND_TYPE: {Domain.TARGET, Domain.EDGE_TYPE} | _TARGET,
    Domain.EDGE: {*ENDS.values(), *OF_TYPES, Domain.SOURCE_AND_TYPE, Domain.TARGET_AND_TYPE},
    Domain.COVER_SOURCE: {Domain.SOURCE_AND_TYPE, Domain.SOURCE, Domain.EDGE_TYPE} | _SOURCE,
    Domain.COVER_TARGET: {Domain.TARGET_AND_TYPE, Domain.TARGET, Domain.EDGE_TYPE} | _TARGET,
}
_WIDER |= {
    EDGES[pairs]: {pairs, Domain.EDGE} | _WIDER[Domain.EDGE] for pairs in (Domain.COVER_SOURCE, Domain.COVER_TARGET)
}
_FROM_FEW_ROWS = tuple(_WIDER)
