"""Mini-batches come in order, beside the step, whatever happens in their threads."""

import threading

import pytest
import torch
from unified_cases import EDGES, ROWS

from penstock import unified
from penstock.unified import _tiered

NUM_NODES = 500


def parts(**options):
    generator = torch.Generator().manual_seed(0)
    graph = unified.Graph(torch.randint(NUM_NODES, (2, 4000), generator=generator), NUM_NODES)
    features = torch.randn(NUM_NODES, 6, generator=generator)
    options.setdefault("batch_size", 32)
    loader = unified.Loader(
        unified.NeighborSampler(graph, [4, 3]), features, torch.arange(100), labels=torch.arange(NUM_NODES), **options
    )
    return features, loader


def loaders_threads():
    return [thread for thread in threading.enumerate() if thread.name == "penstock-loader"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_are_whole_and_repeatable(ahead):
    features, loader = parts(ahead=ahead)
    assert len(loader) == 4
    seen = []
    for batch in loader:
        assert torch.equal(batch.x, features[batch.nodes])
        assert torch.equal(batch.nodes[: len(batch.seeds)], batch.seeds)
        assert torch.equal(batch.y, batch.seeds)
        assert torch.equal(batch.edge_index, batch.sample.edge_index)
        seen.append(batch)
    assert torch.cat([batch.seeds for batch in seen]).sort().values.tolist() == list(range(100))
    _, again = parts(ahead=2)
    for batch, repeated in zip(seen, again, strict=True):
        assert torch.equal(batch.nodes, repeated.nodes) and torch.equal(batch.edge_index, repeated.edge_index)
    second = next(iter(again))  # the next epoch has another order
    assert not torch.equal(second.seeds, seen[0].seeds)
    again.epoch = 0
    assert torch.equal(next(iter(again)).seeds, seen[0].seeds)
    assert not loaders_threads()


def test_the_last_batch_order_and_several_features():
    features, loader = parts(drop_last=True, shuffle=False)
    assert len(loader) == 3 and [len(batch.seeds) for batch in loader] == [32, 32, 32]
    assert next(iter(loader)).seeds.tolist() == list(range(32))
    with unified.TieredFeatures(features) as tiered:
        loader.features, loader.labels = {"x": tiered, "wrapped": unified.wrap(features)}, None
        batch = next(iter(loader))
        assert torch.equal(batch.x["x"], features[batch.nodes]) and torch.equal(batch.x["wrapped"], batch.x["x"])
        assert batch.y is None
    mask = torch.zeros(NUM_NODES, dtype=torch.bool)
    mask[[3, 8]] = True
    assert next(iter(unified.Loader(loader.sampler, features, mask, batch_size=8, shuffle=False))).seeds.tolist() == [
        3,
        8,
    ]


def test_an_epoch_that_is_left_early_ends_its_threads():
    _, loader = parts(batch_size=1)
    for _ in loader:
        assert loaders_threads()
        break
    assert not loaders_threads()
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert not loaders_threads()


class Failing:
    """Features that cannot be read after a while."""

    def __init__(self, after):
        self.after = after

    def __getitem__(self, nodes):
        self.after -= 1
        if self.after < 0:
            raise OSError(5, "Input/output error")
        return torch.zeros(len(nodes), 1)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_is_raised_where_the_batch_would_have_come(ahead):
    _, loader = parts(ahead=ahead, batch_size=10)
    loader.features = Failing(3)
    iterator = iter(loader)
    for taken in range(3):  # noqa: B007
        next(iterator)
    with pytest.raises(OSError, match="Input/output error"):
        next(iterator)
    assert taken == 2
    assert not loaders_threads()
    loader.features, loader.sampler = Failing(100), None
    with pytest.raises(AttributeError):
        list(loader)
    assert not loaders_threads()


def test_no_more_than_asked_are_made_in_advance():
    features, loader = parts(batch_size=5, ahead=2)
    sizes = []

    class Counting:
        def __getitem__(self, nodes):
            sizes.append(len(nodes))
            return features[nodes]

    loader.features = Counting()
    for number, _ in enumerate(loader):
        assert len(sizes) <= number + 1 + 2
    assert len(sizes) == 20


def test_statistics():
    _, loader = parts()
    list(loader)
    statistics = loader.reset_statistics()
    assert statistics.num_batches == 4 and statistics.num_nodes > 100
    assert statistics.sample_s > 0 and statistics.gather_s > 0 and statistics.wall_s > 0
    assert 0 <= statistics.stall_s <= statistics.wall_s and 0 <= statistics.hidden_share <= 1
    assert loader.statistics() == unified.LoaderStatistics()


def test_what_says_nothing():
    _, loader = parts()
    with pytest.raises(ValueError, match="twice"):
        unified.Loader(loader.sampler, torch.zeros(5), torch.tensor([1, 2, 1]), batch_size=1)
    with pytest.raises(ValueError, match="at least 1"):
        unified.Loader(loader.sampler, torch.zeros(5), torch.arange(2), batch_size=0)
    with pytest.raises(ValueError, match="at least 0"):
        unified.Loader(loader.sampler, torch.zeros(5), torch.arange(2), batch_size=1, ahead=-1)


@pytest.mark.parametrize("in_flight", [0, 3 * 2**10, 2**20])
def test_bytes_in_flight_stay_below_what_features_allow(tmp_path, monkeypatch, in_flight):
    """But for one mini-batch, which may be larger than that."""
    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda *_: 0)
    plain, loader = parts(batch_size=4, ahead=6)
    with unified.TieredFeatures(
        plain, host=4 * NUM_NODES + 2000 + in_flight, in_flight=in_flight, disk=tmp_path
    ) as features:
        assert features.in_flight_bytes == in_flight
        loader.features, most, held, lock = features, [0], [0], threading.Condition()
        read, num_read = loader._read, [0]

        def counting(sampled):
            batch = read(sampled)
            with lock:
                held[0] += batch.x.nbytes
                most[0] = max(most[0], held[0])
                num_read[0] += 1
                lock.notify_all()
            return batch

        loader._read = counting
        sizes = []
        for batch in loader:
            assert torch.equal(batch.x, plain[batch.nodes])
            sizes.append(batch.x.nbytes)
            with lock:  # a step; others are read meanwhile
                if in_flight == 2**20:
                    lock.wait_for(lambda: num_read[0] >= min(25, len(sizes) + 4))
                else:
                    lock.wait(0.005)
                held[0] -= batch.x.nbytes
        assert len(sizes) == 25
        # the one that a step has is the step's, and the next begins when it is taken
        assert most[0] <= max(sizes) + max(in_flight, *sizes)
        assert max(sizes) <= loader.statistics().peak_in_flight_bytes <= max(in_flight, *sizes)
        if in_flight == 2**20:
            assert most[0] > 2 * max(sizes)


