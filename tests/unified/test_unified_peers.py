"""Tables that several machines hold together: the same rows as from one, planned by scores, and no rank that hangs.

Processes take themselves for machines by their `$PENSTOCK_MACHINE`.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import distributed, nn

from penstock import unified
from penstock.errors import BudgetError, RankError, TierReadError
from penstock.report._of_unified import part_of_features
from penstock.tiers import Budget
from penstock.unified._peer_link import link_bytes_for, num_buffers_for, part_rows_for, partners
from penstock.unified._peer_rows import PeerRows
from ranks import run_in_ranks, start_ranks
from waiting import PATIENCE_S, eventually

NUM_ROWS, WIDTH = 60_000, 128
ROW_BYTES = 4 * WIDTH
HOST_BYTES = 20 * 2**20
IN_FLIGHT = 256 * 1024
SECONDS = (1e-6, 4e-5)
"""Seconds of a row from a peer, and from a disk."""


def values(rows):
    return (rows[:, None] * 3 + torch.arange(WIDTH)).float()


def scores():
    return 1 / (1 + torch.arange(NUM_ROWS).flip(0).double())


def some_rows(seed, count=3000):
    return torch.randint(NUM_ROWS, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files with all rows, and with the parts of two and of three machines."""
    folder = tmp_path_factory.mktemp("peers")
    unified.write_features(folder / "rows.features", values(torch.arange(NUM_ROWS)), progress=False)
    for number, part in enumerate(torch.arange(NUM_ROWS).split([40_000, 20_000])):
        unified.write_features(folder / f"2-{number}.features", values(part), progress=False)
    for number, part in enumerate(torch.arange(NUM_ROWS).split([10_000, 49_999, 1])):
        unified.write_features(folder / f"3-{number}.features", values(part), progress=False)
    return folder


