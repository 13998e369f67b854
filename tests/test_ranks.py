"""What ranks tell each other, and how each learns that another has failed, is lost, or disagrees."""

import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from penstock import ranks
from penstock.errors import RankError
from ranks import run_in_ranks
from waiting import eventually


def _exchange(rank):
    group = ranks.RankGroup(distributed.group.WORLD)
    assert (group.rank, group.size) == (rank, 3) == (ranks.rank_in(distributed.group.WORLD)[0], 3)
    assert group.exchange({"rank": rank}) == [{"rank": number} for number in range(3)]
    assert group.exchange(rank * "x") == ["", "x", "xx"]
    again = ranks.RankGroup(distributed.group.WORLD)  # its messages are apart from those of the first
    assert again.exchange(rank + 10) == [10, 11, 12]
    some = distributed.new_group([0, 2])
    if rank != 1:
        assert ranks.RankGroup(some).exchange(rank) == [0, 2]
    else:
        with pytest.raises(TypeError, match="`group` must be a .*ProcessGroup"):
            ranks.RankGroup(some)


def test_all_ranks_get_all_messages_in_their_order(tmp_path):
    run_in_ranks(_exchange, directory=tmp_path, num_ranks=3)


def _disagree(rank):
    group = ranks.RankGroup(distributed.group.WORLD)
    group.agree("colours", "red")
    group.agree("among two", rank == 1, [0, 2])
    with pytest.raises(RankError, match=r"agree on `host`: rank 0 has 5, and rank 2 has 6") as caught:
        group.agree("`host`", 5 if rank < 2 else 6)
    assert caught.value.ranks == (2,)
    with pytest.raises(RankError) as caught:
        group.agree("among two", rank, [1, 2])
    assert caught.value.ranks == (2,)


def test_whoever_disagrees_is_named(tmp_path):
    run_in_ranks(_disagree, directory=tmp_path, num_ranks=3)


def _divide_by(group, number):
    with group.all_or_none():
        return group.exchange(1 // number)


def _fail(rank):
    group = ranks.RankGroup(distributed.group.WORLD)
    with pytest.raises(ZeroDivisionError if rank == 1 else RankError) as caught:
        _divide_by(group, 0 if rank == 1 else 1)
    if rank != 1:
        assert caught.value.ranks == (1,)
        assert str(caught.value) == "rank 1 has failed: ZeroDivisionError: integer division or modulo by zero"


def test_a_failure_is_raised_on_every_rank(tmp_path):
    run_in_ranks(_fail, directory=tmp_path, num_ranks=3)


def _stay_away(rank, folder):
    group = ranks.RankGroup(distributed.group.WORLD, patience_s=1.0)
    if rank == 1:
        ranks._BEAT_S = 0.0
        eventually(lambda: group.beat() or (folder / "waited").exists())  # alive, and slower than the others' patience
        group.exchange("late")
        return

    def less_than_patience_for_each_beat():
        now_s = 0.9 * int(group._text("beat/1") or 0)
        if now_s > 5 * group.patience_s:
            (folder / "waited").touch()
        return now_s

    clock, ranks.time = time, SimpleNamespace(monotonic=less_than_patience_for_each_beat, sleep=time.sleep)
    assert len(group.exchange("early")) == 2
    ranks.time, start_s = clock, time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 gave no sign of life for 1\.0 s") as caught, group.all_or_none():
        group.exchange("nobody answers")
    assert caught.value.ranks == (1,) and time.monotonic() - start_s >= 1.0


def test_a_slow_rank_is_waited_for_and_a_silent_one_named(tmp_path):
    run_in_ranks(_stay_away, tmp_path, directory=tmp_path)


def _connect_without_one(rank):
    group = ranks.RankGroup(distributed.group.WORLD, patience_s=1.0)
    if rank == 1:
        return
    with pytest.raises(RankError, match=r"rank 1 gave no sign of life") as caught, group.all_or_none():
        group.connect()
    assert caught.value.ranks == (1,)


def test_who_does_not_connect_is_named(tmp_path):
    run_in_ranks(_connect_without_one, directory=tmp_path, num_ranks=3)


def _send(rank):
    group = ranks.RankGroup(distributed.group.WORLD, patience_s=30.0)
    connections = group.connect()
    message = torch.full((3,), float(rank))
    work = connections.send([message], 1 - rank, 5)
    connections.recv([message.clone()], 1 - rank, 5).wait()
    work.wait()
    group.exchange("done")


def test_connected_ranks_send_messages(tmp_path):
    run_in_ranks(_send, directory=tmp_path)


def _cannot_connect(rank):
    group = ranks.RankGroup(distributed.group.WORLD, patience_s=300.0)

    def refuse(*_):
        raise RuntimeError("no route to host\nlong trace")

    distributed.distributed_c10d.ProcessGroupGloo = refuse
    with pytest.raises(RankError, match=r"cannot connect with each other .* no route to host\. .*GLOO_SOCKET_IFNAME"):
        group.connect()


def test_ranks_that_are_there_and_cannot_connect_say_what_to_do(tmp_path):
    run_in_ranks(_cannot_connect, directory=tmp_path)


def _tells(rank):
    group = ranks.RankGroup(distributed.group.WORLD, patience_s=300.0)
    if rank == 0:
        assert group.failure_of(1, 0.0) is None
        group.exchange("looked")
        assert group.failure_of(1, 300.0) == ("rank 7 is gone", (7,))
    else:
        group.exchange("looked")
        group.tell_failure(RankError("rank 7 is gone", ranks=(7,)))


def test_a_rank_can_tell_why_it_will_be_missed(tmp_path):
    run_in_ranks(_tells, directory=tmp_path)


def test_a_group_must_exist():
    with pytest.raises(ValueError, match="init_process_group"):
        ranks.RankGroup(None)


def test_errors_of_ranks_can_be_pickled():
    error = pickle.loads(pickle.dumps(RankError("rank 3 is gone", ranks=(3,))))
    assert str(error) == "rank 3 is gone" and error.ranks == (3,)


class _Gone:
    def check(self, *_):
        raise RuntimeError("Connection reset by peer\nlong trace")

    set = check


def test_a_store_that_is_gone_is_said_so():
    group = object.__new__(ranks.RankGroup)
    group._store, group._prefix, group._num_messages, group.rank, group.size = _Gone(), "p", 0, 0, 2
    with pytest.raises(RankError, match=r"cannot be reached.*Connection reset by peer$"):
        group._text("key")
    with pytest.raises(RankError, match="cannot be reached"):
        group._set("key", "text")


def test_processes_of_one_machine_have_its_name():
    assert ranks.machine_name() == ranks.machine_name() and "pid:" in ranks.machine_name()


def test_processes_can_take_themselves_for_several_machines(monkeypatch):
    name = ranks.machine_name()
    monkeypatch.setenv("PENSTOCK_MACHINE", "1")
    assert ranks.machine_name() != name
