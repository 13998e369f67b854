"""Plans put the most wanted rows into the fastest tiers, and hit as often as they say."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import unified
from penstock.errors import InternalError
from penstock.unified import _graph


def power_law(num_nodes=4000, num_edges=60_000):
    generator = torch.Generator().manual_seed(0)
    rank = (torch.rand(num_edges, generator=generator) ** 4 * num_nodes).long()
    sources = torch.randperm(num_nodes, generator=generator)[rank]
    return unified.Graph(torch.stack([sources, torch.randint(num_nodes, (num_edges,), generator=generator)]), num_nodes)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("batch_size", [32, 400])
def test_the_planned_hit_rate_is_the_measured_one(replace, batch_size, monkeypatch):
    """Within 2 points, and at least 95% of the hit rate of an oracle that knows the counts."""
    monkeypatch.setattr(_graph, "_MOST_EDGES", 5000)  # in several pieces
    graph, fanouts = power_law(), [10, 5]
    seeds = torch.randperm(4000, generator=torch.Generator().manual_seed(1))[:1200]
    scores = unified.expected_accesses(graph, seeds, fanouts, batch_size=batch_size, replace=replace)
    sampler = unified.NeighborSampler(graph, fanouts, replace=replace)
    loader = unified.Loader(sampler, torch.zeros(4000, 1), seeds, batch_size=batch_size)
    counts = unified.count_accesses((batch for _ in range(4) for batch in loader), 4000)
    assert abs(float(scores.sum()) * len(loader) * 4 / float(counts.sum()) - 1) < 0.03  # rows, not shares alone
    degrees = graph.out_degrees().double()
    for hot in (200, 800, 2000):
        plan = unified.plan_tiers(
            unified.TierProblem(num_rows=4000, row_bytes=4, device_bytes=0, host_bytes=4 * hot, scores=scores)
        )
        measured = float(counts[plan.host_rows].sum() / counts.sum())
        assert abs(plan.hit_rate - measured) < 0.02
        oracle = float(counts.sort(descending=True).values[:hot].sum() / counts.sum())
        if batch_size == 400:  # a few batches leave counts that are mostly chance
            assert measured >= 0.95 * oracle
        by_degree = float(counts[degrees.argsort(descending=True)[:hot]].sum() / counts.sum())
        assert measured >= by_degree - 0.01


@given(
    st.integers(0, 40), st.integers(0, 9), st.integers(0, 200), st.none() | st.integers(0, 200), st.booleans(),
    st.randoms(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_plans_are_verified(num_rows, row_bytes, device_bytes, host_bytes, ties, random):
    scores = torch.tensor([random.randrange(3) if ties else random.random() for _ in range(num_rows)])
    problem = unified.TierProblem(
        num_rows=num_rows, row_bytes=row_bytes, device_bytes=device_bytes, host_bytes=host_bytes, scores=scores
    )
    plan = unified.plan_tiers(problem)
    unified.verify(problem, plan)
    assert 0 <= plan.disk_share <= 1 + 1e-9
    assert (host_bytes is not None) or plan.num_disk_rows == 0
    if num_rows > 2 and plan.num_disk_rows and len(plan.host_rows):
        worse = dataclasses.replace(plan, host_rows=plan.host_rows[:-1])
        with pytest.raises(InternalError):
            unified.verify(problem, worse)
