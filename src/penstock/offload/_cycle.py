"""The cycle under way: what was saved, what backward has asked for, and which fetch to begin next."""

import time
import weakref
from collections import deque
from collections.abc import Callable

from torch.multiprocessing.reductions import StorageWeakRef

from penstock.offload._plan import OffloadPlan
from penstock.offload._recording import Recording
from penstock.offload._saved import SavedEntry
from penstock.tiers import Handle, HandleState, TierStatistics


class Cycle:
    """A cycle under way, from the first tensor saved to the last one used.

    With a plan, fetches begin at the events it names, as long as the saved storages are those of the plan. Without a
    plan, or after the first difference, the storage saved before the one just needed is fetched next, and further ones
    up to ``window_bytes``. With a budget the computation waits for late copies out where the plan needs their memory.

    With a budget and without a plan nobody knows how much memory the rest of the step takes. So nothing stays on the
    device longer than needed (`is_strict`): forward waits for every copy out, and backward fetches only what it needs
    at once.
    """

    def __init__(
        self,
        *,
        plan: OffloadPlan | None,
        signature: tuple[tuple[int, str], ...],
        window_bytes: int,
        budget_bytes: int | None,
        has_budget: bool,
        reap: Callable[[], None],
        mark: Callable[[], None] | None,
        statistics_before: TierStatistics,
    ):
        self.recording = Recording(mark)
        self.entries: list[weakref.ref[SavedEntry]] = []
        self.num_open = 0
        """Number of entries that are alive and that backward has not asked for."""
        self.num_needs = 0
        self.follows_plan = plan is not None
        self.kept_bytes: dict[str, int] = {}
        self.hook_s = 0.0
        self.statistics_before = statistics_before
        self.start_s = self.end_s = time.time()
        self._plan = plan
        self._signature = signature
        self._window_bytes = window_bytes
        self._budget_bytes = budget_bytes
        self._has_budget = has_budget
        self._reap = reap
        self._late: list[int] = []
        gone = plan.gone_events if plan is not None and budget_bytes is not None else {}
        self._gone = deque(sorted((event, index) for index, event in gone.items()))
        self._fetches: dict[int, list[int]] = {}
        for index, event in sorted(plan.fetch_events.items(), reverse=True) if plan else ():
            self._fetches.setdefault(event, []).append(index)

    @property
    def is_drained(self) -> bool:
        """Whether everything that was saved has been asked for, or is gone."""
        return self.num_open == 0

    @property
    def is_strict(self) -> bool:
        """Whether every copy out is waited for and nothing is fetched before it is needed."""
        return self._has_budget and not self.follows_plan

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
        if self.follows_plan and self._differs(index):
            self.follows_plan = False
            if self.is_strict:
                self._finish_leaving()
        entry = SavedEntry(self, index, origin, version)
        self.entries.append(weakref.ref(entry))
        self.num_open += 1
        reason = must_keep
        if not reason and self.follows_plan and self._plan is not None and index not in self._plan.parked:
            reason = self._plan.reasons[index]
        if reason:
            self.kept_bytes[reason] = self.kept_bytes.get(reason, 0) + size_bytes
        else:
            self.recording.uses[index].is_parked = True
        self._follow_plan(self.recording.num_events - 1)
        return entry, reason

    def needed(self, entry: SavedEntry) -> None:
        """Note that backward asks for the entry, and begin the fetches that are due."""
        self._reap()
        if not self.num_needs:
            self._note_what_others_hold()
        self.num_needs += 1
        if not entry.is_needed:
            entry.is_needed = True
            self.num_open -= 1
        self.recording.need(entry.index)
        if self.follows_plan:
            self._follow_plan(self.recording.num_events - 1)
        elif not self.is_strict:
            self._fetch_ahead(entry.index)
        self.end_s = time.time()

    def matched_plan(self) -> bool:
        """Return whether the whole cycle was what the plan expected."""
        return self.follows_plan and len(self.recording.uses) == len(self._signature)

    def _differs(self, index: int) -> bool:
        use = self.recording.uses[index]
        return index >= len(self._signature) or self._signature[index] != (use.size_bytes, use.label)

    def _follow_plan(self, event: int) -> None:
        if not self.follows_plan:
            return
        self._free_what_is_late(event)
        for index in self._fetches.get(event, ()):
            self._prefetch(index)

    def _free_what_is_late(self, event: int) -> None:
        """Wait for copies out that should have ended by now, as far as the budget needs their memory."""
        assert self._plan is not None
        while self._gone and self._gone[0][0] <= event:
            self._late.append(self._gone.popleft()[1])
        late: dict[int, Handle] = {}
        for index in self._late:
            entry = self.entries[index]()
            if entry is None or entry.handle is None or self._plan.fetch_events[index] <= event:
                continue  # it has to be back by now, so waiting for its copy out gains nothing
            if entry.handle.state is HandleState.LEAVING:
                late[index] = entry.handle
        self._late = list(late)
        late_bytes = sum(handle.size_bytes for handle in late.values())
        for handle in late.values():
            if self._budget_bytes is None or self._plan.held_bytes[event] + late_bytes <= self._budget_bytes:
                break
            handle.finish_out()
            late_bytes -= handle.size_bytes

    def _finish_leaving(self) -> None:
        """Wait for all copies out."""
        for weak in self.entries:
            entry = weak()
            if entry is not None and entry.handle is not None and entry.handle.state is HandleState.LEAVING:
                entry.handle.finish_out()

    def _fetch_ahead(self, index: int) -> None:
        room_bytes = self._window_bytes
        is_first = True
        for before in range(index - 1, -1, -1):
            entry = self.entries[before]()
            if entry is None or entry.is_needed or entry.handle is None:
                continue
            room_bytes -= entry.handle.size_bytes
            if (room_bytes < 0 and not is_first) or not self._prefetch(before):
                return
            is_first = False

    def _prefetch(self, index: int) -> bool:
        entry = self.entries[index]() if index < len(self.entries) else None
        if entry is None or entry.handle is None:
            return True
        return entry.handle.prefetch()

    def _note_what_others_hold(self) -> None:
        """Note which parked storages somebody else holds, when backward begins.

        Forward's own references are gone by then, so whoever still holds a storage will go on holding it.
        """
        for index, weak in enumerate(self.entries):
            entry = weak()
            if entry is None or entry.handle is None:
                continue
            if entry.handle.state is HandleState.PARKED and entry.handle.is_held_elsewhere:
                self.recording.uses[index].must_keep = "kept: held elsewhere, parking frees nothing"
