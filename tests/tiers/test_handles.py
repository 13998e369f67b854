"""States of handles: the table, every order of a few threads on it, and random calls from several."""

import ast
import contextlib
import gc
import shutil
import tempfile
import threading
import warnings
from collections import deque
from pathlib import Path

import pytest
import torch
from fake_streams import FakeStreams, waterfall_on
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from object_store import ObjectStore
from turns import PointLock, every_order

import penstock
from penstock.errors import TierDegradedWarning
from penstock.links import DEVICE, Link
from penstock.testing import FaultyTier
from penstock.tiers import Budget, EventLog, HandleState, Waterfall
from penstock.tiers._build import build
from penstock.tiers._handles import Handles
from penstock.tiers._record import TRANSITIONS, Happening
from penstock.tiers._room import Room

SIZE = 4096
TIERS = Path(penstock.__file__).parent / "tiers"


def test_every_state_is_reached_and_only_one_is_final():
    reached = {HandleState.LEAVING, *TRANSITIONS.values()}
    assert reached == set(HandleState)
    assert {state for state, _ in TRANSITIONS} == set(HandleState) - {HandleState.RELEASED}
    assert {happening for _, happening in TRANSITIONS} == set(Happening)
    assert all((state, Happening.RELEASED) in TRANSITIONS for state in set(HandleState) - {HandleState.RELEASED})


@pytest.mark.parametrize("file", sorted(TIERS.glob("*.py")), ids=lambda file: file.name)
def test_states_change_in_one_file(file):
    """By syntax tree: attributes that `Handles` guards are assigned there, and first set by the record itself."""
    guarded = {"state", "storage", "weak", "room", "num_moving", "is_wanted", "was_forwarded", "missed_its_tier"}
    if file.name == "_handles.py":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            assert node.attr not in guarded or owner == "self", f"line {node.lineno} sets {ast.unparse(node)}"
            is_of_record = owner.rpartition(".")[2] == "record"
            assert not is_of_record or node.attr == "transit", f"line {node.lineno} sets {ast.unparse(node)}"


class PaperMover:
    """Moves nothing by itself: a lane's program does, one copy at a time, and every step of it is a point."""

    can_overwrite = False

    in_flight_peak_bytes = 0
    holds_handles = False
    max_in_flight_bytes = 2**62
    has_staging = False

    def __init__(self, turns, handles, *, error=None):
        self.turns, self.handles, self.error = turns, handles, error
        self.jobs, self.arrived = deque(), set()
        self.contents = {}

    def bound_in_flight(self, size_bytes):
        """It moves one copy after the other."""

    def link_to(self, tier):
        return Link(DEVICE, tier.place)

    def make_room(self, size_bytes):
        return 0.0

    def reserve(self, tiers, handle):
        return Room(tiers[0], tiers[0].reserve(handle.size_bytes))

    def wait_for_a_copy(self):
        return False

    def start_out(self, handle, storage, room):
        self.jobs.append(("out", handle, [storage], room))

    def cancel_out(self, handle):
        self.turns.point()
        for job in self.jobs:
            if job[:2] == ("out", handle):
                self.jobs.remove(job)
                return True
        return False

    def hand_back(self, handle, storage):
        self.turns.point()

    def finish_out(self, handle):
        self.turns.point(until=lambda: handle.state is not HandleState.LEAVING)
        return 0.0

    def before_write(self, handle):
        self.turns.point()

    def allocate(self, handle, into=None):
        self.turns.point()
        return torch.UntypedStorage(handle.size_bytes)

    def start_in(self, handle, storage, room, after=None):
        self.turns.point()
        self.arrived.discard(handle)
        self.jobs.append(("in", handle, [storage], room))

    def finish_in(self, handle):
        self.turns.point(until=lambda: handle in self.arrived)
        return 0.0

    def rates_bytes_per_s(self):
        return None, None

    def poll(self):
        """Lanes report by themselves."""

    def device_stall_s(self):
        return 0.0

    def drain(self):
        while self.jobs:
            self.move()

    close = drain

    def move(self):
        """A lane's next copy."""
        way, handle, box, room = self.jobs.popleft()
        self.turns.point()
        piece = room.extent.pieces[0]
        memory = memoryview((torch.empty(0, dtype=torch.uint8).set_(box[0])).numpy())
        if way == "out":
            if self.error is None:
                room.tier.write(piece, memory)
            self.turns.point()
            self.handles.left(handle, box, self.error)
        else:
            room.tier.read(piece, memory)
            self.turns.point()
            self.handles.arrived(handle, box, None)
            self.arrived.add(handle)


