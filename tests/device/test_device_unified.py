"""Host memory read and written in place by a device, beside plain tensors of the device."""

import copy

import pytest
import torch
from torch.nn import functional

from penstock import unified

pytestmark = pytest.mark.cuda_only("kernels read host memory in place, which no simulated device does")
DEVICE = "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float64, torch.bool, torch.int64]


def table(rows=3000, width=67, dtype=torch.float32):
    return torch.randint(-50, 50, (rows, width), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3000, 1), (3000, 67), (3000, 128), (500, 3, 300), (3000,)])
def test_rows_are_read_in_place(dtype, shape):
    plain = torch.randint(-50, 50, shape).to(dtype)
    found = unified.wrap(plain)
    assert found.is_registered and found.is_pinned()
    for index in (torch.randint(-shape[0], shape[0], (1000,)), torch.tensor([[0, 1], [2, -1]]), torch.empty(0).long()):
        rows = found[index.to(DEVICE)]
        assert rows.device.type == "cuda" and torch.equal(rows.cpu(), plain[index])
        assert torch.equal(unified.gather(found, index.to(DEVICE), sort=True).cpu(), plain[index])
    assert found[torch.tensor([1])].device.type == "cpu"
    assert torch.equal(functional.embedding(torch.tensor([5, 6], device=DEVICE), found).cpu(), plain[5:7])


def test_rows_widened_while_they_are_read():
    index = torch.randint(3000, (500,), device=DEVICE)
    for stored in (torch.float16, torch.bfloat16):
        plain = table(dtype=stored)
        found = unified.gather(unified.wrap(plain), index, dtype=torch.float32)
        assert torch.equal(found.cpu(), plain[index.cpu()].float())
    plain, scale = table(dtype=torch.int8), torch.rand(67)
    found = unified.gather(unified.wrap(plain), index, scale=scale)
    assert torch.equal(found.cpu(), plain[index.cpu()].float() * scale)


def test_placement():
    found = unified.wrap(table())
    assert (found + 1).device.type == "cuda"
    assert (found + torch.tensor(1.0)).device.type == "cuda"
    assert (found + torch.ones(67)).device.type == "cpu"
    assert (found + torch.ones(67, device=DEVICE)).device.type == "cuda"
    assert (unified.wrap(table(), prefer="host") + 1).device.type == "cpu"
    assert torch.equal((found * 2).cpu(), table() * 2)
    assert torch.equal(found[found[:, 0] > 0].cpu(), table()[table()[:, 0] > 0])
    assert torch.equal(found.cuda().cpu(), table())


@pytest.mark.parametrize("width", [64, 300])
def test_many_rows_are_read_in_order_if_they_are_short(width):
    plain = torch.randn(50_000, width)
    index = torch.randint(-50_000, 50_000, (40_000,))
    assert torch.equal(unified.wrap(plain)[index.to(DEVICE)].cpu(), plain[index])


def test_rows_that_are_not_there():
    found, bad = unified.wrap(table()), torch.tensor([0, 3000], device=DEVICE)
    with pytest.raises(IndexError, match="position 1"):
        unified.gather(found, bad, verify=True)
    rows = found[bad]
    torch.cuda.synchronize()
    assert (rows[1] == 0).all()
    with pytest.raises(IndexError, match="position 1 of an earlier gather"):
        found[torch.tensor([0], device=DEVICE)]
    assert torch.equal(found[torch.tensor([0], device=DEVICE)].cpu(), table()[:1])


def test_writes_from_the_device():
    plain = table()
    expected, found = plain.clone(), unified.wrap(plain)
    index = torch.tensor([3, 5], device=DEVICE)
    rows = torch.full((2, 67), 9.0, device=DEVICE)
    found.index_copy_(0, index, rows)
    found.index_add_(0, index, rows)
    found[torch.tensor([7], device=DEVICE)] = 1
    expected[[3, 5]], expected[7] = 18.0, 1
    assert torch.equal(found.cpu(), expected)  # .cpu() waits for the device
    assert torch.equal(plain, expected)