def host_for(row_bytes, num_here, num_machines, num_held):
    """A budget of a machine of which so many rows' bytes are left for rows, in a table of NUM_ROWS."""
    with pytest.raises(BudgetError) as caught:
        unified.TieredFeatures(torch.empty(NUM_ROWS, row_bytes // 4), host=1, disk="/tmp", in_flight=0)
    own = 2 * (int(str(caught.value).split("at least ")[1].split(",")[0]) - 4 * NUM_ROWS)
    askers = -(-2 // num_here) if num_machines == 2 else num_machines
    fixed = 4 * NUM_ROWS + num_here * (own + link_bytes_for(row_bytes, num_machines, askers, NUM_ROWS)) + IN_FLIGHT
    return int((fixed + num_held * (row_bytes + 4)) * 16 / 15)


def opened(folder, rank, machines, peers, num_held=10_000, **options):
    """The table, in a process that takes itself for a machine: ``machines[rank]`` is its number."""
    machine = machines[rank]
    PeerRows.row_seconds = lambda *_: SECONDS  # plans do not depend on what else this machine does
    os.environ["PENSTOCK_MACHINE"] = str(machine)
    path = folder / ("rows.features" if peers != "parts" else f"{max(machines) + 1}-{machine}.features")
    most_here = max(machines.count(number) for number in machines)
    host = host_for(ROW_BYTES, most_here, max(machines) + 1, num_held)
    options = {
        "host": host, "group": distributed.group.WORLD, "patience_s": 60, "scores": scores(), "in_flight": IN_FLIGHT,
        **options,
    }  # fmt: skip
    return unified.TieredFeatures(path, peers=peers, **options)


def gathered(value):
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _same_rows(rank, folder, machines, peers):
    with opened(folder, rank, machines, peers) as features:
        assert features.shape == (NUM_ROWS, WIDTH)
        for number in range(6):
            rows = some_rows(number if number % 2 else 100 * rank + number)
            assert torch.equal(features[rows], values(rows))
        assert torch.equal(features[torch.arange(0)], values(torch.arange(0)))
        assert torch.equal(features[:].sum(0), values(torch.arange(NUM_ROWS)).sum(0))
        with pytest.raises(IndexError):
            features[torch.tensor([NUM_ROWS])]
        counts, plan = features.statistics(), features.plan
        read = (
            counts.host_rows + counts.shared_rows + counts.cached_rows + counts.disk_rows + counts.peer_rows
            + counts.peer_disk_rows
        )  # fmt: skip
        assert read == 6 * 3000 + NUM_ROWS and counts.peer_rows > 0
        assert (counts.peer_disk_rows > 0) == (plan.num_peer_disk_rows > 0)
        assert any(gathered(plan.num_peer_disk_rows)) == (peers == "parts")
        rows_of_all = len(plan.host_rows) + plan.num_peer_rows + plan.num_disk_rows + plan.num_peer_disk_rows
        assert rows_of_all == NUM_ROWS and plan.num_peer_rows > 0
        elsewhere = plan.num_peer_rows + plan.num_peer_disk_rows
        assert repr(features).endswith(f"; on other machines: {elsewhere:,})")
        section = part_of_features(features).section
        served = {line[0]: line[5] for line in section.tables[0].lines}
        assert served["memory of peers"] == f"{counts.peer_rows:,}"
        assert served.get("disks of peers", "0") == f"{counts.peer_disk_rows:,}"
        assert sum(int(count.replace(",", "")) for count in served.values()) == read
        assert "peers" in plan.explain() and f"{max(machines) + 1} machines" in plan.explain()
        held = gathered([machines[rank], plan.num_replicated_rows, plan.host_rows.tolist()])
        own = {machine: set(rows) for machine, _, rows in held}
        replicated = set.intersection(*own.values())
        assert {number for _, number, _ in held} == {len(replicated)}
        once = [rows - replicated for rows in own.values()]
        assert sum(map(len, once)) == len(set.union(*once)), "a row that is not in all memories is in one"
        hottest = set(range(NUM_ROWS - len(replicated) - sum(map(len, once)), NUM_ROWS))
        assert set.union(*own.values()) == hottest


@pytest.mark.parametrize("peers", ["copies", "parts"])
@pytest.mark.parametrize("machines", [[0, 1], [0, 1, 2], [0, 0, 1, 1], [0, 1, 0]], ids=str)
def test_all_machines_read_the_rows_that_one_would(tmp_path, folder, machines, peers):
    run_in_ranks(_same_rows, folder, machines, peers, directory=tmp_path, num_ranks=len(machines))


def _shares(rank, folder, peers):
    """Accesses as the scores say: each tier serves the share that the plan expects."""
    with opened(folder, rank, [0, 1], peers, num_held=15_000) as features:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(40):
            rows = torch.multinomial(scores(), 500, replacement=True, generator=generator)
            assert torch.equal(features[rows], values(rows))
        counts, plan = features.statistics(), features.plan
        total = 40 * 500
        assert counts.host_rows / total == pytest.approx(plan.host_share, abs=0.02)
        # rows that were read before are kept a while, wherever they came from
        elsewhere = (
            counts.peer_rows + counts.peer_disk_rows + counts.shared_rows + counts.disk_rows + counts.cached_rows
        )
        assert elsewhere / total == pytest.approx(1 - plan.host_share, abs=0.02)
        if plan.peer_share:
            assert 0 < counts.peer_rows / total <= plan.peer_share + 0.02


@pytest.mark.parametrize("peers", ["copies", "parts"])
def test_shares_are_as_planned(tmp_path, folder, peers):
    run_in_ranks(_shares, folder, peers, directory=tmp_path)


def _all_in_memory(rank, folder, peers):
    for host in (None, 4 * NUM_ROWS * ROW_BYTES):
        with opened(folder, rank, [0, 1], peers, host=host) as features:
            assert len(features.plan.host_rows) == NUM_ROWS == features.plan.num_replicated_rows
            assert torch.equal(features[some_rows(rank)], values(some_rows(rank)))
            assert features.statistics().peer_rows == 0


@pytest.mark.parametrize("peers", ["copies", "parts"])
def test_machines_with_memory_for_all_ask_nobody(tmp_path, folder, peers):
    run_in_ranks(_all_in_memory, folder, peers, directory=tmp_path)


def _one_machine(rank, folder):
    with opened(folder, rank, [0, 0], "copies", host=HOST_BYTES) as features:
        assert features.plan.peers is None and torch.equal(features[some_rows(rank)], values(some_rows(rank)))


def test_ranks_of_one_machine_share_memory_as_without_peers(tmp_path, folder):
    run_in_ranks(_one_machine, folder, directory=tmp_path)


def _widened(rank, folder):
    for stored, scale in (
        (torch.float16, None),
        (torch.int8, torch.rand(6, generator=torch.Generator().manual_seed(0))),
    ):
        table = torch.randint(-100, 100, (9000, 2, 3), generator=torch.Generator().manual_seed(0)).to(stored)
        os.environ["PENSTOCK_MACHINE"] = str(rank)
        path = folder / f"{stored}-{rank}.features"
        unified.write_features(path, table, progress=False)
        with unified.TieredFeatures(
            path, host=8 * 2**20, in_flight=0, dtype=torch.float32, scale=scale, group=distributed.group.WORLD,
            peers="copies",
        ) as features:  # fmt: skip
            assert len(features.plan.host_rows) == 9000  # rows of 12 bytes: these fit
        big = table.repeat(1, 1, 400)
        unified.write_features(path, big, progress=False)
        wide = None if scale is None else scale.view(2, 3).repeat(1, 400).reshape(-1)
        with unified.TieredFeatures(
            path, host=14 * 2**20, in_flight=0, dtype=torch.float32, scale=wide, group=distributed.group.WORLD,
            peers="copies",
        ) as features:  # fmt: skip
            rows = torch.randint(9000, (700,), generator=torch.Generator().manual_seed(rank))
            expected = big[rows].float()
            if wide is not None:
                expected = expected * wide.view(2, 1200)
            assert torch.equal(features[rows], expected)
            assert features.statistics().peer_rows > 0


def test_rows_are_widened_where_they_are_read(tmp_path, tmp_path_factory):
    run_in_ranks(_widened, tmp_path_factory.mktemp("widened"), directory=tmp_path)


def _large_rows(rank, folder):
    os.environ["PENSTOCK_MACHINE"] = str(rank)
    width, num_rows = 100_000, 400
    path = folder / f"large-{rank}.features"
    unified.write_features(
        path, (torch.arange(start, start + 100)[:, None] + torch.arange(width).float() for start in range(0, 400, 100)),
        progress=False,
    )  # fmt: skip
    with unified.TieredFeatures(
        path, host=100 * 2**20, in_flight=0, group=distributed.group.WORLD, peers="copies"
    ) as features:
        assert len(features.plan.host_rows) < num_rows
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(rank))[:150]
        assert torch.equal(features[rows], rows[:, None] + torch.arange(width).float())
        failures = []

        def read(seed):
            rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:60]
            if not torch.equal(features[rows], rows[:, None] + torch.arange(width).float()):
                failures.append(seed)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]  # with fewer buffers than parts
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_several_threads_read_more_than_the_buffers_hold(tmp_path, tmp_path_factory):
    run_in_ranks(_large_rows, tmp_path_factory.mktemp("large"), directory=tmp_path)


