"""Tables that several ranks hold together: the same rows as from one process, one copy in memory, and no hang."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from penstock import unified
from penstock.errors import BudgetError, FeatureFileError, RankError, TierReadError
from penstock.tiers import Budget
from penstock.unified import _library
from penstock.unified._share import share_host
from ranks import run_in_ranks, start_ranks
from waiting import PATIENCE_S, eventually

NUM_ROWS, WIDTH = 100_000, 32
TOTAL_BYTES = 4 * NUM_ROWS * WIDTH
HOST_BYTES = 11 * 2**20
"""A budget of which the buffers of three ranks leave a few rows, and those of two more."""


def values(rows):
    return (rows[:, None] * 3 + torch.arange(WIDTH)).float()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("together") / "rows.features"
    unified.write_features(file, values(torch.arange(NUM_ROWS)), progress=False)
    return file


def opened(path, rank, **options):
    options = {"host": HOST_BYTES, "group": distributed.group.WORLD, "patience_s": 60, **options}
    return unified.TieredFeatures(path, **options)


def some_rows(seed, count=3000):
    return torch.randint(NUM_ROWS, (count,), generator=torch.Generator().manual_seed(seed))


def shared_maps():
    """The inodes and sizes of this process's maps of memory without a name."""
    maps = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:penstock-rows" in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            maps[line.split()[4]] = end - begin
    return maps


def _same_rows(rank, path):
    scores = torch.arange(NUM_ROWS).flip(0).double() if rank == 1 else None  # who has scores says them
    with opened(path, rank, scores=scores) as features:
        maps = [None] * distributed.get_world_size()
        distributed.all_gather_object(maps, shared_maps())
        assert len(maps[0]) == 2 and all(other == maps[0] for other in maps)  # rows and the plan, mapped by all
        assert sum(maps[0].values()) <= features.host_bytes <= HOST_BYTES
        assert 0 < len(features.plan.host_rows) < NUM_ROWS and features.plan.host_rows[0] == 0
        unified.verify(
            unified.TierProblem(
                num_rows=NUM_ROWS, row_bytes=4 * WIDTH, device_bytes=0, host_bytes=HOST_BYTES,
                scores=torch.arange(NUM_ROWS).flip(0),
            ),
            features.plan,
        )  # fmt: skip
        for number in range(8):
            rows = some_rows(number if number % 2 else 100 * rank + number)
            assert torch.equal(features[rows], values(rows))
        with pytest.raises(IndexError):
            features[torch.tensor([NUM_ROWS])]
        counts = features.statistics()
        read = counts.host_rows + counts.shared_rows + counts.cached_rows + counts.disk_rows
        assert read == 8 * 3000 and counts.host_rows > 0
        distributed.barrier()
    assert len(shared_maps()) == 1 and features.plan.host_rows[0] == 0  # the plan can still be read
    del features
    assert not shared_maps()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_read_the_rows_of_one_copy(tmp_path, path, num_ranks):
    run_in_ranks(_same_rows, path, directory=tmp_path, num_ranks=num_ranks)


def _all_in_memory(rank, path):
    for host in (None, 2 * TOTAL_BYTES):
        with opened(path, rank, host=host) as features:
            assert len(shared_maps()) == 2 and features.plan.num_disk_rows == 0
            assert torch.equal(features[some_rows(rank)], values(some_rows(rank)))
        del features
    assert not shared_maps()


def test_tables_that_fit_are_in_memory_once(tmp_path, path):
    run_in_ranks(_all_in_memory, path, directory=tmp_path)


