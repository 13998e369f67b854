"""Tables, samplers and files asked for what they cannot give: the argument is named, and nothing is left behind."""

import pytest
import torch

from penstock import unified

ROWS = torch.arange(40.0 * 16).view(40, 16)
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])


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


def test_accesses_of_rows_that_are_not_there():
    with pytest.raises(ValueError, match="`num_rows` must be above every row that is read, got 3; rows from 1 to 5"):
        unified.count_accesses([torch.tensor([1, 5])], 3)
    with pytest.raises(TypeError, match="`indexes` must be tensors of row numbers, or batches"):
        unified.count_accesses([None], 3)


def test_labels_have_a_row_for_each_seed():
    sampler = unified.NeighborSampler(unified.Graph(EDGES), [2])
    with pytest.raises(ValueError, match="`labels` must have one entry for each of 4 nodes, got 2"):
        unified.Loader(sampler, ROWS[:4], torch.arange(4), batch_size=2, labels=torch.ones(2))


def test_shapes_are_whole_numbers():
    for shape in (("",), ("12",), (True,), (-1,), ([1.5],)):
        with pytest.raises((TypeError, ValueError), match="whole numbers that are not negative"):
            unified.empty(*shape)


def test_what_is_written_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="`source` must be a tensor, a file, or what yields tensors"):
        unified.write_features(tmp_path / "a.features", (number for number in range(3)), progress=False)
    with pytest.raises(ValueError, match="`path` must name a file, got '.'"):
        unified.write_features("", ROWS, progress=False)
    assert not list(tmp_path.iterdir())


def test_ends_of_edges_name_the_number_of_nodes():
    with pytest.raises(ValueError, match="`num_nodes` is 4 and `num_sources` is 0"):
        unified.Graph(EDGES, 4, 0)
