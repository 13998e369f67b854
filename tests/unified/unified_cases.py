"""Tables, budgets and graphs that the tests of this folder share."""

import torch
from hypothesis import strategies as st

from penstock import unified

ROWS = torch.arange(40.0 * 16).view(40, 16)
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


def numbers(shape, dtype=torch.float32):
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def table(rows=20, width=5, dtype=torch.float32):
    return numbers((rows, width), dtype)


def large_table(rows=3000, width=9, dtype=torch.float32):
    return numbers((rows, width), dtype)


def room(rows, table, hot):
    """A host budget for so many hot rows."""
    return 4 * rows + hot * (table[0].nbytes + 4)


def tiered(tmp_path, table, hot, **options):
    options = {"disk": tmp_path, "in_flight": 0, **options}
    return unified.TieredFeatures(table, host=room(len(table), table, hot), **options)


def random_graph(num_nodes=200, num_edges=3000, seed=0):
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))
    return edge_index, unified.Graph(edge_index, num_nodes)


@st.composite
def graphs(draw):
    num_nodes = draw(st.integers(1, 30))
    edges = draw(st.lists(st.tuples(st.integers(0, num_nodes - 1), st.integers(0, num_nodes - 1)), max_size=120))
    return torch.tensor(edges, dtype=torch.int64).view(-1, 2).t().contiguous(), num_nodes