def _charges(rank, folder):
    budget = Budget(host=HOST_BYTES)
    features = opened(folder, rank, [0, 1], "copies", budget=budget, host=HOST_BYTES)
    assert 0.9 * features.host_bytes <= budget.held_bytes("host") <= HOST_BYTES
    assert features.host_bytes <= HOST_BYTES
    features.close()
    assert budget.held_bytes("host") == 0


def test_the_account_is_charged_for_buffers_too(tmp_path, folder):
    run_in_ranks(_charges, folder, directory=tmp_path)


def _disagrees(rank, folder, what):
    peers = "parts" if what == "peers" and rank else "copies"
    other = {"scores": scores().flip(0) if what == "scores" else None} if rank and "scores" in what else {}
    if what == "content" and rank:
        changed = folder / "changed"
        changed.mkdir(exist_ok=True)
        table = values(torch.arange(NUM_ROWS))
        table[-1, -1] = 0  # the last page is always looked at
        unified.write_features(changed / "rows.features", table, progress=False)
        folder = changed
    with pytest.raises(RankError) as caught:
        opened(folder, rank, [0, 1], peers, **other)
    assert caught.value.ranks == (1,), what
    assert str(caught.value).startswith(f"ranks must agree on {MESSAGES[what]}"), str(caught.value)


