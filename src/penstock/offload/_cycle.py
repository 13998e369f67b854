"""The cycle under way: what was saved, what backward has asked for, and which fetch to begin next."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.offload._plan import OffloadPlan
from penstock.offload._recording import LEFT, Recording, Signature
from penstock.offload._saved import SavedEntry
from penstock.tiers import Handle, HandleState, TierStatistics


class Cycle:
    """A cycle under way, from the first tensor saved to the last one used, or to its `end`.

    With a plan, fetches begin at the events it names, as long as the saved storages are those of the plan. Without a
    plan, or after the first difference, the storage saved before the one just needed is fetched next, and further ones
    up to ``window_bytes``. With a budget the computation waits for late copies out where the plan needs their memory.

    With a budget and without a plan nobody knows how much memory the rest of the step takes. So nothing stays on the
    device longer than needed (`is_strict`): forward waits for every copy out, and backward fetches only what it needs
    at once.

    It is wide because its counts become the step's statistics; what it does is the work of `Entries` and `Followed`.
    """

    def __init__(
        self,
        *,
        followed: "Followed | None",
        window_bytes: int,
        has_budget: bool,
        reap: Callable[[], None],
        park: Callable[[torch.UntypedStorage], Handle],
        mark: Callable[[], None] | None,
        statistics_before: TierStatistics,
    ):
        self.recording = Recording(mark)
        self.entries = Entries()
        self.num_open = 0
        """Number of entries that are alive and that backward has not asked for."""
        self.num_needs = 0
        self.is_over = False
        """Whether it has ended. What still waits for backward then is parked or kept for as long as its graph lives,
        and comes back when it is needed.
        """
        self.follows_plan = followed is not None
        self.kept_bytes: dict[str, int] = {}
        self.hook_s = 0.0
        self.statistics_before = statistics_before
        self.start_s = self.end_s = time.time()
        self._followed = followed
        self._window_bytes = window_bytes
        self._has_budget = has_budget
        self._reap, self._park = reap, park

    @property
    def is_drained(self) -> bool:
        """Whether everything that was saved has been asked for, or is gone."""
        return self.num_open == 0

    @property
    def is_strict(self) -> bool:
        """Whether every copy out is waited for and nothing is fetched before it is needed."""
        return self._has_budget and not self.follows_plan

    def waits_for(self, index: int) -> bool:
        """Whether forward waits for a storage's copy out: no plan has room for it while it leaves."""
        is_foreseen = self.follows_plan and self._followed is not None and not self._followed.is_left(index)
        return self._has_budget and not is_foreseen

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages saved so far."""
        return sum(use.size_bytes for use in self.recording.uses)

    def add(
        self, size_bytes: int, label: str, must_keep: str, origin: StorageWeakRef, version: int
    ) -> tuple[SavedEntry, str]:
        """Add a storage; return its entry and the reason to keep it, which is empty if it is to be parked."""
        self._reap()
        index = self.recording.pack(size_bytes, label, must_keep)
        followed = self._followed if self.follows_plan else None
        if followed is not None and not followed.expects(index, size_bytes, label):
            self.follows_plan, followed = False, None
            if self.is_strict:
                self.entries.all_leave(self._park)
        entry = SavedEntry(self, index, origin, version, may_leave=not must_keep)
        self.entries.add(entry)
        self.num_open += 1
        reason = must_keep or ("" if followed is None else followed.keep_reason(index))
        if reason:
            self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + size_bytes
        else:
            self.recording.uses[index].is_parked = True
        self._follow_plan()
        return entry, reason

    def needed(self, entry: SavedEntry) -> None:
        """Note that backward asks for the entry, and begin the fetches that are due."""
        self._reap()
        if self.is_over:
            return
        if not self.num_needs:
            for index in self.entries.held_elsewhere():
                self.recording.uses[index].must_keep = "kept: held elsewhere, parking frees nothing"
        self.num_needs += 1
        if not entry.is_needed:
            entry.is_needed = True
            self.num_open -= 1
        self.recording.need(entry.index)
        if self.follows_plan:
            self._follow_plan()
        elif not self.is_strict:
            self.entries.fetch_before(entry.index, self._window_bytes)
        self.end_s = time.time()

    def end(self) -> None:
        """End it, though something may still wait for backward."""
        self.is_over = True

    def matched_plan(self) -> bool:
        """Return whether the whole cycle was what the plan expected."""
        followed = self._followed if self.follows_plan else None
        return followed is not None and len(self.recording.uses) == len(followed.signature)

    def _follow_plan(self) -> None:
        if self._followed is not None and self.follows_plan:
            self._followed.at(self.recording.num_events - 1, self.entries)


class Entries:
    """The storages that a cycle has saved, in order. The graph owns them."""

    def __init__(self) -> None:
        self._entries: list[weakref.ref[SavedEntry]] = []

    def add(self, entry: SavedEntry) -> None:
        """Add the entry of the storage that was saved last."""
        self._entries.append(weakref.ref(entry))

    def handle(self, index: int) -> Handle | None:
        """Return the handle of a storage if it was parked and backward may still need it."""
        entry = self._entries[index]() if index < len(self._entries) else None
        return None if entry is None else entry.handle

    def prefetch(self, index: int) -> bool:
        """Begin to fetch a storage; return ``False`` if there is no room for it."""
        handle = self.handle(index)
        return handle is None or handle.prefetch()

    def fetch_before(self, index: int, room_bytes: int) -> None:
        """Begin to fetch the storages that were saved before one, the last first: one, and more within the room."""
        is_first = True
        for before in range(index - 1, -1, -1):
            entry = self._entries[before]()
            if entry is None or entry.is_needed or entry.handle is None:
                continue
            room_bytes -= entry.handle.size_bytes
            if (room_bytes < 0 and not is_first) or not self.prefetch(before):
                return
            is_first = False

    def all_leave(self, park: Callable[[torch.UntypedStorage], Handle]) -> None:
        """Park what was kept although it may move, and wait for all copies out."""
        for reference in self._entries:
            entry = reference()
            if entry is not None and not entry.is_needed:
                entry.leave(park)

    def held_elsewhere(self) -> Iterator[int]:
        """Yield which parked storages somebody else holds, when backward begins.

        Forward's own references are gone by then, so whoever still holds a storage will go on holding it.
        """
        for index in range(len(self._entries)):
            handle = self.handle(index)
            if handle is not None and handle.state is HandleState.PARKED and handle.is_held_elsewhere:
                yield index


class Followed:
    """A plan, and how far a cycle has followed it."""

    def __init__(self, plan: OffloadPlan, signature: Signature, budget_bytes: int | None):
        self.signature = signature
        """Bytes and module of each storage that the plan expects."""
        self._plan, self._budget_bytes = plan, budget_bytes
        self._late: list[int] = []
        """Storages whose copies out should have ended by now."""
        gone = {} if budget_bytes is None else plan.gone_events
        self._gone = deque(sorted((event, index) for index, event in gone.items()))
        self._fetches: dict[int, list[int]] = {}
        for index, event in sorted(plan.fetch_events.items(), reverse=True):
            self._fetches.setdefault(event, []).append(index)

    def expects(self, index: int, size_bytes: int, label: str) -> bool:
        """Return whether the plan expects this storage at this place."""
        return index < len(self.signature) and self.signature[index] == (size_bytes, label)

    def keep_reason(self, index: int) -> str:
        """Return why the plan keeps a storage; empty if it parks it."""
        return "" if index in self._plan.parked or self.is_left(index) else self._plan.reasons[index]

    def is_left(self, index: int) -> bool:
        """Return whether the storage leaves at once, since no backward of the cycle needs it."""
        return self._plan.reasons[index] == LEFT

    def at(self, event: int, entries: Entries) -> None:
        """Do what is due at an event: free memory that is late, and begin fetches."""
        self._free_what_is_late(event, entries)
        for index in self._fetches.get(event, ()):
            entries.prefetch(index)

    def _free_what_is_late(self, event: int, entries: Entries) -> None:
        """Wait for copies out that should have ended by now, as far as the budget needs their memory."""
        while self._gone and self._gone[0][0] <= event:
            self._late.append(self._gone.popleft()[1])
        late: dict[int, Handle] = {}
        for index in self._late:
            handle = entries.handle(index)
            if handle is None or self._plan.fetch_events[index] <= event:
                continue  # it has to be back by now, so waiting for its copy out gains nothing
            if handle.state is HandleState.LEAVING:
                late[index] = handle
        self._late = list(late)
        late_bytes = sum(handle.size_bytes for handle in late.values())
        for handle in late.values():
            if self._budget_bytes is None or self._plan.held_bytes[event] + late_bytes <= self._budget_bytes:
                break
            handle.finish_out()
            late_bytes -= handle.size_bytes
