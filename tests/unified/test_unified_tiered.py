"""Tiered features: values as of a plain table, budgets kept, faults told."""

import errno
import gc
import os
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock import tiers, unified
from penstock.errors import BudgetError, FeatureFileError, TierDegradedWarning, TierReadError
from penstock.unified import _disk, _tiered
from penstock.unified._files import find_table


def made(rows=3000, width=9, dtype=torch.float32):
    return torch.randint(-50, 50, (rows, width), generator=torch.Generator().manual_seed(0)).to(dtype)


def room(rows, table, hot):
    """A host budget for so many hot rows."""
    return 4 * rows + hot * (table[0].nbytes + 4)


def tiered(tmp_path, table, hot, **options):
    options = {"disk": tmp_path, "in_flight": 0, **options}
    return unified.TieredFeatures(table, host=room(len(table), table, hot), **options)


@pytest.fixture(autouse=True)
def no_buffers(monkeypatch):
    """Else every table of a test would fit beside the buffers' bytes."""
    monkeypatch.setattr(_tiered, "buffer_bytes_for", lambda stride_bytes: 0)


@st.composite
def indexed(draw):
    rows = 300
    numbers = st.integers(-rows, rows - 1)
    many = draw(st.lists(numbers, max_size=20))
    kind = draw(
        st.sampled_from(["tensor", "matrix", "slice", "mask", "list", "int", "numpy", "pair", "column", "scalar"])
    )
    return {
        "tensor": lambda: torch.tensor(many, dtype=torch.int64),
        "matrix": lambda: torch.tensor([many, many], dtype=torch.int64),
        "slice": lambda: slice(draw(st.none() | numbers), draw(st.none() | numbers), draw(st.integers(1, 3))),
        "mask": lambda: torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows))),
        "list": lambda: many,
        "int": lambda: draw(numbers),
        "numpy": lambda: np.array(many, dtype=np.int64),
        "pair": lambda: (torch.tensor(many, dtype=torch.int64), slice(0, 2)),
        "column": lambda: (slice(None), 1),
        "scalar": lambda: torch.tensor(draw(numbers)),
    }[kind]()