MESSAGES = {"peers": "`peers`", "scores": "`scores`", "no scores": "`scores`", "content": "the file's content"}


@pytest.mark.parametrize("what", MESSAGES)
def test_machines_that_disagree_are_named(tmp_path, folder, what):
    run_in_ranks(_disagrees, folder, what, directory=tmp_path)


def test_peers_need_a_group_and_a_known_name(folder):
    with pytest.raises(ValueError, match=r"`peers` goes with a `group`.*peers='copies'"):
        unified.TieredFeatures(folder / "rows.features", peers="copies")
    with pytest.raises(ValueError, match="`peers` must be 'copies', 'parts' or None"):
        unified.TieredFeatures(folder / "rows.features", peers="both")


def _read_on(features):
    for number in range(10**6):
        rows = some_rows(number)
        assert torch.equal(features[rows], values(rows))


def _dies(rank, folder, peers, how, folder_of_times):
    # only one that is stopped must be waited for; on a busy machine, others may be silent for seconds
    features = opened(folder, rank, [0, 1, 2], peers, patience_s=15 if how == "stop" else 10_000, num_held=5000)
    distributed.barrier()
    if rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    with pytest.raises(RankError) as caught:
        _read_on(features)
    assert caught.value.ranks == (1,) and "rank 1" in str(caught.value)
    with pytest.raises(RankError):
        features[:]
    features.close()  # waits for nobody
    (folder_of_times / str(rank)).write_text("")
    os._exit(0)


@pytest.mark.parametrize("peers", ["copies", "parts"])
@pytest.mark.parametrize("how", ["kill", "exit", "stop"])
def test_a_rank_that_dies_or_hangs_is_named(tmp_path, folder, peers, how):
    done = tmp_path / "done"
    done.mkdir()
    ranks = start_ranks(_dies, folder, peers, how, done, directory=tmp_path, num_ranks=3)
    try:
        for number in (0, 2):
            ranks.processes[number].join(PATIENCE_S)
        assert sorted(path.name for path in done.iterdir()) == ["0", "2"]
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def _failing_disk(rank, folder):
    own = folder / f"2-{rank}.features"
    features = opened(folder, rank, [0, 1], "parts", num_held=2000)
    held = features.plan.host_rows.long()
    distributed.barrier()
    if rank == 1:
        os.truncate(own, 8192)
    distributed.barrier()
    if rank == 0:
        own_disk = torch.arange(5000)
        for _ in range(2):
            with pytest.raises(RankError, match="rank 1 could not give rows to this rank: TierReadError") as caught:
                features[torch.arange(40_000, 50_000)]
            assert caught.value.ranks == (1,)
            assert torch.equal(features[own_disk], values(own_disk)), "all others can still be read"
    else:
        with pytest.raises(TierReadError):
            features[torch.arange(40_000, 50_000)]
        rows = torch.arange(5000)
        assert torch.equal(features[rows], values(rows))
    assert torch.equal(features[held], values(held))
    distributed.barrier()
    features.close()


