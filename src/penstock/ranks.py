"""Messages between the processes of a ``torch.distributed`` group, beside their collectives.

Messages go through the key-value store that the group was made with, so that they need no port and no backend of their
own, and work in a thread beside the step. Who waits for a message knows whose it is: a rank that died, hangs or has
failed is named, which a collective cannot do.
"""

import datetime as dt
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import distributed

from penstock.arguments import checked
from penstock.errors import RankError
from penstock.units import format_duration

PATIENCE_S = 300.0
"""Seconds to wait for a rank that gives no sign of life."""
_BEAT_S = 1.0
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.05
_CONNECT_TURNS = 2
"""How many times its patience a rank tries to connect, before it looks who is missing."""
_counts: Counter[str] = Counter()
"""Number of `RankGroup` that were made of each group, by its name; the same in all of its processes.

A group that is made again has its name again, and may have the same store, with the messages of before.
"""


class RankGroup:
    """The processes of a group, as one of them sees the others.

    All ranks of the group make the same objects in the same order. ``patience_s``: after how many seconds without a
    sign of life a rank counts as lost.

    Raises ``ValueError`` without a group, or for a group that this process is not in.
    """

    @checked("penstock.ranks.RankGroup(torch.distributed.group.WORLD)", patience_s=0)
    def __init__(self, group: distributed.ProcessGroup | None, patience_s: float = PATIENCE_S):
        self._store = _store_of(group)
        assert group is not None
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.patience_s = patience_s
        _counts[group.group_name] += 1
        self._prefix = f"penstock/{_counts[group.group_name]}"
        self._num_messages = 0
        self._last_beat_s, self._num_beats = -_BEAT_S, 0

    def exchange(self, message: Any) -> list[Any]:  # any: JSON
        """Give a message (JSON) to all ranks, and return those of all ranks, in their order.

        Raises `RankError`, which names the rank, if a rank has failed, or gives no sign of life for ``patience_s``.
        """
        step = self._num_messages = self._num_messages + 1
        self._set(f"{step}/{self.rank}", json.dumps(message))
        return [json.loads(self._received(rank, step)) for rank in range(self.size)]

    def agree(self, what: str, value: Any, among: list[int] | None = None) -> None:
        """Raise `RankError`, which names the ranks, unless all ranks (or those in ``among``) say the same ``value``."""
        check_same(what, self.exchange(value), list(range(self.size)) if among is None else among)

    def beat(self) -> None:
        """Show that this rank is alive, at most once a second; long work calls this between two messages."""
        if time.monotonic() - self._last_beat_s >= _BEAT_S:
            self._num_beats, self._last_beat_s = self._num_beats + 1, time.monotonic()
            self._set(f"beat/{self.rank}", str(self._num_beats))

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Return a context; where this rank leaves it by an error, the others raise `RankError` with its text."""
        try:
            yield
        except BaseException as error:
            text = f"rank {self.rank} has failed: {type(error).__name__}: {error}"
            self.tell_failure(error if isinstance(error, RankError) else RankError(text, ranks=(self.rank,)))
            raise

    def tell_failure(self, error: RankError) -> None:
        """Let ranks that miss this one know what made it fail."""
        with suppress(RankError):  # that the store is gone is not the error to raise
            self._set(f"failed/{self.rank}", json.dumps([str(error), error.ranks]))

    def failure_of(self, rank: int, within_s: float) -> tuple[str, tuple[int, ...]] | None:
        """Return what made a rank fail and the ranks to blame, if it tells within so many seconds; else ``None``."""
        end_s = time.monotonic() + within_s
        while True:
            try:
                failure = self._text(f"failed/{rank}")
            except RankError:
                return None
            if failure is not None:
                message, ranks = json.loads(failure)
                return message, tuple(ranks)
            if time.monotonic() >= end_s:
                return None
            time.sleep(_LONGEST_POLL_S)

    def connect(self) -> Any:  # any: a ProcessGroupGloo, a name that builds without it lack
        """Return gloo connections between the same ranks, for messages of their own. All ranks make this call.

        They are closed when nobody refers to the object. ``torch.distributed.new_group`` would name a group by the
        number of groups that a rank has, which need not be the same on all of them. Raises `RankError`, which names the
        rank, if one has ended.
        """
        self.exchange("to connect")  # who has failed before is named here; gloo could not say it
        groups: list[Any] = []
        reason: list[str] = []

        def connect() -> None:
            names = distributed.distributed_c10d
            store = names.PrefixStore(f"{self._prefix}/gloo", self._store.clone())  # a wait holds a store's lock
            try:
                groups.append(
                    names.ProcessGroupGloo(store, self.rank, self.size, dt.timedelta(seconds=self.patience_s))
                )
            except RuntimeError as error:
                reason.append(str(error).splitlines()[0])

        thread = threading.Thread(target=connect, daemon=True, name="penstock connects")
        thread.start()
        # gloo tries again and again where a rank is missing
        end_s = time.monotonic() + _CONNECT_TURNS * self.patience_s
        while thread.is_alive() and time.monotonic() < end_s:
            thread.join(_LONGEST_POLL_S)
            self.beat()
        if thread.is_alive():
            reason.append(f"that took longer than {format_duration(_CONNECT_TURNS * self.patience_s)}")
        reasons = [text for text in self.exchange(reason[0] if reason else "") if text]
        if not groups or reasons:
            raise RankError(
                f"the ranks cannot connect with each other through gloo: {reasons[0]}. Each must reach the others' "
                "addresses; $GLOO_SOCKET_IFNAME chooses the network, such as eth0",
                ranks=(),
            )
        return groups[0]

    def _received(self, rank: int, step: int) -> str:
        """Return a rank's message, once it is there."""
        key, poll_s = f"{step}/{rank}", _SHORTEST_POLL_S
        beat, since_s = self._text(f"beat/{rank}"), time.monotonic()
        while True:
            text = self._text(key)
            if text is not None:
                return text
            failure = self.failure_of(rank, 0)
            if failure is not None:
                raise RankError(failure[0], ranks=failure[1])
            now = self._text(f"beat/{rank}")
            if now != beat:
                beat, since_s = now, time.monotonic()
            if time.monotonic() - since_s > self.patience_s:
                raise RankError(
                    f"rank {rank} gave no sign of life for {format_duration(self.patience_s)}: it has died, hangs, or "
                    "does not make this call. All ranks of the group must make it, in the same order",
                    ranks=(rank,),
                )
            self.beat()
            time.sleep(poll_s)
            poll_s = min(_LONGEST_POLL_S, 2 * poll_s)

    def _text(self, key: str) -> str | None:
        """Return what a key of the store holds; ``None`` if it does not exist."""
        try:
            name = f"{self._prefix}/{key}"
            return self._store.get(name).decode() if self._store.check([name]) else None
        except RuntimeError as error:
            raise _gone(error) from error

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(f"{self._prefix}/{key}", text)
        except RuntimeError as error:
            raise _gone(error) from error


