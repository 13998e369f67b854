"""Tiered features: values as of a plain table, budgets kept, faults told."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from unified_cases import ROWS, large_table, room, tiered

from penstock import tiers, unified
from penstock.errors import BudgetError

pytestmark = pytest.mark.usefixtures("no_buffers")


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
    for path in tmp_path.glob("*.*"):
        path.unlink()
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
        rows = features[index]
        assert torch.equal(rows, plain[index]) and rows.dtype is dtype
        assert features.shape == plain.shape and len(features) == 300 and features.dim() == plain.dim()
        assert len(features.plan.host_rows) + features.plan.num_disk_rows == 300


def test_indexes_that_say_nothing(tmp_path):
    with tiered(tmp_path, large_table(), 100) as features:
        for index in (torch.ones(3), (None, 0), (Ellipsis, 0), torch.ones(5, dtype=torch.bool)):
            with pytest.raises(IndexError):
                features[index]
        with pytest.raises(ValueError, match="index_select"):
            features.index_select(1, torch.tensor([0]))
        assert torch.equal(features.index_select(0, torch.tensor([2])), large_table()[2:3])
        assert features.size(0) == 3000 and features.size() == (3000, 9)


def test_budget_is_kept_and_shared(tmp_path, monkeypatch):
    plain, budget = large_table(), tiers.Budget(host="1MiB")
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


def test_closed_features_say_so(tmp_path):
    from penstock.probe import ledger

    before = ledger.held_bytes
    features = tiered(tmp_path, large_table(), 500)
    assert ledger.held_bytes - before == 500 * 36
    features.close()
    assert ledger.held_bytes == before
    with pytest.raises(ValueError, match="were closed"):
        features[torch.tensor([2999])]


def test_under_another_default_device(tmp_path):
    plain, graph_edges = large_table(), torch.randint(50, (2, 300))
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


def test_what_is_left_of_the_budget_is_in_flight():
    budget = tiers.Budget(host="1MiB")
    with unified.TieredFeatures(large_table(), host="200KiB", budget=budget) as features:
        assert features.in_flight_bytes == 200 * 1024 - 3000 * 36 == budget.held_bytes("host")
        assert features.host_bytes == 200 * 1024
    budget = tiers.Budget()
    with unified.TieredFeatures(large_table().t().contiguous().t(), budget=budget) as features:
        assert torch.equal(features[5], large_table()[5]) and budget.held_bytes("host") == 3000 * 36


def test_arguments_that_do_not_go_together(tmp_path):
    with pytest.raises(ValueError, match="`host` alone"):
        unified.TieredFeatures(large_table(), device_budget="1MiB")
    with pytest.raises(ValueError, match="in host memory"):
        unified.TieredFeatures(torch.ones(3, 3, device="meta"))
    with pytest.raises(ValueError, match="each of the table's 3000 rows, got 7"):
        tiered(tmp_path, large_table(), 5, scores=torch.ones(7))
    with pytest.raises(ValueError, match="finite"):
        tiered(tmp_path, large_table(), 5, scores=torch.full((3000,), torch.nan))


@pytest.fixture
def features(tmp_path):
    with unified.TieredFeatures(ROWS, host=20 * 1024, in_flight=4096, disk=tmp_path) as table:
        yield table


@pytest.mark.parametrize("index", ["12 potatoes", b"raw", {}, ["1"], object(), len])
def test_features_are_not_indexed_by_what_is_no_row_number(features, index):
    with pytest.raises(IndexError, match="`index` must be a row number, a slice, a list, a mask or a tensor"):
        features[index]


@pytest.mark.parametrize("row", [40, -41, 2**70])
def test_single_rows_that_are_not_there(features, row):
    with pytest.raises(IndexError, match="the table has 40 rows, -40 to 39"):
        features[row]


def test_sizes_are_asked_for_by_number(features):
    assert features.size(1) == 16
    with pytest.raises(TypeError, match="`dim` must be an int or None"):
        features.size("0")


def test_the_limit_of_host_memory_is_still_known_by_its_earlier_name():
    with pytest.warns(DeprecationWarning, match="`host_budget` is now called `host`") as caught:
        features = unified.TieredFeatures(torch.ones(8, 2), host_budget="1MiB")
    assert caught[0].filename == __file__
    features.close()