def test_an_interrupt_while_rows_wait_for_room(tmp_path, monkeypatch):
    """Whatever is raised between two mini-batches, nothing hangs."""
    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda *_: 0)
    plain, loader = parts(batch_size=4, ahead=6)
    with unified.TieredFeatures(plain, host=4 * NUM_NODES + 2000, in_flight=0, disk=tmp_path) as features:
        loader.features = features
        release = threading.Semaphore.release

        def interrupted(self, n=1):
            monkeypatch.setattr(threading.Semaphore, "release", release)
            raise KeyboardInterrupt

        iterator = iter(loader)
        next(iterator)
        monkeypatch.setattr(threading.Semaphore, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert not loaders_threads()


def test_loaders_of_others_run_in_advance():
    names = []

    def batches():
        for number in range(6):
            names.append(threading.current_thread().name)
            yield number
        raise OSError(5, "Input/output error")

    iterator = unified.in_advance(batches(), 2)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    assert set(names) == {"penstock-loader"} and len(names) <= 5
    assert [next(iterator) for _ in range(3)] == [3, 4, 5]
    with pytest.raises(OSError, match="Input/output"):
        next(iterator)
    assert not loaders_threads()
    for _ in unified.in_advance(range(100)):
        break
    assert not loaders_threads()
    assert list(unified.in_advance(range(3), 0)) == [0, 1, 2]


def test_labels_have_a_row_for_each_seed():
    sampler = unified.NeighborSampler(unified.Graph(EDGES), [2])
    with pytest.raises(ValueError, match="`labels` must have one entry for each of 4 nodes, got 2"):
        unified.Loader(sampler, ROWS[:4], torch.arange(4), batch_size=2, labels=torch.ones(2))