class Scene:
    """A waterfall on paper, with one storage to park."""

    def __init__(self, turns, *, error=None, capacity_bytes=4 * SIZE):
        self.tier, handles = ObjectStore(capacity_bytes), Handles()
        handles.lock = PointLock(turns)
        self.turns = turns
        self.mover = PaperMover(turns, handles, error=error)
        self.waterfall = Waterfall([self.tier], self.mover, handles, EventLog())
        self.handles, self.num_computing = [], 0
        self.warned = []

    def park(self, value=7):
        storage = torch.full((SIZE,), value, dtype=torch.uint8).untyped_storage()
        self.handles.append(self.waterfall.park(storage, str(value)))
        return self.handles[-1]

    def get(self, handle, value=7):
        """The right bytes, or word that it was released."""
        was_released = False
        try:
            storage = handle.get()
        except ValueError as error:
            was_released = "was released" in str(error)
        assert was_released or torch.empty(0, dtype=torch.uint8).set_(storage).unique().tolist() == [value]

    def lane(self):
        """Moves what there is, until nobody computes any more."""
        while True:
            self.turns.point(until=lambda: self.mover.jobs or not self.num_computing)
            if not self.mover.jobs:
                return
            self.mover.move()

    def run(self, *programs):
        self.num_computing = len(programs)

        def counted(program):
            def run():
                try:
                    program()
                finally:
                    self.num_computing -= 1

            return run

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TierDegradedWarning)
            self.turns.run(*map(counted, programs), self.lane)
            self.end()

    def end(self):
        """Nothing is left over, whatever happened."""
        self.mover.drain()
        for handle in self.handles:
            handle.release()
            assert handle.state is HandleState.RELEASED
            assert handle.record.num_moving == 0
            assert handle.record.room is None
        self.waterfall.reap()
        assert self.tier.used_bytes == 0
        assert self.waterfall._handles.num_leaving_room == 0
        assert self.waterfall.counts()["num_live_handles"] == 0


def release_against_prefetch_and_get(turns):
    scene = Scene(turns)
    handle = scene.park()

    def compute():
        handle.prefetch()
        scene.get(handle)

    scene.run(compute, handle.release)


def release_against_finish_and_get(turns):
    scene = Scene(turns)
    handle = scene.park()

    def compute():
        handle.finish_out()
        scene.get(handle)

    scene.run(compute, handle.release)


def two_releases(turns):
    scene = Scene(turns)
    handle = scene.park()
    scene.run(handle.release, handle.release, handle.prefetch)


def release_of_a_failed_copy(turns):
    scene = Scene(turns, error=OSError(5, "Input/output error"))
    handle = scene.park()
    scene.run(lambda: scene.get(handle), handle.release)


def release_makes_room(turns):
    """A full tier: the second storage is kept, or takes the room of the first."""
    scene = Scene(turns, capacity_bytes=SIZE)
    first = scene.park()

    def compute():
        second = scene.park(value=9)
        scene.get(second, value=9)

    scene.run(compute, first.release)


def get_twice_against_release(turns):
    scene = Scene(turns)
    handle = scene.park()
    scene.mover.drain()
    scene.waterfall.reap()
    assert handle.state is HandleState.PARKED

    def compute():
        scene.get(handle)
        scene.get(handle)

    scene.run(compute, handle.release)