def test_streams_stay_in_order():
    found = unified.wrap(torch.zeros(200_000, 64))
    side = torch.cuda.Stream()
    index = torch.arange(200_000, device=DEVICE)
    torch.cuda.synchronize()
    for value in range(1, 20):
        torch.cuda._sleep(1_000_000)
        found.fill_(value)
        with torch.cuda.stream(side):
            rows = found[index]
            assert float(rows.min()) == float(rows.max()) == value
        assert float(found.cpu()[-1, -1]) == value


def test_training_a_table_in_host_memory():
    def train(weight):
        optimizer = torch.optim.SparseAdam([weight], lr=0.1)
        for step in range(4):
            index = torch.tensor([[1, 2], [2, 7 + step]], device=DEVICE)
            functional.embedding(index, weight, sparse=True).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().cpu()

    expected = train(torch.nn.Parameter(table().cuda()))
    found = train(torch.nn.Parameter(unified.wrap(table())))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_memory_is_let_go():
    plain = table(200_000)
    for _ in range(5):
        found = unified.wrap(plain)
        again = copy.deepcopy(found)
        assert torch.equal(again[torch.tensor([5], device=DEVICE)].cpu(), plain[5:6])
        del found, again
    assert not plain.is_pinned()
    torch.ones(1, device=DEVICE).sum().item()  # no error was left behind


@pytest.mark.parametrize(
    "budgets", [("8MiB", "20MiB"), ("8MiB", "12MiB"), (0, "12MiB"), ("200MiB", None), ("8MiB", None)]
)
def test_tiered_features(tmp_path, budgets):
    plain, scores = torch.randn(60_000, 100), torch.rand(60_000)
    with unified.TieredFeatures(
        plain, device=DEVICE, device_budget=budgets[0], host=budgets[1], disk=tmp_path, scores=scores
    ) as features:
        for index in (torch.randint(-60_000, 60_000, (5000,)), torch.randint(60_000, (5000,), device=DEVICE)):
            found = features[index]
            assert found.device.type == "cuda" and torch.equal(found.cpu(), plain[index.cpu()])
        assert torch.equal(features[:10].cpu(), plain[:10])
        rows = features.statistics()
        assert rows.device_rows + rows.host_rows + rows.disk_rows == 10_010


def test_the_device_draws_what_the_cpu_draws():
    graph = unified.Graph(torch.randint(5000, (2, 100_000), generator=torch.Generator().manual_seed(0)), 5000)
    for fanouts, replace in (([10, 5, 5], False), ([7, 3], True), ([-1, 2], False)):
        samples = [
            unified.NeighborSampler(graph, fanouts, replace=replace, device=one).sample(torch.arange(300), number=3)
            for one in ("cpu", DEVICE)
        ]
        for name in ("nodes", "rows", "cols", "edges", "seeds"):
            one, other = (getattr(sample, name) for sample in samples)
            assert other.device.type == "cuda" and torch.equal(one, other.cpu()), name


def test_the_loader_runs_beside_the_step(tmp_path):
    graph = unified.Graph(torch.randint(5000, (2, 100_000), generator=torch.Generator().manual_seed(0)), 5000)
    plain = torch.randn(5000, 256)
    features = {
        "tiered": unified.TieredFeatures(plain, device=DEVICE, device_budget="1MiB", host="4MiB", disk=tmp_path),
        "wrapped": unified.wrap(plain),
    }
    loader = unified.Loader(
        unified.NeighborSampler(graph, [5, 5], device=DEVICE), features, torch.arange(2000), batch_size=100, ahead=3
    )
    weight = torch.randn(256, 256, device=DEVICE)
    for batch in loader:
        for _ in range(20):
            weight = weight @ weight / weight.norm()
        expected = plain[batch.nodes.cpu()]
        for rows in batch.x.values():
            assert torch.equal(rows.cpu(), expected)