@given(
    indexed(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool]),
    st.sampled_from([(5,), (), (2, 130), (200,)]), st.sampled_from([0, 1, 150, 300]),
    st.sampled_from(["tensor", "npy", "safetensors", "rows", "striped"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_are_those_of_plain_indexing(either, tmp_path, index, dtype, shape, hot, source, scored):
    plain = torch.randint(-50, 50, (300, *shape)).to(dtype)
    for one in tmp_path.glob("*.*"):
        one.unlink()
    given_source, options = plain, {"disk": tmp_path}
    if source == "npy" and dtype is not torch.bfloat16:
        np.save(tmp_path / "x.npy", plain.numpy())
        given_source = tmp_path / "x.npy"
    elif source == "safetensors":
        save_file({"x": plain}, tmp_path / "x.safetensors")
        given_source = str(tmp_path / "x.safetensors")
    elif source == "rows":
        given_source = unified.write_features(tmp_path / "x.rows", plain)
    elif source == "striped":
        for number in (1, 2):
            (tmp_path / str(number)).mkdir(exist_ok=True)
        options = {"disk": [tmp_path / "1", tmp_path / "2"]}
    scores = torch.rand(300) if scored else None
    with (
        tiered(tmp_path, plain, hot, scores=scores, **options)
        if given_source is plain
        else unified.TieredFeatures(given_source, host=room(300, plain, hot), scores=scores, in_flight=0) as features
    ):
        if isinstance(index, tuple) and not shape:
            with pytest.raises(IndexError):
                features[index]
            return
        found = features[index]
        assert torch.equal(found, plain[index]) and found.dtype is dtype
        assert features.shape == plain.shape and len(features) == 300 and features.dim() == plain.dim()
        assert len(features.plan.host_rows) + features.plan.num_disk_rows == 300


@pytest.mark.parametrize("index", [[3000], [-3001], [0, 5, 2**40]])
def test_rows_that_are_not_there(either, tmp_path, index):
    with tiered(tmp_path, made(), 100) as features, pytest.raises(IndexError, match=f"index {index[-1]} at position"):
        features[torch.tensor(index)]
    with unified.TieredFeatures(made()) as features, pytest.raises(IndexError, match=f"index {index[-1]} at position"):
        features[torch.tensor(index)]


def test_indexes_that_say_nothing(tmp_path):
    with tiered(tmp_path, made(), 100) as features:
        for index in (torch.ones(3), (None, 0), (Ellipsis, 0), torch.ones(5, dtype=torch.bool)):
            with pytest.raises(IndexError):
                features[index]
        with pytest.raises(ValueError, match="index_select"):
            features.index_select(1, torch.tensor([0]))
        assert torch.equal(features.index_select(0, torch.tensor([2])), made()[2:3])
        assert features.size(0) == 3000 and features.size() == (3000, 9)


@pytest.mark.parametrize("stored, scale", [(torch.float16, None), (torch.bfloat16, None), (torch.int8, torch.rand(9))])
def test_rows_widened_while_they_are_read(either, tmp_path, stored, scale):
    plain = made(dtype=stored)
    index = torch.randint(3000, (500,))
    with tiered(tmp_path, plain, 1000, dtype=torch.float32, scale=scale) as features:
        expected = plain[index].float() * (1 if scale is None else scale)
        assert torch.equal(features[index], expected)
        assert features.dtype is torch.float32
        assert features.plan.row_bytes == 9 * stored.itemsize


def test_hot_rows_are_the_most_wanted(tmp_path):
    scores = torch.rand(3000)
    wanted = scores.argsort(descending=True)
    with tiered(tmp_path, made(), 500, scores=scores) as features:
        assert features.plan.host_rows.tolist() == wanted[:500].sort().values.tolist()
        features[wanted[:500]]
        assert features.statistics().hit_rate == 1
        features[wanted[500:]]
        found = features.reset_statistics()
        assert (found.host_rows, found.disk_rows) == (500, 2500)
        assert found.disk_requests < 2500  # rows that lie together share a request
        assert features.statistics().host_rows == 0
        assert "16.7%" not in features.plan.explain() and "disk" in features.plan.explain()


def test_sectors_are_read_once_and_amplification_is_told(tmp_path):
    plain = torch.randn(20_000, 256)
    np.save(tmp_path / "x.npy", plain.numpy())
    path = unified.write_features(tmp_path / "x.rows", plain)
    apart = torch.arange(0, 20_000, 40)
    for source, least, most in ((path, 1.0, 1.0), (tmp_path / "x.npy", 1.0, 2.0)):
        with unified.TieredFeatures(source, host=4 * 20_000, in_flight=0) as features:
            sector = features._files.align_bytes
            assert torch.equal(features[apart], plain[apart])
            found = features.statistics()
            assert found.disk_requests == len(apart)
            if sector == 512:
                assert least <= found.read_amplification <= most
            features.reset_statistics()
            assert torch.equal(features[torch.arange(1000).repeat(3)], plain[:1000].repeat(3, 1))
            assert features.statistics().disk_requests <= 36
            assert features.statistics().disk_read_bytes <= 1000 * 1024 + 36 * 4096


def test_budget_is_kept_and_shared(tmp_path, monkeypatch):
    plain, budget = made(), tiers.Budget(host="1MiB")
    with tiered(tmp_path, plain, 500, budget=budget) as features:
        assert features.host_bytes == 500 * 40 + 4 * 3000 == budget.held_bytes("host")
        assert features.host_bytes <= room(3000, plain, 500)
    assert budget.held_bytes("host") == 0
    with pytest.raises(BudgetError, match="above the budget"):
        tiered(tmp_path, plain, 500, budget=tiers.Budget(host="1KiB"))
    features = tiered(tmp_path, plain, 500, budget=budget)
    del features
    gc.collect()
    assert budget.held_bytes("host") == 0
    with pytest.raises(BudgetError, match="disk='/nvme'"):
        unified.TieredFeatures(plain, host=20_000)
    monkeypatch.undo()
    for options in ({}, {"in_flight": 500}):
        with pytest.raises(BudgetError, match="`host` must be at least") as caught:
            unified.TieredFeatures(torch.zeros(10_000, 100), host=5000, disk=tmp_path, **options)
        least = int(str(caught.value).split("at least ")[1].split(",")[0])
        unified.TieredFeatures(torch.zeros(10_000, 100), host=least, disk=tmp_path, **options).close()
        with pytest.raises(BudgetError):
            unified.TieredFeatures(torch.zeros(10_000, 100), host=least - 2, disk=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_gives_back_what_was_charged(tmp_path, monkeypatch):
    budget = tiers.Budget(host="1MiB", disk={tmp_path: "1MiB"})
    monkeypatch.setattr(_tiered, "exact", lambda size_bytes: (_ for _ in ()).throw(MemoryError("none")))
    with pytest.raises(MemoryError):
        tiered(tmp_path, made(), 500, budget=budget)
    assert budget.held_bytes("host") == budget.held_bytes(str(tmp_path)) == 0
    assert budget.peak_bytes(str(tmp_path)) == 3000 * 64  # 36 bytes a row, 64 apart
    monkeypatch.undo()
    with pytest.raises(BudgetError, match=r"of rows do not fit into .* which may hold 100 B: disk=\{"):
        unified.TieredFeatures(torch.zeros(100_000, 40), host="4MiB", disk={tmp_path: 100})


def test_closed_features_say_so(tmp_path):
    from penstock.probe import ledger

    before = ledger.held_bytes
    features = tiered(tmp_path, made(), 500)
    assert ledger.held_bytes - before == 500 * 36
    features.close()
    assert ledger.held_bytes == before
    with pytest.raises(ValueError, match="were closed"):
        features[torch.tensor([2999])]


def test_closing_waits_for_who_reads(tmp_path):
    """Never another file's bytes, and no crash."""
    plain, found = made(), []
    features = tiered(tmp_path, plain, 5)

    def read():
        for _ in range(200):
            try:
                found.append(torch.equal(features[torch.arange(3000)], plain))
            except ValueError:
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for one in threads:
        one.start()
    while len(found) < 5:
        pass
    features.close()
    for one in threads:
        one.join()
    assert all(found)


def test_under_another_default_device(tmp_path):
    plain, graph_edges = made(), torch.randint(50, (2, 300))
    torch.set_default_device("meta")
    try:
        with tiered(tmp_path, plain, 500) as features:
            assert torch.equal(features[3:9], plain[3:9]) and torch.equal(features[5], plain[5])
            graph = unified.Graph(graph_edges, 50)
            sample = unified.NeighborSampler(graph, [3, 2]).sample(graph_edges[0][:5])
            assert torch.equal(features[sample.nodes], plain[sample.nodes])
        assert torch.equal(unified.wrap(plain)[sample.nodes], plain[sample.nodes])
    finally:
        torch.set_default_device(None)


def test_what_may_follow_the_rows(tmp_path):
    plain = torch.randn(300, 4, 5)
    matrix = torch.tensor([[1, 2], [3, 299]])
    with tiered(tmp_path, plain, 50) as features:
        for index in (
            (matrix, 0), (matrix, slice(0, 1)), (matrix, ..., 2), (torch.tensor(1), 1), (np.int64(1), 1), (2, 3, 4),
            (slice(0, 9), None, 2), (torch.ones(300, dtype=torch.bool), slice(1, 3)), ([4, 5], 0, slice(1, 3)),
        ):  # fmt: skip
            assert torch.equal(features[index], plain[index]), index
        for index in ((matrix[0], matrix[0]), ..., None, ([1, 2], [0, 1])):
            with pytest.raises(IndexError, match=r"features\[rows\]\[:, columns\]"):
                features[index]
        for wrong in (torch.ones(300, dtype=torch.bool), torch.tensor([1.5]), matrix):
            with pytest.raises(IndexError, match="vector of int64 rows"):
                features.index_select(0, wrong)


def test_lazy_conjugates(tmp_path):
    plain = torch.randn(300, 4, dtype=torch.complex64)
    index = torch.tensor([3, 5])
    with tiered(tmp_path, plain.conj(), 50) as features:
        assert torch.equal(features[index], plain.conj()[index])
    assert torch.equal(unified.wrap(plain).conj()[index], plain.conj()[index])
    with pytest.raises(ValueError, match="resolve_conj"):
        unified.wrap(plain.conj())


def test_damage_is_found_where_it_is_asked(tmp_path):
    path = unified.write_features(tmp_path / "x.rows", made())
    raw = bytearray(path.read_bytes())
    raw[4096 + 64 * 1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FeatureFileError, match="rows 0 to 2999 differ from what was written"):
        unified.TieredFeatures(path, verify=True)
    with pytest.raises(FeatureFileError, match="differ from what was written"):
        unified.write_features(tmp_path / "copy.rows", path)
    assert not (tmp_path / "copy.rows").exists()


def test_all_rows_in_memory_are_where_they_were():
    plain = made()
    with unified.TieredFeatures(plain) as features:
        plain[7] = 5
        assert torch.equal(features[7], plain[7])
        assert features.plan.hit_rate == 1


def test_what_is_left_of_the_budget_is_in_flight():
    budget = tiers.Budget(host="1MiB")
    with unified.TieredFeatures(made(), host="200KiB", budget=budget) as features:
        assert features.in_flight_bytes == 200 * 1024 - 3000 * 36 == budget.held_bytes("host")
        assert features.host_bytes == 200 * 1024
    budget = tiers.Budget()
    with unified.TieredFeatures(made().t().contiguous().t(), budget=budget) as features:
        assert torch.equal(features[5], made()[5]) and budget.held_bytes("host") == 3000 * 36


def test_arguments_that_do_not_go_together(tmp_path):
    with pytest.raises(ValueError, match="`host` alone"):
        unified.TieredFeatures(made(), device_budget="1MiB")
    with pytest.raises(ValueError, match="in host memory"):
        unified.TieredFeatures(torch.ones(3, 3, device="meta"))
    with pytest.raises(ValueError, match="each of the table's 3000 rows, got 7"):
        tiered(tmp_path, made(), 5, scores=torch.ones(7))
    with pytest.raises(ValueError, match="finite"):
        tiered(tmp_path, made(), 5, scores=torch.full((3000,), torch.nan))


def test_nothing_is_left_on_the_disk(tmp_path):
    features = tiered(tmp_path, made(), 5)
    assert list(tmp_path.iterdir()) == []
    before = len(os.listdir("/proc/self/fd"))
    features.close()
    features.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(unified.TieredFeatures(made()))


def test_reading_from_many_threads(tmp_path):
    plain = made()
    with tiered(tmp_path, plain, 500) as features:
        wrong = []

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(20):
                index = torch.randint(3000, (100,), generator=generator)
                if not torch.equal(features[index], plain[index]):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert not wrong
        assert features.statistics().host_rows + features.statistics().disk_rows == 6 * 20 * 100


def test_in_a_forked_child(tmp_path):
    plain = made()
    with tiered(tmp_path, plain, 500) as features:
        index = torch.arange(3000)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(features[index], plain) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(features[index], plain)


@pytest.mark.parametrize("kind", ["aligned", "in place"])
def test_a_file_that_shrinks_is_told(either, tmp_path, kind):
    path = tmp_path / "x"
    if kind == "aligned":
        unified.write_features(path, made())
    else:
        np.save(tmp_path / "x.npy", made().numpy())
        path = tmp_path / "x.npy"
    with unified.TieredFeatures(path, host=room(3000, made(), 10), in_flight=0) as features:
        os.truncate(path, 20_000)
        with pytest.raises(TierReadError, match="the file ends before that") as caught:
            features[torch.arange(3000)]
        assert caught.value.file == str(path) and caught.value.errno is None


def test_a_failed_read_is_told(either, tmp_path):
    path = unified.write_features(tmp_path / "x", made())
    with unified.TieredFeatures(path, host=room(3000, made(), 10), in_flight=0) as features:
        descriptor = os.open(tmp_path, os.O_RDONLY)  # a folder: reading it fails
        os.dup2(descriptor, features._files._descriptors[0])
        with pytest.raises(TierReadError, match="directory") as caught:
            features[torch.arange(3000)]
        assert caught.value.errno == errno.EISDIR
        os.close(descriptor)


def test_a_file_system_without_direct_reads(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    path = unified.write_features(tmp_path / "x", made())
    monkeypatch.setattr(os, "open", refusing)
    with pytest.warns(TierDegradedWarning, match="refuses O_DIRECT"):
        features = unified.TieredFeatures(path, host=room(3000, made(), 10), in_flight=0)
    assert torch.equal(features[torch.arange(3000)], made())
    features.close()


def test_a_disk_with_large_sectors(either, tmp_path, monkeypatch):
    monkeypatch.setattr(_disk, "_can_read", lambda descriptor, size: size == 4096)
    np.save(tmp_path / "x.npy", made().numpy())
    with unified.TieredFeatures(tmp_path / "x.npy", host=room(3000, made(), 10), in_flight=0) as features:
        assert features._files.align_bytes in (1, 4096)
        index = torch.randint(3000, (500,))
        assert torch.equal(features[index], made()[index])


def test_rows_wider_than_a_request(either, tmp_path):
    plain = torch.randn(12, 50_000)  # 200 KB each
    with tiered(tmp_path, plain, 2) as features:
        index = torch.tensor([11, 3, 3, 0])
        assert torch.equal(features[index], plain[index])


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    from penstock.unified import _write

    def full(file, view, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_write, "_write_at", full)
    with pytest.raises(OSError, match="No space left"):
        tiered(tmp_path, made(), 5)
    assert list(tmp_path.iterdir()) == []


def test_split_sorts_by_tier(either):
    places = torch.tensor([-1, 0, 2, -1, 1], dtype=torch.int32)
    (slots, positions), counts = _tiered.split(places, 1, torch.tensor([0, 1, 2, -1, -2, 1]))
    assert counts == [2, 2, 2]
    assert slots.tolist() == [0, 0, 1, 0, 0, 3]
    assert positions.tolist() == [1, 5, 2, 3, 0, 4]


def test_tables_that_are_found_stay_as_they_were(tmp_path):
    """Reading in place writes nothing."""
    np.save(tmp_path / "x.npy", made().numpy())
    before = (tmp_path / "x.npy").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierDegradedWarning)
        with unified.TieredFeatures(tmp_path / "x.npy", host=room(3000, made(), 10), in_flight=0) as features:
            features[torch.arange(100)]
    assert (tmp_path / "x.npy").read_bytes() == before
    assert find_table(tmp_path / "x.npy").shape == (3000, 9)


def test_the_limit_of_host_memory_is_still_known_by_its_earlier_name():
    with pytest.warns(DeprecationWarning, match="`host_budget` is now called `host`") as caught:
        features = unified.TieredFeatures(torch.ones(8, 2), host_budget="1MiB")
    assert caught[0].filename == __file__
    features.close()