def _same_batch(rank, path):
    os.posix_fadvise(os.open(path, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
    with opened(path, rank) as features:
        for number in range(10):
            rows = some_rows(number, 300)
            features[rows]
            distributed.barrier()
        counts = features.statistics()
        both = [None, None]
        distributed.all_gather_object(both, (counts.shared_rows, counts.disk_rows, counts.cached_rows))
        if _library.library("sharing") is None or both[0][2]:
            return  # nothing compiled, or the system kept the file's pages
        cold = both[0][0] + both[0][1]
        assert cold == both[1][0] + both[1][1] > 500
        assert both[0][1] + both[1][1] <= 1.05 * cold  # one of the two has read each row


def test_a_cold_row_that_both_ranks_need_is_read_once(tmp_path, path):
    run_in_ranks(_same_batch, path, directory=tmp_path)


def _charges(rank, path):
    budget = Budget(host=HOST_BYTES)
    features = opened(path, rank, budget=budget)
    held = [None, None]
    distributed.all_gather_object(held, budget.held_bytes("host"))
    assert abs(held[0] - held[1]) <= 8192 and 0.9 * features.host_bytes < sum(held) <= HOST_BYTES
    features.close()
    assert budget.held_bytes("host") == 0


def _too_small_an_account(rank, path):
    budget = Budget(host=HOST_BYTES if rank else "2MiB")
    with pytest.raises(RankError if rank else BudgetError):
        opened(path, rank, budget=budget, host=HOST_BYTES)
    assert budget.held_bytes("host") == 0 and not shared_maps()


def test_an_account_that_is_too_small_fails_on_all_ranks(tmp_path, path):
    run_in_ranks(_too_small_an_account, path, directory=tmp_path)


def test_each_rank_is_charged_for_its_part(tmp_path, path):
    run_in_ranks(_charges, path, directory=tmp_path)


def _widened(rank, folder):
    table = torch.randint(-100, 100, (5000, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    if not rank:
        unified.write_features(Path(folder) / "bytes", table, progress=False)
    distributed.barrier()
    with opened(Path(folder) / "bytes", rank, host="10MiB", scale=0.5) as features:
        assert torch.equal(features[:], table.float() * 0.5)
    with opened(Path(folder) / "bytes", rank, host="10MiB") as features:
        assert torch.equal(features[:], table)


def test_rows_are_widened(tmp_path):
    run_in_ranks(_widened, str(tmp_path), directory=tmp_path)


def _disagreement(rank, path, other):
    with pytest.raises(RankError, match=r"agree on `host`: rank 0 has \d+, and rank 1 has \d+"):
        opened(path, rank, host=HOST_BYTES + rank)
    with pytest.raises(RankError, match="agree on the file"):
        opened(other if rank else path, rank)
    with pytest.raises(RankError, match="agree on `verify`"):
        opened(path, rank, verify=rank == 1)
    with pytest.raises(RankError, match="agree on `scores`"):
        opened(path, rank, scores=torch.ones(NUM_ROWS) + rank)
    with pytest.raises(FileNotFoundError if rank else RankError, match="nowhere") as caught:
        opened("/nowhere" if rank else path, rank)
    if not rank:
        assert caught.value.ranks == (1,) and "rank 1 has failed: FileNotFoundError" in str(caught.value)
    with pytest.raises(BudgetError, match="`host` must be at least"):
        opened(path, rank, host="1MiB")
    with pytest.raises(RankError if rank else ValueError, match="scores"):
        opened(path, rank, scores=None if rank else torch.ones(3))
    with pytest.raises(ValueError, match="write_features"):
        opened(torch.ones(3, 4), rank)
    with opened(path, rank) as features:  # and after all this it works
        assert torch.equal(features[some_rows(1)], values(some_rows(1)))


def test_ranks_that_disagree_are_named_on_all(tmp_path, path):
    other = tmp_path / "other.features"
    other.write_bytes(path.read_bytes())
    run_in_ranks(_disagreement, path, other, directory=tmp_path)


def _no_memory(rank, path):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    if not rank:
        os.posix_fallocate = refuse
    expected = pytest.raises(MemoryError if not rank else RankError, match=r"cannot reserve .* of shared memory")
    with expected:
        opened(path, rank)
    assert not shared_maps()


def test_shared_memory_that_is_exhausted_is_said_on_all_ranks(tmp_path, path):
    run_in_ranks(_no_memory, path, directory=tmp_path)


def _damaged(rank, file):
    with pytest.raises(RankError if rank else FeatureFileError, match="differ from what was written"):
        opened(file, rank, verify=True)


def test_a_damaged_file_is_said_on_all_ranks(tmp_path, path):
    content = bytearray(path.read_bytes())
    content[-5000] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    run_in_ranks(_damaged, tmp_path / "damaged", directory=tmp_path)


def _read_and_wait(rank, path, folder):
    features = opened(path, rank)
    folder = Path(folder)
    (folder / f"ready-{rank}").touch()
    if rank == 1:
        while True:  # until it is killed, somewhere in here
            features[torch.randint(NUM_ROWS, (2000,))]
    while not (folder / "killed").exists():
        features[torch.randint(NUM_ROWS, (2000,))]
    for seed in range(20):
        assert torch.equal(features[some_rows(seed)], values(some_rows(seed)))
    (folder / "inode").write_text(",".join(shared_maps()))
    os._exit(0)


@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_rank_takes_nothing_with_it(tmp_path, path, attempt):
    processes = start_ranks(_read_and_wait, path, str(tmp_path), directory=tmp_path)

    def are_ready():
        assert all(process.is_alive() for process in processes.processes)
        return all((tmp_path / f"ready-{rank}").exists() for rank in range(2))

    eventually(are_ready)
    time.sleep(0.02 * attempt)
    os.kill(processes.pids()[1], signal.SIGKILL)
    (tmp_path / "killed").touch()
    processes.processes[0].join(PATIENCE_S)
    assert processes.processes[0].exitcode == 0
    inode = (tmp_path / "inode").read_text()
    processes.processes[1].join()
    assert len(inode.split(",")) == 2 and not any(number in all_maps() for number in inode.split(","))


def all_maps():
    text = ""
    for process in Path("/proc").glob("[0-9]*/maps"):
        try:
            text += "".join(line for line in process.read_text().splitlines() if "memfd:penstock-rows" in line)
        except OSError:
            pass
    return text


def _silent(rank, path):
    if rank:
        return
    with pytest.raises(RankError, match="rank 1 gave no sign of life for 1.0 s"):
        opened(path, rank, patience_s=1.0)


def test_a_rank_that_does_not_come_is_named(tmp_path, path):
    run_in_ranks(_silent, path, directory=tmp_path)


def _broken_disk(rank, path):
    features = opened(path, rank)
    if rank:

        def fail(*_):
            raise TierReadError(tier="disk", file="rows", offset=0, size_bytes=4, reason="Input/output error")

        features._store.files.read = fail
        for seed in range(5):
            with pytest.raises(TierReadError):
                features[some_rows(seed)]
    else:
        for seed in range(5):
            assert torch.equal(features[some_rows(seed)], values(some_rows(seed)))
    distributed.barrier()


def test_a_disk_that_fails_on_one_rank_fails_there_only(tmp_path, path):
    run_in_ranks(_broken_disk, path, directory=tmp_path)


def _several_threads(rank, path):
    features, wrong = opened(path, rank), []

    def read(seed):
        for number in range(10):
            rows = some_rows(10 * seed + number)
            if not torch.equal(features[rows], values(rows)):
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(rank + number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_several_threads_of_several_ranks_read(tmp_path, path):
    run_in_ranks(_several_threads, path, directory=tmp_path)


def test_the_budget_of_a_machine_covers_the_buffers_of_all_ranks():
    divided = share_host(
        2**26, num_rows=10**6, row_bytes=512, device_bytes=0, in_flight=None, buffer_bytes=2**20, num_ranks=4
    )
    assert divided.own_bytes == 2**20 + 2**26 // 16 // 4 and divided.reads_bytes == 2**26 // 16
    assert divided.beside_bytes == 4 * 10**6 + 4 * divided.own_bytes + divided.reads_bytes
    assert divided.rows_bytes + divided.rows_bytes // 512 * 4 + divided.beside_bytes <= 2**26


@pytest.mark.parametrize("in_flight", [None, 0, 10**6])
@pytest.mark.parametrize("num_ranks", [1, 2, 7])
def test_the_smallest_budget_is_named(in_flight, num_ranks):
    def divided(host_bytes):
        return share_host(
            host_bytes, num_rows=10**6, row_bytes=512, device_bytes=0, in_flight=in_flight, buffer_bytes=2**20,
            num_ranks=num_ranks,
        )  # fmt: skip

    with pytest.raises(BudgetError, match="must be at least") as caught:
        divided(1000)
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert divided(least).beside_bytes <= least
    with pytest.raises(BudgetError):
        divided(least - 64)


def _epoch(rank, path, folder, num_ranks):
    features = opened(path, rank)
    edges = torch.randint(NUM_ROWS, (2, 200_000), generator=torch.Generator().manual_seed(0))
    sampler = unified.NeighborSampler(unified.Graph(edges, NUM_ROWS), [3, 2])
    loader = unified.Loader(
        sampler, features, torch.arange(1000), batch_size=64, labels=torch.arange(NUM_ROWS) % 5,
        group=distributed.group.WORLD,
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    kept, losses = [], []
    for batch in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.x[: len(batch.seeds)]), batch.y)
        loss.backward()
        optimizer.step()
        kept.append((batch.seeds, batch.nodes, batch.x))
        losses.append(loss.item())
    assert len(loader) == len(kept)
    torch.save((kept, losses), f"{folder}/{num_ranks}-{rank}.pt")
    if num_ranks == 2 and rank == 0:  # an epoch that is resumed draws the same
        again = unified.Loader(sampler, features, torch.arange(1000), batch_size=64, group=distributed.group.WORLD)
        for batch, (seeds, nodes, _) in zip(again, kept, strict=True):
            assert torch.equal(batch.seeds, seeds) and torch.equal(batch.nodes, nodes)


def test_ranks_train_on_the_mini_batches_of_one_process(tmp_path, path):
    for num_ranks in (1, 2):
        (tmp_path / str(num_ranks)).mkdir()
        run_in_ranks(_epoch, path, str(tmp_path), num_ranks, directory=tmp_path / str(num_ranks), num_ranks=num_ranks)
    (single, _), (even, even_losses), (odd, odd_losses) = (
        torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1")
    )
    assert len(single) == 16 and len(even) == len(odd) == 8
    assert (
        torch.cat([seeds for batches in (even, odd) for seeds, _, _ in batches]).sort().values.equal(torch.arange(1000))
    )
    for number, (seeds, nodes, rows) in enumerate(single[:14]):
        theirs = (odd if number % 2 else even)[number // 2]
        for one, other in zip((seeds, nodes, rows), theirs, strict=True):
            assert torch.equal(one, other)
    # one process that averages the gradients of each two mini-batches has the same losses
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for number in range(8):
        optimizer.zero_grad()
        for (seeds, _, rows), expected in ((even[number], even_losses), (odd[number], odd_losses)):
            loss = nn.functional.cross_entropy(model(rows[: len(seeds)]), seeds % 5)
            (loss / 2).backward()
            assert loss.item() == pytest.approx(expected[number], rel=1e-6)
        optimizer.step()


def _few_seeds(rank):
    edges = torch.randint(100, (2, 500), generator=torch.Generator().manual_seed(0))
    sampler = unified.NeighborSampler(unified.Graph(edges, 100), [2])
    features = torch.arange(100.0)[:, None]

    def loader(count, **options):
        return unified.Loader(
            sampler, features, torch.arange(count), batch_size=4, group=distributed.group.WORLD, **options
        )

    for count in (1, 2, 3, 13, 24, 25):
        batches = [batch.seeds.tolist() for batch in loader(count)]
        every = [None] * 3
        distributed.all_gather_object(every, batches)
        assert {len(theirs) for theirs in every} == {-(-count // 12)} == {len(loader(count))}
        assert all(seeds for theirs in every for seeds in theirs)
        drawn = [seed for theirs in every for seeds in theirs for seed in seeds]
        assert sorted(set(drawn)) == list(range(count)) and len(drawn) <= count + 2
        dropping = loader(count, drop_last=True)
        assert [len(batch.seeds) for batch in dropping] == [4] * (count // 12) == [4] * len(dropping)


def test_all_ranks_take_as_many_steps(tmp_path):
    run_in_ranks(_few_seeds, directory=tmp_path, num_ranks=3)


def _pyg(rank, path):
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from penstock.integrations import pyg_sampler

    features = opened(path, rank)
    edges = torch.randint(NUM_ROWS, (2, 300_000), generator=torch.Generator().manual_seed(0))
    data = Data(x=features, edge_index=edges)
    seeds = torch.arange(400)[rank::2]
    for num_workers in (0, 2):
        loader = NodeLoader(
            data, pyg_sampler(data, [3, 2]), input_nodes=seeds, batch_size=50, num_workers=num_workers,
            filter_per_worker=num_workers > 0, multiprocessing_context="fork" if num_workers else None,
        )  # fmt: skip
        read = [(batch.n_id, batch.x) for batch in loader]
        assert len(read) == 4 and all(torch.equal(rows, values(nodes)) for nodes, rows in read)


def test_loaders_of_pyg_read_shared_rows_in_their_workers_too(tmp_path, path):
    pytest.importorskip("torch_geometric")
    run_in_ranks(_pyg, path, directory=tmp_path)


def _other_types(rank, folder):
    from safetensors.torch import save_file

    folder = Path(folder)
    rows = torch.randint(-100, 100, (50_000, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    if not rank:
        unified.write_features(folder / "bytes", rows, progress=False)
        save_file({"a": rows.half(), "b": rows.half() + 1}, folder / "two.safetensors")
    distributed.barrier()
    for options in ({"scale": 0.5 + rank}, {"scale": 0.5} if rank else {}):
        with pytest.raises(RankError, match="agree on `key`, `dtype` and `scale`"):
            opened(folder / "bytes", rank, host="8MiB", **options)
    with pytest.raises(RankError, match="agree on `key`, `dtype` and `scale`"):
        opened(folder / "two.safetensors", rank, key="ab"[rank])
    with pytest.raises(RankError, match="agree on `key`, `dtype` and `scale`"):
        opened(folder / "two.safetensors", rank, key="a", dtype=torch.float32 if rank else None)


def test_ranks_must_read_rows_alike(tmp_path):
    run_in_ranks(_other_types, str(tmp_path), directory=tmp_path)


def _long_rows(rank, folder):
    rows = torch.randint(-100, 100, (400, 100_000), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    if not rank:
        unified.write_features(Path(folder) / "rows", rows, progress=False)
    distributed.barrier()
    with opened(Path(folder) / "rows", rank, host="32MiB", scale=1.0) as features:
        assert features._store.shared is None  # a sixteenth of the budget has no room for eight rows as they are read
        assert torch.equal(features[torch.arange(0, 400, 7)], rows[::7].float())


def test_rows_too_long_to_be_shared_are_read_by_each_rank(tmp_path):
    run_in_ranks(_long_rows, str(tmp_path), directory=tmp_path)
