"""Indexes: pairs by counting, and threads and processes that meet while indexes are built."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relational_layers import random_graph, rgat, tensors

from penstock import native
from penstock.relational import _indexes, _triton
from penstock.relational._domain import Domain
from penstock.tiers import Budget

GRAPH = 20, 80, 4


@pytest.fixture
def arguments(graph):
    return tensors("rgat", graph, 5, torch.float64, torch.Generator().manual_seed(1))


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), num_edges=st.sampled_from([0, 1, 9, 200]), num_types=st.integers(1, 9))
def test_pairs_are_those_of_sorting(seed, num_edges, num_types):
    generator = torch.Generator().manual_seed(seed)
    nodes, types = (torch.randint(size, (num_edges,), generator=generator) for size in (12, num_types))
    actual = _indexes.pairs_of(nodes, types, 12, num_types)
    keys, rows = torch.unique(types * 12 + nodes, return_inverse=True)
    for mine, theirs in zip(actual, (keys % 12, keys // 12, rows), strict=True):
        assert torch.equal(mine, theirs)


def test_pairs_without_a_compiler_are_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    nodes, types = torch.randint(9, (50,), generator=generator), torch.randint(4, (50,), generator=generator)
    expected = _indexes.pairs_of(nodes, types, 9, 4)
    monkeypatch.setattr(native, "load", lambda *_, **__: None)
    for mine, theirs in zip(_indexes.pairs_of(nodes, types, 9, 4), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_threads_meet_on_a_cold_graph(arguments):
    """Indexes are built by whoever comes first, and by nobody else."""
    for seed in range(20):
        cold, warm = (random_graph(20, 80, 4, torch.Generator().manual_seed(seed)) for _ in range(2))
        expected = rgat(warm, **arguments)
        barrier = threading.Barrier(4)

        def call(_, cold=cold, barrier=barrier):
            barrier.wait()
            return rgat(cold, **arguments)

        with ThreadPoolExecutor(4) as pool:
            assert all(torch.equal(actual, expected) for actual in pool.map(call, range(4)))


def _in_child(graph, arguments, queue):
    queue.put(rgat(graph, **arguments).sum().item())


def test_a_child_that_is_forked_while_indexes_are_built_does_not_wait(graph, arguments):
    detached = {name: tensor.detach() for name, tensor in arguments.items()}
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    held, done = threading.Event(), threading.Event()

    def hold():
        with graph.indexes.kept.lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = context.Process(target=_in_child, args=(graph, detached, queue))
    child.start()
    try:
        actual = queue.get(timeout=600)
    finally:
        done.set()
        holder.join()
        child.kill()
    assert actual == pytest.approx(rgat(graph, **detached).sum().item())


def test_every_tensor_is_charged_once(graph, arguments):
    """All three tensors of pairs; rows of the edges are views, and no more bytes."""
    account = Budget(device="1GiB")
    graph.charge_to(account)
    rgat(graph, **arguments).sum().backward()

    def storages(value):
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
        for part in value if isinstance(value, tuple) else ():
            yield from storages(part)

    held = (graph.edge_index, graph.edge_type, *graph.indexes.kept.snapshot().values())
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages(held)}
    assert held_bytes(account) == sum(sizes.values())


def test_tasks_and_blocks_of_kernels_are_charged(graph):
    account = Budget(device="1GiB")
    graph.charge_to(account)
    graph.indexes.order(Domain.EDGE, Domain.TARGET)
    before = held_bytes(account)
    tasks = _triton.tasks_of(graph.indexes, Domain.EDGE, Domain.TARGET, 8)
    columns = (tasks.groups, tasks.begins, tasks.ends, tasks.part_numbers)
    parts = (tasks.split.groups, tasks.split.firsts, tasks.split.counts)
    assert held_bytes(account) - before == sum(column.nbytes for column in (*columns, *parts))


def held_bytes(account):
    (relational,) = (holder for use in account.uses() for holder in use.holders if holder.name == "relational")
    return relational.held_bytes