def test_a_disk_that_fails_elsewhere_is_an_error_that_names_the_rank(tmp_path, folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("failing")
    for number in (0, 1):
        (copy / f"2-{number}.features").write_bytes((folder / f"2-{number}.features").read_bytes())
    run_in_ranks(_failing_disk, copy, directory=tmp_path)


def _own_disk_fails(rank, folder):
    """What is asked of others arrives before the error, so that later answers are not taken for it."""
    own = folder / f"own-{rank}.features"
    os.environ["PENSTOCK_MACHINE"] = str(rank)
    unified.write_features(own, values(torch.arange(NUM_ROWS)), progress=False)
    features = unified.TieredFeatures(
        own, host=host_for(ROW_BYTES, 1, 2, 3000), in_flight=IN_FLIGHT, group=distributed.group.WORLD, peers="copies",
    )  # fmt: skip
    there = torch.arange(NUM_ROWS)
    mask = torch.ones(NUM_ROWS, dtype=torch.bool)
    mask[features.plan.host_rows.long()] = False
    held = gathered(features.plan.host_rows.tolist())
    there = torch.tensor(sorted(set(held[1 - rank]) - set(held[rank])))
    distributed.barrier()
    os.truncate(own, 8192)
    for _ in range(5):
        with pytest.raises(TierReadError):
            features[torch.cat([there, torch.arange(NUM_ROWS - 3000, NUM_ROWS)])]
        assert torch.equal(features[there], values(there))
    distributed.barrier()
    features.close()


def test_an_own_disk_that_fails_spoils_no_later_answer(tmp_path, tmp_path_factory):
    run_in_ranks(_own_disk_fails, tmp_path_factory.mktemp("own"), directory=tmp_path)


def _leaves_early(rank, folder):
    """A rank that is done still gives its rows, until the others are done too."""
    budget = Budget(host=HOST_BYTES)
    features = opened(folder, rank, [0, 1], "copies", budget=budget, host=HOST_BYTES)
    closing = threading.Thread(target=features.close)
    if rank == 0:
        closing.start()
        eventually(lambda: features._store._readers._is_closed)
        with pytest.raises(ValueError, match="closed"):
            features[0]
        assert closing.is_alive() and budget.held_bytes("host") > 0
    distributed.barrier()
    if rank == 1:
        assert torch.equal(features[:], values(torch.arange(NUM_ROWS)))
        assert features.statistics().peer_rows > 0
        closing.start()
    closing.join()
    assert budget.held_bytes("host") == 0
    features.close()


def test_a_rank_that_closes_first_waits_for_the_others(tmp_path, folder):
    run_in_ranks(_leaves_early, folder, directory=tmp_path)


def _fails(rank, folder):
    features = opened(folder, rank, [0, 1], "copies", patience_s=10_000)
    if rank == 0:
        with pytest.raises(KeyError), features:  # waits for nobody, or for ever
            raise KeyError("of the user")
    distributed.barrier()
    if rank == 1:
        assert torch.equal(features[:], values(torch.arange(NUM_ROWS)))
        features.close()
    distributed.barrier()


def test_an_error_of_the_user_waits_for_nobody(tmp_path, folder):
    run_in_ranks(_fails, folder, directory=tmp_path)


def _gone(rank, folder):
    budget = Budget(host=HOST_BYTES)
    features = opened(folder, rank, [0, 1], "copies", budget=budget, host=HOST_BYTES)
    distributed.barrier()
    del features
    gc.collect()
    distributed.barrier()
    eventually(lambda: not budget.held_bytes("host"))
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("penstock answers")])


def test_a_table_that_nobody_has_any_more_gives_its_memory_back(tmp_path, folder):
    run_in_ranks(_gone, folder, directory=tmp_path)


def _forked(rank, folder):
    with opened(folder, rank, [0, 1], "copies") as features:
        child = os.fork()
        if not child:
            code = 1
            try:
                features[torch.arange(NUM_ROWS)]
            except ValueError as error:
                code = 0 if "forked process" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(features[some_rows(0)], values(some_rows(0)))


def test_forked_processes_are_told_that_they_cannot_ask(tmp_path, folder):
    run_in_ranks(_forked, folder, directory=tmp_path)


