"""Plans: checked by the verifier, by brute force on small cases, and by a simulator that only counts ticks."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.errors import BudgetError, InternalError
from penstock.offload import verify
from penstock.offload._coming import ComingState
from penstock.offload._learn import CycleSettings, Learner, Lesson, PlanStage
from penstock.offload._plan import lay_fetches, plan, simulate
from penstock.offload._problem import OffloadProblem, SavedStorage
from penstock.tiers import Budget, Footprint

MIB = 2**20
many = settings(deadline=None, max_examples=150, database=None)


@st.composite
def problems(draw):
    """Any recorded cycle: several storages may be saved or needed at one event, and in any order."""
    num_events = draw(st.integers(2, 24))
    gaps = draw(
        st.lists(st.sampled_from([0.0, 1e-4, 1e-3, 0.02, 0.3]), min_size=num_events - 1, max_size=num_events - 1)
    )
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    storages = []
    for pack in sorted(draw(st.lists(st.integers(0, num_events - 2), max_size=12))):
        need = draw(st.integers(pack + 1, num_events - 1))
        storages.append(
            SavedStorage(
                size_bytes=draw(st.integers(1, 64 * MIB)),
                label=str(len(storages)),
                pack_event=pack,
                need_event=need,
                free_event=draw(st.integers(need + 1, num_events)),
                must_keep=draw(st.sampled_from(["", "", "", "kept: small"])),
            )
        )
    is_measured = draw(st.booleans())
    return OffloadProblem(
        storages=tuple(storages),
        event_times_s=tuple(times),
        step_s=times[-1] + draw(st.sampled_from([0.0, 0.1])),
        out_bandwidth_bytes_per_s=draw(st.sampled_from([1e6, 1e8, 1e9, 1e12])),
        in_bandwidth_bytes_per_s=draw(st.sampled_from([1e6, 1e8, 1e9, 1e12])),
        overhead_s=draw(st.sampled_from([0.0, 1e-4])),
        max_in_flight_bytes=draw(st.sampled_from([0, 1, 32 * MIB, 128 * MIB, 2**62])),
        base_bytes=tuple(draw(st.lists(st.integers(0, 64 * MIB), min_size=num_events, max_size=num_events)))
        if is_measured
        else (),
        min_saving_share=draw(st.sampled_from([0.0, 0.05, 1.0])),
        max_stall_share=draw(st.sampled_from([0.0, 0.1, 1.0])),
    )


def chain(num_storages=8, *, size_bytes=MIB, gap_s=1.0, **fields):
    """Forward saves storages one after another; backward needs them in reverse."""
    num_events = 2 * num_storages
    storages = tuple(
        SavedStorage(
            size_bytes=size_bytes,
            label=str(index),
            pack_event=index,
            need_event=num_events - 1 - index,
            free_event=num_events - index,
        )
        for index in range(num_storages)
    )
    fields = {"out_bandwidth_bytes_per_s": 1e9, "in_bandwidth_bytes_per_s": 1e9} | fields
    times = tuple(gap_s * event for event in range(num_events))
    return OffloadProblem(storages=storages, event_times_s=times, step_s=times[-1] + gap_s, **fields)


def peak_of(problem, parked=frozenset()):
    return simulate(problem, parked, lay_fetches(problem, parked)).peak_bytes


@many
@given(problems())
def test_every_plan_passes_the_verifier(problem):
    made = plan(problem)
    verify(problem, made)
    assert made.peak_bytes <= made.keep_all_peak_bytes == peak_of(problem)
    assert made.parked_bytes == sum(problem.storages[index].size_bytes for index in made.parked)
    assert not any(problem.storages[index].must_keep for index in made.parked)
    assert [reason == "parked" for reason in made.reasons] == [
        index in made.parked for index in range(len(made.reasons))
    ]
    assert all(reason.startswith(("parked", "kept: ")) for reason in made.reasons)


@many
@given(problems())
def test_the_prediction_is_that_of_the_simulation(problem):
    made = plan(problem)
    played = simulate(problem, made.parked, made.fetch_events)
    assert made.peak_bytes == played.peak_bytes
    assert made.stall_s == pytest.approx(played.stall_s + problem.overhead_s * len(made.parked))
    assert list(made.transfers) == [played.transfers[index] for index in sorted(played.transfers)]


@many
@given(problems())
def test_without_a_budget_nothing_stalls(problem):
    made = plan(problem)
    assert simulate(problem, made.parked, made.fetch_events).stall_s <= 0.005 * problem.step_s


@many
@given(problems())
def test_planning_is_pure(problem):
    assert plan(problem) == plan(problem)


@many
@given(problems(), st.floats(0, 1))
def test_a_budget_fits_or_the_smallest_that_does_is_named(problem, share):
    free = replace(problem, budget_bytes=None)
    budget_bytes = int(peak_of(free) * share)
    problem = replace(problem, budget_bytes=budget_bytes)
    try:
        made = plan(problem)
    except BudgetError as error:
        smallest = int(str(error).partition("at least ")[2].split()[0])
        assert smallest > budget_bytes
        problem = replace(problem, budget_bytes=smallest)
        made = plan(problem)
    verify(problem, made)
    assert made.peak_bytes <= problem.budget_bytes
    assert made.declined == "", "a budget is not declined"
    assert all(reason != "kept: its copies could not be hidden" for reason in made.reasons)


@many
@given(problems())
def test_a_budget_of_the_whole_peak_moves_nothing(problem):
    made = plan(replace(problem, budget_bytes=peak_of(problem)))
    assert made.parked == frozenset()
    assert made.stall_s == 0


@many
@given(problems(), st.data())
def test_more_parked_never_takes_more_than_keeping_all(problem, data):
    """Of any subset, not only of those that the planner tries."""
    movable = [index for index, storage in enumerate(problem.storages) if not storage.must_keep]
    assume(movable)
    parked = frozenset(data.draw(st.sets(st.sampled_from(movable))))
    fetches = {
        index: data.draw(st.integers(problem.storages[index].pack_event + 1, problem.storages[index].need_event))
        for index in parked
    }
    played = simulate(problem, parked, fetches)
    keep_all = simulate(problem, frozenset(), {})
    assert played.stall_s >= 0
    assert all(with_ <= without for with_, without in zip(played.resident_bytes, keep_all.resident_bytes, strict=True))
    assert all(size >= 0 for size in played.resident_bytes)


def test_nothing_saved_is_no_trouble():
    problem = replace(chain(), storages=())
    made = plan(problem)
    verify(problem, made)
    assert (made.peak_bytes, made.parked, made.reasons) == (0, frozenset(), ())


def test_a_fast_lane_parks_nearly_all_without_a_stall():
    made = plan(chain(20))
    assert len(made.parked) >= 18
    assert made.stall_s <= 0.005 * 40
    assert made.peak_bytes <= 3 * MIB
    assert made.declined == ""


def test_a_slow_lane_keeps_everything_and_declines():
    made = plan(chain(20, out_bandwidth_bytes_per_s=1.0, in_bandwidth_bytes_per_s=1.0))
    assert made.peak_bytes == made.keep_all_peak_bytes == 20 * MIB
    assert "min_saving" in made.declined


@pytest.mark.parametrize("direction", ["out", "in"])
def test_either_direction_can_be_the_slow_one(direction):
    problem = chain(20, **{f"{direction}_bandwidth_bytes_per_s": 0.7 * MIB})
    made = plan(problem)
    verify(problem, made)
    num_copied_back = sum(transfer.in_start_s < math.inf for transfer in made.transfers)
    assert 0 < num_copied_back < 19
    assert made.peak_bytes < made.keep_all_peak_bytes
    assert simulate(problem, made.parked, made.fetch_events).stall_s <= 0.005 * problem.step_s


def test_what_lives_longest_is_parked_first():
    made = plan(chain(20, in_bandwidth_bytes_per_s=0.7 * MIB))
    assert made.parked == frozenset(range(len(made.parked)))


def test_a_slow_lane_under_a_budget_stalls_rather_than_fails():
    problem = chain(20, out_bandwidth_bytes_per_s=MIB / 10, in_bandwidth_bytes_per_s=MIB / 10, max_in_flight_bytes=MIB)
    needed = {index: storage.need_event for index, storage in enumerate(problem.storages)}
    assert simulate(problem, frozenset(needed), needed).peak_bytes == MIB, "it can be done, if each is fetched in time"
    made = plan(replace(problem, budget_bytes=5 * MIB))
    verify(replace(problem, budget_bytes=5 * MIB), made)
    assert made.peak_bytes <= 5 * MIB
    assert made.stall_s > 10


@pytest.mark.parametrize("rate", [MIB / 1000, MIB, 1e12], ids=["slow", "as slow as the step", "fast"])
def test_a_budget_that_works_does_not_hang_on_the_speed_of_the_disk(rate):
    slow = {"out_bandwidth_bytes_per_s": rate, "in_bandwidth_bytes_per_s": rate, "max_in_flight_bytes": 128 * MIB}
    problem = chain(8, budget_bytes=3 * MIB, **slow)
    made = plan(problem)
    verify(problem, made)
    assert made.peak_bytes <= 3 * MIB and made.parked_bytes >= 5 * MIB
    with pytest.raises(BudgetError, match=f"at least {MIB} bytes"):
        plan(replace(problem, budget_bytes=MIB - 1))


def test_a_plan_that_exceeds_its_budget_is_followed_by_another_one():
    account = Budget(device="7MiB", disk=".")
    settings_of_it = CycleSettings(
        max_in_flight_bytes=MIB, min_saving_share=0.0, max_stall_share=1.0, account=account, footprint=Footprint(),
        verify=True,
    )  # fmt: skip
    learner, lesson, budget_bytes = Learner(settings_of_it, ComingState(nn.Module())), Lesson(), 6 * MIB + MIB // 2
    problem = chain(8, budget_bytes=budget_bytes)
    learner._make_plan(lesson, problem)
    assert lesson.plan.peak_bytes == 6 * MIB  # storages are larger than what is missing
    learner._fit(lesson, problem, budget_bytes + 1, budget_bytes)
    assert lesson.plan.peak_bytes == 5 * MIB
    assert lesson.stage is PlanStage.FITTING
    learner._look_at_the_peak(lesson, budget_bytes)
    assert lesson.stage is PlanStage.KEPT


def test_must_keep_is_kept_with_its_reason_though_the_budget_asks_for_it():
    problem = chain(6)
    kept = tuple(replace(storage, must_keep="kept: policy") for storage in problem.storages[:2])
    problem = replace(problem, storages=kept + problem.storages[2:], budget_bytes=4 * MIB)
    made = plan(problem)
    verify(problem, made)
    assert made.reasons[:2] == ("kept: policy",) * 2
    with pytest.raises(BudgetError, match="with all 4 movable storages parked"):
        plan(replace(problem, budget_bytes=MIB - 1))


def test_what_else_the_device_holds_counts():
    problem = chain(4, base_bytes=(0,) * 3 + (10 * MIB,) + (0,) * 4)
    made = plan(problem)
    assert made.keep_all_peak_bytes == 14 * MIB
    assert 10 * MIB <= made.peak_bytes <= 12 * MIB
    with pytest.raises(BudgetError, match=r"10\.0 MiB of the device are in use in addition to"):
        plan(replace(problem, budget_bytes=5 * MIB))


def test_a_fetch_begins_as_late_as_its_lane_allows_with_a_margin():
    problem = chain(4, in_bandwidth_bytes_per_s=MIB / 1.9)  # 1.9 s each, 2.85 s with the margin
    fetches = lay_fetches(problem, frozenset([0]))
    assert fetches == {0: 4}  # needed at 7 s, so begun at the last event before 4.15 s
    assert lay_fetches(problem, frozenset([0, 1])) == {0: 4, 1: 2}  # its lane is free before 4.15 s, so begun by 1.3 s
    assert lay_fetches(problem, frozenset()) == {}


# The stated inequality, on both sides.


def test_declined_below_the_smallest_saving():
    made = plan(chain(8, min_saving_share=0.0))
    share = (made.keep_all_peak_bytes - made.peak_bytes) / made.keep_all_peak_bytes
    assert 0 < share < 1
    assert plan(chain(8, min_saving_share=share)).declined == ""
    assert "min_saving" in plan(chain(8, min_saving_share=share + 1e-9)).declined


def test_declined_above_the_largest_stall():
    problem = chain(8, overhead_s=0.125)
    made = plan(problem)
    lost_s = made.stall_s
    assert lost_s >= 0.125 * len(made.parked) > 0
    share = lost_s / problem.step_s
    assert plan(replace(problem, max_stall_share=share)).declined == ""
    declined = plan(replace(problem, max_stall_share=share - 1e-9)).declined
    assert "max_stall" in declined
    assert f"{lost_s:.3f} s" in declined


@pytest.mark.parametrize("fields", [{"min_saving_share": 1.0}, {"max_stall_share": 0.0, "overhead_s": 1.0}])
def test_a_budget_overrides_both(fields):
    assert plan(chain(8, **fields)).declined
    assert not plan(chain(8, budget_bytes=4 * MIB, **fields)).declined


# The verifier, on plans that are broken.

PROBLEM = chain(8, size_bytes=MIB, out_bandwidth_bytes_per_s=2 * MIB, in_bandwidth_bytes_per_s=2 * MIB)


def moved(made, index, **changes):
    """The plan with the transfer of ``index`` changed."""
    return replace(
        made,
        transfers=tuple(
            replace(transfer, **changes) if transfer.index == index else transfer for transfer in made.transfers
        ),
    )


def transfer(made, index):
    return next(transfer for transfer in made.transfers if transfer.index == index)


BROKEN = {
    "a reason is missing": lambda made: replace(made, reasons=made.reasons[:-1]),
    "a fetch is missing": lambda made: replace(made, fetch_events={0: 14}),
    "a fetch of what was kept": lambda made: replace(made, fetch_events=made.fetch_events | {7: 8}),
    "a fetch before the pack": lambda made: replace(made, fetch_events=made.fetch_events | {3: 3}),
    "a fetch after the need": lambda made: replace(made, fetch_events=made.fetch_events | {3: 13}),
    "back before it was out": lambda made: moved(made, 0, in_start_s=0.1, in_end_s=0.6),
    "back faster than the lane": lambda made: moved(made, 0, in_end_s=transfer(made, 0).in_start_s + 0.1),
    "out faster than the lane": lambda made: moved(made, 0, out_end_s=transfer(made, 0).out_start_s + 0.1),
    "out before it was saved": lambda made: moved(made, 3, out_start_s=2.5, out_end_s=3.0),
    "two at once on the way out": lambda made: moved(
        made, 1, out_start_s=transfer(made, 0).out_start_s, out_end_s=transfer(made, 0).out_end_s
    ),
    "two at once on the way in": lambda made: moved(
        made, 1, in_start_s=transfer(made, 0).in_start_s, in_end_s=transfer(made, 0).in_end_s
    ),
    "a copy is missing": lambda made: replace(made, transfers=made.transfers[1:]),
    "a copy of what was kept": lambda made: replace(made, parked=made.parked - {0}, fetch_events={
        index: event for index, event in made.fetch_events.items() if index
    }, reasons=("kept: its copies could not be hidden", *made.reasons[1:])),
    "a peak below what is kept": lambda made: replace(made, peak_bytes=MIB - 1),
    "a peak above that of keeping all": lambda made: replace(made, peak_bytes=made.keep_all_peak_bytes + 1),
    "a peak that is too good": lambda made: replace(made, peak_bytes=made.peak_bytes - 1),
    "keeping all is said to take more": lambda made: replace(made, keep_all_peak_bytes=made.keep_all_peak_bytes + 1),
    "the bytes parked are wrong": lambda made: replace(made, parked_bytes=made.parked_bytes + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_verifier_catches(name):
    made = plan(PROBLEM)
    verify(PROBLEM, made)
    assert made.parked >= {0, 1, 2, 3}
    assert 7 not in made.parked
    broken = BROKEN[name](made)
    assert broken != made
    with pytest.raises(InternalError):
        verify(PROBLEM, broken)


def test_the_verifier_catches_a_storage_that_must_stay():
    made = plan(PROBLEM)
    first = replace(PROBLEM.storages[0], must_keep="kept: policy")
    with pytest.raises(InternalError, match="must be kept: kept: policy"):
        verify(replace(PROBLEM, storages=(first, *PROBLEM.storages[1:])), made)


def test_the_verifier_catches_a_budget_that_is_not_met():
    made = plan(PROBLEM)
    with pytest.raises(InternalError, match="above the budget"):
        verify(replace(PROBLEM, budget_bytes=made.peak_bytes - 1), made)


def test_the_verifier_catches_too_much_in_flight():
    problem = chain(8, size_bytes=MIB, gap_s=0.1, out_bandwidth_bytes_per_s=5 * MIB)
    made = plan(replace(problem, budget_bytes=peak_of(problem, frozenset(range(8)))))
    verify(problem, made)
    with pytest.raises(InternalError, match="on their way out"):
        verify(problem, replace(made, max_in_flight_bytes=MIB))
    with pytest.raises(InternalError, match="more than"):
        verify(replace(problem, max_in_flight_bytes=MIB), made)


def test_the_verifier_catches_a_stall_that_is_left_out():
    problem = chain(8, out_bandwidth_bytes_per_s=MIB / 3, max_in_flight_bytes=MIB)
    problem = replace(problem, budget_bytes=3 * MIB)
    made = plan(problem)
    verify(problem, made)
    assert made.stall_s > 1
    with pytest.raises(InternalError):
        verify(problem, replace(made, stall_s=0.0))


# The simulation, against one that counts ticks.


@st.composite
def ticking_problems(draw):
    """Whole seconds and one byte a second on both lanes; one thing happens at an event, as when hooks record it."""
    num_storages = draw(st.integers(1, 6))
    order = draw(st.permutations([("need", index) for index in range(num_storages)]))
    actions = []
    for index in range(num_storages):  # a need may come anywhere after its pack
        actions.append(("pack", index))
        while order and order[0][1] <= index and draw(st.booleans()):
            actions.append(order.pop(0))
    actions += order
    event = {action: number for number, action in enumerate(actions)}
    storages = tuple(
        SavedStorage(
            size_bytes=draw(st.integers(1, 9)),
            label=str(index),
            pack_event=event["pack", index],
            need_event=event["need", index],
            free_event=draw(st.integers(event["need", index] + 1, len(actions))),
        )
        for index in range(num_storages)
    )
    times = [0]
    for _ in actions[1:]:
        times.append(times[-1] + draw(st.integers(0, 6)))
    parked = frozenset(draw(st.sets(st.integers(0, num_storages - 1))))
    fetches = {i: draw(st.integers(storages[i].pack_event + 1, storages[i].need_event)) for i in sorted(parked)}
    problem = OffloadProblem(
        storages=storages,
        event_times_s=tuple(map(float, times)),
        step_s=float(times[-1]),
        out_bandwidth_bytes_per_s=1.0,
        in_bandwidth_bytes_per_s=1.0,
        max_in_flight_bytes=draw(st.sampled_from([1, 5, 12, 2**62])),
        base_bytes=tuple(draw(st.lists(st.integers(0, 9), min_size=len(times), max_size=len(times)))),
    )
    return problem, parked, fetches


class Ticks:
    """Second by second: each lane moves one byte of its first copy, if it has one."""

    def __init__(self, problem, parked, fetches):
        self.problem, self.parked, self.fetches = problem, parked, fetches
        self.size = [storage.size_bytes for storage in problem.storages]
        self.now = self.stall = 0
        self.lanes = {"out": [], "in": []}  # indices, the first of which moves
        self.left = {}  # bytes still to move
        self.spans = {"out": {}, "in": {}}  # index -> [start, end]
        self.leaving, self.gone, self.here = [], set(), set()
        self.resident = []

    def tick(self):
        self.now += 1
        for lane, queue in self.lanes.items():
            if queue:
                index = queue[0]
                self.left[lane, index] -= 1
                if not self.left[lane, index]:
                    self.spans[lane][index][1] = self.now
                    queue.pop(0)
                    if queue:
                        self.spans[lane][queue[0]][0] = self.now
                    if lane == "out" and index in self.leaving:
                        self.leaving.remove(index)
                        self.here.discard(index)
                        self.gone.add(index)

    def wait_while(self, holds):
        while holds():
            self.tick()
            self.stall += 1

    def is_above_bound(self, index):
        return sum(self.size[storage] for storage in [*self.leaving, index]) > self.problem.max_in_flight_bytes

    def start(self, lane, index):
        self.spans[lane][index] = [self.now, None]
        self.left[lane, index] = self.size[index]
        self.lanes[lane].append(index)

    def fetch(self, index):
        if index in self.leaving:
            self.leaving.remove(index)  # stays
        elif index in self.gone:
            self.gone.discard(index)
            self.here.add(index)
            self.start("in", index)

    def at(self, event):
        storages = list(enumerate(self.problem.storages))
        self.here -= {index for index, storage in storages if storage.free_event == event}
        for index, storage in storages:
            if storage.pack_event == event:
                self.here.add(index)
                if index in self.parked:
                    self.wait_while(lambda index=index: self.leaving and self.is_above_bound(index))
                    self.leaving.append(index)
                    self.start("out", index)
        due = [index for index, fetched in self.fetches.items() if fetched == event]
        for index in sorted(due, key=lambda index: self.problem.storages[index].need_event):
            self.fetch(index)
        held = sum(self.size[index] for index in self.here)
        for index, storage in storages:
            if storage.need_event == event and index in self.parked:
                self.fetch(index)
                held = sum(self.size[index] for index in self.here)
                self.wait_while(lambda index=index: index in self.lanes["in"])
        self.resident.append(held)

    def play(self):
        before = 0
        for event, time_s in enumerate(self.problem.event_times_s):
            for _ in range(int(time_s) - before):
                self.tick()
            before = int(time_s)
            self.at(event)
        while self.lanes["out"] or self.lanes["in"]:
            self.tick()
        return self


@settings(deadline=None, max_examples=400, database=None)
@given(ticking_problems())
def test_the_simulation_agrees_with_one_that_counts_ticks(case):
    problem, parked, fetches = case
    played, ticks = simulate(problem, parked, fetches), Ticks(problem, parked, fetches).play()
    assert played.stall_s == ticks.stall
    assert played.resident_bytes == ticks.resident
    assert played.peak_bytes == max(map(sum, zip(ticks.resident, problem.base_bytes, strict=True)))
    assert played.transfers.keys() == parked
    for index, transfer in played.transfers.items():
        assert [transfer.out_start_s, transfer.out_end_s] == ticks.spans["out"][index]
        assert [transfer.in_start_s, transfer.in_end_s] == ticks.spans["in"].get(index, [math.inf, math.inf])


def test_what_is_needed_before_it_has_left_is_not_parked():
    """A copy out that forwarding cuts short frees nothing and wears the disk."""
    made = plan(chain(8, out_bandwidth_bytes_per_s=1.0, in_bandwidth_bytes_per_s=1.0, min_saving_share=0.0))
    assert not made.parked
    assert made.parked_bytes == made.stall_s == 0
    assert set(made.reasons) == {"kept: its copies could not be hidden"}