def check_same(what: str, values: list[Any], members: list[int]) -> None:
    """Raise `RankError`, which names the ranks, unless all ``members`` have the same of the ``values`` of all ranks."""
    others = [rank for rank in members[1:] if values[rank] != values[members[0]]]
    if others:
        raise RankError(
            f"ranks must agree on {what}: rank {members[0]} has {values[members[0]]!r}, and rank {others[0]} has "
            f"{values[others[0]]!r}",
            ranks=tuple(others),
        )


def rank_in(group: distributed.ProcessGroup) -> tuple[int, int]:
    """Return this process's rank in a group, and the number of ranks. Raises ``ValueError`` as `RankGroup` does."""
    _store_of(group)
    return distributed.get_rank(group), distributed.get_world_size(group)


def machine_name() -> str:
    """Return a name that two processes share if they run on one machine and see each other's process numbers.

    ``$PENSTOCK_MACHINE`` is part of it: with different ones, processes of one machine take themselves for several.
    """
    booted, name = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.environ.get("PENSTOCK_MACHINE", "")
    return f"{booted} {os.readlink('/proc/self/ns/pid')} {name}"


def _store_of(
    group: distributed.ProcessGroup | None,
) -> Any:  # any: a distributed.Store, a name that builds without distributed training lack
    if group is None or not distributed.is_initialized():
        raise ValueError(
            "`group` must be a group of torch.distributed, which must be initialized: "
            "torch.distributed.init_process_group('gloo'), then group=torch.distributed.group.WORLD"
        )
    entry = distributed.distributed_c10d._world.pg_map.get(group)
    if entry is None or distributed.get_rank(group) < 0:
        raise ValueError("`group` must be a group that this process belongs to, such as torch.distributed.group.WORLD")
    if entry[1] is None:
        raise ValueError("a group of MPI has no key-value store, which ranks need here: init_process_group('gloo')")
    return entry[1]


def _gone(error: RuntimeError) -> RankError:
    return RankError(
        f"the store of the process group cannot be reached, so the process that holds it, usually rank 0 or torchrun, "
        f"has ended: {str(error).splitlines()[0]}",
        ranks=(),
    )


__all__ = ["PATIENCE_S", "RankGroup", "check_same", "machine_name", "rank_in"]