SCRIPT = """
import os, sys, torch
from torch import distributed
from penstock import unified
rank, store, path, host = int(sys.argv[1]), *sys.argv[2:]
os.environ["PENSTOCK_MACHINE"] = str(rank)
distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=rank, world_size=2)
sys.last_value = sys.last_exc = ValueError("shown long ago, as in a notebook")
features, other = (
    unified.TieredFeatures(path, host=int(host), group=distributed.group.WORLD, peers="copies", in_flight=0)
    for _ in range(2)
)
assert len(features[:]) == len(features) == len(other[:])
if rank == 1:
    import time
    time.sleep(1)
    features[:]
print("done")
"""


def test_scripts_that_close_nothing_end(tmp_path, folder):
    """The first to end answers the other's last questions."""
    command = [
        sys.executable, "-c", SCRIPT, *("0", str(tmp_path / "store"), str(folder / "rows.features"), str(HOST_BYTES)),
    ]  # fmt: skip
    processes = []
    for rank in ("0", "1"):
        command[3] = rank
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for process in processes:
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out.strip()) == (0, "done"), error


def _returns(rank, folder):
    """Read, or end, without closing anything."""
    features = opened(folder, rank, [0, 1], "copies")
    distributed.barrier()
    if rank == 1:
        time.sleep(2)
        assert torch.equal(features[:].sum(0), values(torch.arange(NUM_ROWS)).sum(0))


def _process(rank, folder, store):
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=rank, world_size=2)
    _returns(rank, folder)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_processes_of_multiprocessing_answer_before_they_end(tmp_path, folder, method):
    store = str(tmp_path / "store")
    torch.multiprocessing.start_processes(_process, (folder, store), nprocs=2, start_method=method)


def _trains(rank, folder, seeds):
    edges = torch.randint(NUM_ROWS, (2, 200_000), generator=torch.Generator().manual_seed(7))
    sampler = unified.NeighborSampler(unified.Graph(edges, num_nodes=NUM_ROWS), [3, 2])
    group = distributed.group.WORLD
    with opened(folder, rank, [0, 1], "parts") as features:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, 3))
        loader = unified.Loader(sampler, features, seeds, batch_size=64, group=group)
        alone = unified.Loader(sampler, values(torch.arange(NUM_ROWS)), seeds, batch_size=64, ahead=0)
        expected = list(alone)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for step, batch in enumerate(loader):
            same = expected[2 * step + rank]
            assert torch.equal(batch.nodes, same.nodes) and torch.equal(batch.x, same.x)
            optimizer.zero_grad()
            model(batch.x).square().mean().backward()
            optimizer.step()
        assert step == len(loader) - 1 == len(expected) // 2 - 1


def test_mini_batches_are_those_of_one_process(tmp_path, folder):
    run_in_ranks(_trains, folder, torch.arange(0, NUM_ROWS, 29)[:1024], directory=tmp_path)


def _all_threads_fail(rank, folder):
    features = opened(folder, rank, [0, 1], "copies", patience_s=5)
    distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failures = []

    def read():
        try:
            _read_on(features)
        except RankError as error:
            failures.append(error.ranks)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    features.close()
    os._exit(0 if failures == [(1,)] * 4 else 1)


def test_all_threads_that_read_hear_of_a_failure(tmp_path, folder):
    """More of them than there are buffers for answers."""
    ranks = start_ranks(_all_threads_fail, folder, directory=tmp_path, num_ranks=2)
    for process in ranks.processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in ranks.processes] == [0, -signal.SIGKILL]


def read_and_be_interrupted(features):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    _read_on(features)


def _interrupted(rank, folder):
    real = PeerRows._answer
    PeerRows._answer = lambda *arguments: (time.sleep(0.3), real(*arguments))[1]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    with opened(folder, rank, [0, 1], "copies") as features:
        if rank == 0:
            for _ in range(6):  # more often than there are buffers
                with pytest.raises(KeyboardInterrupt):
                    read_and_be_interrupted(features)
            rows = some_rows(3)
            assert torch.equal(features[rows], values(rows))
        distributed.barrier()