SCENARIOS = (
    release_against_prefetch_and_get,
    release_against_finish_and_get,
    two_releases,
    release_of_a_failed_copy,
    release_makes_room,
    get_twice_against_release,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_order_of_a_few_threads(scenario):
    assert every_order(scenario, most_switches=2 if scenario is two_releases else 3) > 100


@pytest.mark.parametrize(
    "before",
    [
        (HandleState.RELEASED, Happening.STAYS, HandleState.KEPT),
        (HandleState.RELEASED, Happening.CALLED, HandleState.ARRIVING),
    ],
)
def test_a_table_that_lets_the_released_come_back_is_found_out(before, monkeypatch):
    state, happening, after = before
    monkeypatch.setitem(TRANSITIONS, (state, happening), after)
    assert any(is_found_out(scenario) for scenario in SCENARIOS)


def is_found_out(scenario):
    try:
        every_order(scenario, most_switches=2)
    except AssertionError:
        return True
    return False


class Calls(RuleBasedStateMachine):
    """Random calls, some of them while another thread releases; the bytes are right, or the handle was released."""

    streams = None

    @initialize(seed=st.integers(0, 999), faults=st.sampled_from([{}, {"write_error": 0.3}, {"full": 0.3}]))
    def begin(self, seed, faults):
        self.folder = tempfile.mkdtemp()
        self.tier = FaultyTier(ObjectStore(6 * 3 * SIZE), seed=seed, **faults)
        self.waterfall = self.make(seed)
        self.live, self.value = [], 0
        self.elsewhere = []

    def make(self, seed):
        (waterfall,) = build(
            [None],
            Budget(tiers=[self.tier]),
            [EventLog()],
            has_host=False,
            max_in_flight_bytes=2 * SIZE,
            verify=bool(seed % 2),
        )
        return waterfall

    def produce(self, size):
        return torch.full((size,), self.value, dtype=torch.uint8).untyped_storage()

    def check(self, storage, value):
        assert torch.empty(0, dtype=torch.uint8).set_(storage).unique().tolist() == [value]

    def pick(self, data):
        return data.draw(st.sampled_from(range(len(self.live))))

    @rule(size=st.sampled_from([64, SIZE, SIZE + 64, 3 * SIZE - 1]))
    def park(self, size):
        if len(self.live) < 8:
            self.value = self.value % 200 + 1
            with quiet():
                self.live.append((self.waterfall.park(self.produce(size), str(self.value)), self.value))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def prefetch(self, data):
        assert self.live[self.pick(data)][0].prefetch()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def get(self, data):
        handle, value = self.live[self.pick(data)]
        self.check(handle.get(), value)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_out(self, data):
        with quiet():
            self.live[self.pick(data)][0].finish_out()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_dropped=st.booleans())
    def release(self, data, is_dropped):
        handle, _ = self.live.pop(self.pick(data))
        if not is_dropped:
            handle.release()
            assert handle.state is HandleState.RELEASED

    @precondition(lambda self: self.live)
    @rule(data=st.data(), call=st.sampled_from(["prefetch", "get", "finish_out", "release"]))
    def release_elsewhere(self, data, call):
        handle, value = self.live.pop(self.pick(data))
        thread = threading.Thread(target=handle.release)
        thread.start()
        try:
            if call == "get":
                with contextlib.suppress(ValueError):
                    self.check(handle.get(), value)
            else:
                getattr(handle, call)()
        finally:
            thread.join()
        assert handle.state is HandleState.RELEASED

    @rule()
    def reap(self):
        self.waterfall.reap()

    @invariant()
    def counts_are_within_their_bounds(self):
        if hasattr(self, "waterfall"):
            assert self.tier.used_bytes <= self.tier.capacity_bytes
            assert self.waterfall._handles.num_leaving_room >= 0

    def teardown(self):
        if not hasattr(self, "waterfall"):
            return
        self.live.clear()
        gc.collect()
        with quiet():
            self.waterfall.drain()
            self.waterfall.drain()
        assert self.waterfall.counts()["num_live_handles"] == 0
        assert self.tier.used_bytes == 0
        assert self.waterfall._handles.num_leaving_room == 0
        self.waterfall.close()
        shutil.rmtree(self.folder)


class CallsOnStreams(Calls):
    """The same on a device whose streams run in any order that the events allow."""

    def make(self, seed):
        self.streams = FakeStreams(seed)
        return waterfall_on(self.streams, [self.tier], max_in_flight=4 * SIZE, verify=bool(seed % 2))

    def produce(self, size):
        storage = self.streams.allocate(size)
        value, tensor = self.value, torch.empty(0, dtype=torch.uint8).set_(storage)
        self.streams.launch(lambda: tensor.fill_(value))
        return storage

    def check(self, storage, value):
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        seen = []
        self.streams.launch(lambda: seen.append(tensor.unique().tolist()))
        mark = self.streams.record(self.streams.current())
        self.streams.synchronize(mark)
        assert seen == [[value]]


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierDegradedWarning)
        yield


for machine in (Calls, CallsOnStreams):
    machine.TestCase.settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )

TestCalls = Calls.TestCase
TestCallsOnStreams = CallsOnStreams.TestCase