def test_a_reader_can_be_interrupted_and_read_again(tmp_path, folder):
    run_in_ranks(_interrupted, folder, directory=tmp_path)


def _fails_before_it_connects(rank, folder):
    with pytest.raises(BudgetError if rank else RankError) as caught:  # at once, or never
        opened(folder, rank, [0, 1], "copies", patience_s=10_000, **({"host": "1MiB"} if rank else {}))
    if not rank:
        assert caught.value.ranks == (1,) and "BudgetError" in str(caught.value)


def test_a_failure_before_connecting_is_heard_at_once(tmp_path, folder):
    run_in_ranks(_fails_before_it_connects, folder, directory=tmp_path)


def _crossed(rank, folder):
    tables = [opened(folder, rank, [0, 1], "copies", patience_s=10_000) for _ in range(2)]
    for table in tables if rank else tables[::-1]:
        table.close()  # waits a few seconds, or for ever
    distributed.barrier()


def test_tables_may_be_closed_in_any_order(tmp_path, folder):
    run_in_ranks(_crossed, folder, directory=tmp_path)


def num_open():
    return len(os.listdir("/proc/self/fd"))


def _nothing_is_left(rank, folder):
    gc.disable()
    opened(folder, rank, [0, 1], "copies").close()  # what is made once
    before = None
    for _ in range(4):
        features = opened(folder, rank, [0, 1], "copies")
        assert torch.equal(features[some_rows(rank)], values(some_rows(rank)))
        features.close()
        eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")])
        distributed.barrier()
        before = num_open() if before is None else before
        eventually(lambda most=before + 2: num_open() <= most)
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_closed_tables_leave_no_threads_and_no_connections(tmp_path, folder):
    run_in_ranks(_nothing_is_left, folder, directory=tmp_path)


def _unequal(rank, folder):
    with opened(folder, rank, [0, 1], "copies", host=4 * NUM_ROWS * ROW_BYTES if rank else HOST_BYTES) as features:
        assert features.plan.num_peer_rows > 0
        assert torch.equal(features[:].sum(0), values(torch.arange(NUM_ROWS)).sum(0))
        assert features.host_bytes > len(features.plan.host_rows) * ROW_BYTES + 4 * NUM_ROWS


def test_the_machine_with_the_least_memory_sets_the_plan(tmp_path, folder):
    run_in_ranks(_unequal, folder, directory=tmp_path)


def test_each_rank_asks_one_rank_of_each_other_machine():
    machines = [[0, 3, 4], [1], [2, 5]]
    found = {rank: partners(machines, rank) for rank in range(6)}
    for rank, (machine, askers, asked) in found.items():
        assert rank in machines[machine] and set(asked) == {0, 1, 2} - {machine}
        assert all(other in machines[number] for number, other in asked.items())
        assert all(found[asker][2][machine] == rank for asker in askers)
        assert sorted(askers) == sorted(other for other in found if found[other][2].get(machine) == rank)


@pytest.mark.parametrize("num_machines", [2, 8, 64])
@pytest.mark.parametrize("row_bytes", [0, 4, 1024, 2**22])
def test_buffers_are_bounded(num_machines, row_bytes):
    num_rows = 10**9
    part_rows, num_buffers = (
        part_rows_for(row_bytes, num_machines, num_rows), num_buffers_for(row_bytes, num_machines, num_rows),
    )  # fmt: skip
    assert part_rows >= 1 and num_buffers >= 2
    assert part_rows * max(8, row_bytes) * num_buffers <= max(8 * 2**20, 2 * row_bytes)
    assert link_bytes_for(row_bytes, num_machines, 1, num_rows) > part_rows * row_bytes * num_buffers
    assert part_rows_for(row_bytes, num_machines, 5) <= 5 and link_bytes_for(4, num_machines, 1, 5) < 200_000
