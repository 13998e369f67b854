"""Every wait in the source is there for a reason: with any one taken away, a training or a check of races fails.

The places are read from the source, so that a new one without a test that misses it fails here. What runs with one of
them taken away is a scenario on the simulated device, whose race check needs no unlucky timing.
"""

import ast
import contextlib
import gc
import sys
import warnings
from pathlib import Path

import pytest
import torch
from test_device_loader import loader_of, used

import penstock
from penstock import fleet, offload, probe
from penstock.devices._accelerator import Accelerator, AcceleratorStreams
from penstock.offload._clocks import DeviceClock
from penstock.testing import GPT, simulated
from penstock.tiers import Budget, HandleState, ViewLayout, waterfall_for
from penstock.unified._order import DeviceOrder
from waiting import PATIENCE_S

SOURCE = Path(penstock.__file__).parent
ROOMS = ("tiers", "state", "training", "offload", "fleet", "unified")
WAITS = {"wait": None, "share": None, "synchronize": None, "is_done": True}
"""Methods of `Streams` that keep an order, and what they answer when they are taken away."""
FINISHES = {"finish": None, "finish_current": None}
"""The same of `Backend`."""
SIZE = 20_003
UNNOTICED = {
    ("state/_pace.py", "hold", "is_done", 0): "saves a wait",
    ("state/_pace.py", "hold", "synchronize", 0): "keeps the host close to the device, for speed alone",
    ("fleet/_pilot.py", "_measured", "finish", 0): "ends what is timed",
    (
        "fleet/_worker.py",
        "run_minibatch",
        "finish_current",
        0,
    ): "ends a mini-batch, so that times of its units are told",
    ("tiers/_direct_hop.py", "_move", "synchronize", 0): "GPUDirect Storage is simulated in tests/tiers alone",
    ("tiers/_host_work.py", "is_done", "is_done", 0): "tells which update comes first",
    ("tiers/_stream_hop.py", "wait_for_a_copy", "synchronize", 0): "saves the host from asking again and again",
}
"""Places that keep no order, each with what they are for."""


def places():
    """``(file, function, method, number)`` of every wait, and the lines it is on."""
    found = {}
    for room in ROOMS:
        for file in sorted((SOURCE / room).glob("*.py")):
            for function in ast.walk(ast.parse(file.read_text())):
                if not isinstance(function, ast.FunctionDef):
                    continue
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and is_wait(call.func):
                        name = (str(file.relative_to(SOURCE)), function.name, call.func.attr)
                        number = sum(place[:3] == name for place in found)
                        found[(*name, number)] = (call.lineno, call.end_lineno)
    return found


def is_wait(method):
    owner = ast.unparse(method.value).rpartition(".")[2].lstrip("_")
    return (method.attr in WAITS and owner == "streams") or (method.attr in FINISHES and owner.startswith("backend"))


PLACES = places()


@pytest.fixture
def without(monkeypatch):
    """Takes one place away."""

    def take(place):
        file, lines, method = str(SOURCE / place[0]), PLACES[place], place[2]
        owner = AcceleratorStreams if method in WAITS else Accelerator
        kept, num_taken = getattr(owner, method), []

        def instead(self, *arguments):
            caller = sys._getframe(1)
            if caller.f_code.co_filename == file and lines[0] <= caller.f_lineno <= lines[1]:
                num_taken.append(1)
                return {**WAITS, **FINISHES}[method]
            return kept(self, *arguments)

        monkeypatch.setattr(owner, method, instead)
        return num_taken

    return take


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What goes wrong in a scenario with all waits in place, and the places that it passes; each runs once."""
    known = {}

    def run(scenario, number):
        if (scenario, number) not in known:
            with pytest.MonkeyPatch.context() as patch:
                passed = note_places(patch)
                found = trouble(scenario, tmp_path_factory.mktemp("whole"), CONDITIONS[number], may_hang=False)
            known[scenario, number] = found, passed
        return known[scenario, number]

    return run


def note_places(patch):
    """A set to which all places are added that are passed from here on."""
    passed, at = set(), {}
    for place, (first, last) in PLACES.items():
        at |= {(str(SOURCE / place[0]), line, place[2]): place for line in range(first, last + 1)}

    def noting(method, kept):
        def call(self, *arguments):
            caller = sys._getframe(1)
            passed.add(at.get((caller.f_code.co_filename, caller.f_lineno, method)))
            return kept(self, *arguments)

        return call

    for owner, methods in ((AcceleratorStreams, WAITS), (Accelerator, FINISHES)):
        for method in methods:
            patch.setattr(owner, method, noting(method, getattr(owner, method)))
    return passed


def numbers_in(handle, layout):
    """Which numbers a handle's tensor is made of; not within an assertion, which would print the storage."""
    return layout.rebuild(handle.get()).cpu().unique().tolist()


def move(tmp_path):
    """Storages leave and come back, in a host tier with room for few, on one stream and on another."""
    waterfall = waterfall_for("sim", Budget(host=24 * 2**12 * 20), max_in_flight=3 * 4 * SIZE)
    stream, other = torch.Stream(device="sim"), torch.Stream(device="sim")
    with stream:
        for turn in range(4):
            values = [torch.full((SIZE,), float(turn), device="sim") * number for number in range(8)]
            layouts = [ViewLayout.of(value) for value in values]
            handles = [waterfall.park(values.pop(0).untyped_storage()) for _ in range(8)]
            waterfall.statistics()  # while the stream waits for copies
            for number in (0, 5):
                handles[number].finish_out()
            scratch = [torch.zeros(SIZE, device="sim") for _ in range(4)]
            del scratch
            for number, handle in enumerate(handles):
                if number % 2:
                    handle.prefetch()
            for number, (handle, layout) in enumerate(zip(handles, layouts, strict=True)):
                if number == 3:
                    with other:
                        back = layout.rebuild(handle.get())
                        doubled = back * 2
                    del back
                    torch.ones(SIZE, device="sim")
                    other.synchronize()
                    assert doubled.cpu().unique().tolist() == [2.0 * turn * number]
                else:
                    assert numbers_in(handle, layout) == [float(turn * number)]
                handle.release()
    waterfall.close()


def park_on_one_and_another_stream(tmp_path):
    """A third stream takes back what two others have parked and what may not have left yet, in either order."""
    waterfall = waterfall_for("sim", Budget(host="8MiB"), max_in_flight=2 * 4 * SIZE)
    streams = [torch.Stream(device="sim") for _ in range(3)]
    for turn in range(6):
        layouts, handles = [], []
        with streams[turn % 2]:
            for number in range(3):
                value = torch.full((SIZE,), float(turn + number), device="sim")
                layouts.append(ViewLayout.of(value))
                handles.append(waterfall.park(value.untyped_storage()))
                del value
        with streams[2]:
            raised = []
            order = (0, 1, 2) if turn % 2 else (2, 1, 0)
            for number in order:
                raised.append(layouts[number].rebuild(handles[number].get()) + 1)
                handles[number].release()
        waterfall.drain()  # nobody but the third stream uses the memory from here on
        with streams[turn % 2]:
            scratch = [torch.zeros(SIZE, device="sim") for _ in range(3)]
        with streams[2]:
            values = [value.cpu().unique().tolist() for value in raised]
        assert values == [[turn + number + 1.0] for number in order]
        del scratch
    waterfall.close()


def drain(tmp_path):
    """After a drain nothing is under way, so that rooms can be given back at once."""
    waterfall = waterfall_for("sim", Budget(host="8MiB"), max_in_flight="8MiB")
    values = [torch.full((SIZE,), float(number), device="sim") for number in range(6)]
    handles = [waterfall.park(values.pop(0).untyped_storage()) for _ in range(6)]
    waterfall.drain()
    assert [handle.state for handle in handles] == [HandleState.PARKED] * 6
    for handle in handles:
        handle.prefetch()
    waterfall.drain()
    assert not waterfall._mover.holds_handles
    for handle in handles:
        handle.release()
    waterfall.close()


def read_the_devices_clock(tmp_path):
    """While the device is still at work."""
    clock, memory = DeviceClock(AcceleratorStreams(torch.device("sim", 0)), None), torch.empty(SIZE, pin_memory=True)
    value = torch.ones(SIZE, device="sim")
    for _ in range(3):
        clock.mark()
        memory.copy_(value, non_blocking=True)
    clock.mark()
    assert clock.times(0.0).step_s > 0


def move_through_the_disk(tmp_path):
    """By staging memory that is smaller than what passes through it."""
    waterfall = waterfall_for("sim", Budget(disk=tmp_path), max_in_flight=3 * 4 * SIZE, verify=True)
    for turn in range(3):
        values = [torch.full((SIZE,), float(turn), device="sim") * number for number in range(8)]
        layouts = [ViewLayout.of(value) for value in values]
        handles = [waterfall.park(values.pop(0).untyped_storage()) for _ in range(8)]
        if turn:
            waterfall.drain()
        for handle in handles[::2]:
            handle.prefetch()
        for number, (handle, layout) in enumerate(zip(handles, layouts, strict=True)):
            assert numbers_in(handle, layout) == [float(turn * number)]
            handle.release()
    waterfall.drain()
    assert set(waterfall.statistics().held_bytes.values()) == {0}
    waterfall.close()


def train_with_a_budget(tmp_path):
    """Recorded, planned and measured cycles of the offloader, whose times are those of the device."""
    torch.manual_seed(0)
    model = GPT(num_layers=2, width=64, num_heads=2, context=64).to("sim")
    tokens = torch.randint(256, (4, 64)).to("sim")
    offloader = offload.activations(
        model, host="64MiB", min_size="16KiB", min_saving=0, max_stall=1, max_in_flight="1MiB"
    )
    with offloader:
        for _ in range(4):
            model(tokens, tokens).backward()
    assert all(statistic >= 0 for statistic in (offloader.statistics().stall_s, offloader.statistics().step_s))
    offloader.close()


def train_on_one_and_another_stream(tmp_path):
    """Steps of a training, each on another stream than the one before, which nobody else lets wait."""
    for room_bytes in (2**21, 2**26):  # with much room nothing moves, and so no copy comes between two steps
        train_on_two_streams(room_bytes)


def train_on_two_streams(room_bytes):
    torch.manual_seed(0)
    model = GPT(num_layers=2, width=64, num_heads=2, context=64).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tokens = torch.randint(256, (4, 64)).to("sim")
    training = offload.training(model, optimizer, probe.held_bytes("sim") + room_bytes, host="64MiB")
    streams = [torch.Stream(device="sim") for _ in range(2)]
    torch.accelerator.synchronize()
    for number in range(7):  # the first ones are measured, at whose end the host waits
        with streams[number % 2], training:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    training.close()


def update_on_the_host(tmp_path):
    """Steps whose gradients the host reads, and whose weights it writes."""
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0)).to("sim")

    def losses(number_of_steps, **options):
        torch.manual_seed(0)
        model = GPT(num_layers=2, width=64, num_heads=2, context=64).to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        found = []
        with contextlib.ExitStack() as stack:
            if options:
                budget = probe.held_bytes("sim") + 2**20
                training = stack.enter_context(
                    contextlib.closing(offload.training(model, optimizer, budget, **options))
                )
            for _ in range(number_of_steps):
                with training if options else contextlib.nullcontext():
                    loss = model(tokens, tokens)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(loss.detach())
        return [loss.item() for loss in found]

    assert losses(6, update="host", host="64MiB") == pytest.approx(losses(6), abs=1e-4)


def take_over_a_training(tmp_path):
    """A second training of a model whose first one is open: one after the other, pages go to another lane."""
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0)).to("sim")
    weights = []
    for is_taken_over in (False, True):
        torch.manual_seed(0)
        model = GPT(num_layers=4, width=64, num_heads=2, context=64).to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        opened = []
        for _ in range(2):
            context = contextlib.nullcontext()
            if is_taken_over:
                own_bytes = sum(parameter.nbytes for parameter in model.parameters())
                budget = probe.held_bytes("sim") + (2**20 if opened else 2**20 - own_bytes // 2)
                opened.append(offload.training(model, optimizer, budget, host="64MiB"))
                context = opened[-1]
            for _ in range(3):
                with context:
                    model(tokens, tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        if opened:
            opened[-1].close()
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(torch.equal(weight, other) for weight, other in zip(*weights, strict=True))


def hand_memory_over(tmp_path):
    """Memory of a lane's stream whose training is over, and that another lane on the same stream gets."""

    def emptied(waterfall, value):
        storage = torch.full((SIZE,), value, device="sim").untyped_storage()
        handle = waterfall.park(storage)
        handle.let_go()
        waterfall.give_back(storage)
        storage.resize_(0)
        return handle, storage

    first = waterfall_for("sim", Budget(host="8MiB"), has_lane_memory=True)
    handle, storage = emptied(first, 2.0)
    used = torch.empty(0, device="sim").set_(handle.get(into=storage))
    first.hand_over(storage)
    handle.release()
    first.close()
    own = first._mover._copies.back.stream.stream_id
    while torch.Stream(device="sim").stream_id != (own - 3) % 32 + 1:
        pass  # the next two streams are those of copies out and in, the latter the same as before
    second = waterfall_for("sim", Budget(host="8MiB"), has_lane_memory=True)
    assert second._mover._copies.back.stream.stream_id == own
    handle, other = emptied(second, 3.0)
    doubled = used * 2
    del used, storage
    assert torch.empty(0, device="sim").set_(handle.get(into=other)).cpu().unique().tolist() == [3.0]
    assert doubled.cpu().unique().tolist() == [4.0]
    handle.release()
    second.close()


def load_beside_the_step(tmp_path):
    """Mini-batches that are made in advance on a stream of their own, from values that were just made."""
    plain, loader = loader_of("sim")
    for nodes, sums in used(loader):
        torch.testing.assert_close(sums, plain[nodes].square().sum(1))


def share_memory_between_streams(tmp_path):
    """Host memory that devices read and write in place, one after another, and then the host."""
    memory = torch.zeros(SIZE, pin_memory=True)
    order, streams = DeviceOrder(), [torch.Stream(device="sim") for _ in range(2)]
    values = [torch.full((SIZE,), float(number), device="sim") for number in range(4)]
    torch.accelerator.synchronize()
    device = torch.device("sim", 0)
    for number, value in enumerate(values):
        with streams[number % 2]:
            order.before_device(device, writes=True)
            memory.copy_(value, non_blocking=True)
            order.after_device(device, writes=True)
        with streams[(number + 1) % 2]:
            order.before_device(device, writes=False)
            copy = memory.to("sim", non_blocking=True)
            order.after_device(device, writes=False)
    order.before_host(writes=True)
    assert memory.unique().tolist() == [3.0]
    del copy


def train_a_fleet(tmp_path):
    """Jobs that go from one device to the other."""
    generator = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(64, (2, 16), generator=generator) for _ in range(2)) for _ in range(2)]
    jobs = [
        fleet.Job(
            name=name,
            model=lambda: GPT(num_layers=2, width=32, num_heads=2, context=16, vocabulary=64),
            data=lambda: batches,
            loss=lambda model, batch: model(*batch),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
            steps=3,
            clip_norm=0.5,
        )
        for name in "abc"
    ]
    results = fleet.run(jobs, ["sim:0", "sim:1"], "384KiB", host="32MiB", progress=None)
    assert all(result.error is None for result in results.values())
    assert results["a"].losses == results["b"].losses == results["c"].losses
    assert all(device.compute_s > 0 for device in results.devices)


SCENARIOS = (
    move,
    park_on_one_and_another_stream,
    drain,
    read_the_devices_clock,
    move_through_the_disk,
    train_with_a_budget,
    train_on_one_and_another_stream,
    update_on_the_host,
    take_over_a_training,
    hand_memory_over,
    load_beside_the_step,
    share_memory_between_streams,
    train_a_fleet,
)
CONDITIONS = ({"lazy": True, "poison": True, "late": 1.0}, {"delay_us": (500, 3000), "poison": True})


def trouble(scenario, tmp_path, conditions, *, may_hang):
    """What goes wrong in a scenario: an exception, or a race."""
    simulated.take_races()
    patience_s = 5 if may_hang else PATIENCE_S  # on a busy machine a thread may be kept from its core for seconds
    with simulated.conditions(**conditions, patience_s=patience_s), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scenario(tmp_path)
            gc.collect()
            torch.accelerator.synchronize()
        except Exception as error:  # whatever it is, it is noticed
            return repr(error)[:200]
        finally:
            torch.accelerator.synchronize()
        races = simulated.take_races()
    return races[0] if races else None


@pytest.fixture(autouse=True)
def _on_simulated_devices_only(kind):
    if kind != "sim":
        pytest.skip("races are found on the simulated device")


@pytest.mark.parametrize("number", range(len(CONDITIONS)), ids=["lazy", "delayed"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_nothing_is_wrong_with_all_of_them(scenario, number, whole):
    found, _ = whole(scenario, number)
    assert found is None


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(map(str, place)))
def test_each_is_missed(place, without, whole, tmp_path):
    runs = [(scenario, number) for number in range(len(CONDITIONS)) for scenario in SCENARIOS]
    passing = [run for run in runs if place in whole(*run)[1]]
    if place not in UNNOTICED:  # where threads race, one may pass a place that it did not pass before
        passing += [run for run in runs if run not in passing]
    num_taken, is_noticed = without(place), False
    for scenario, number in passing:
        num_taken.clear()
        found = trouble(scenario, tmp_path, CONDITIONS[number], may_hang=place not in UNNOTICED)
        is_noticed |= found is not None and bool(num_taken)
        if is_noticed:
            break
    assert is_noticed == (place not in UNNOTICED)


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_still_leaving_may_be_written_to_if_that_is_said_before(is_told):
    simulated.take_races()
    with simulated.conditions(**CONDITIONS[1], patience_s=PATIENCE_S):
        waterfall = waterfall_for("sim", Budget(host="8MiB"))
        value = torch.ones(SIZE, device="sim")
        handle = waterfall.park(value.untyped_storage())
        handle.get()
        if is_told:
            handle.before_write()
        value.mul_(2)
        handle.release()
        waterfall.drain()
        assert value.cpu().unique().tolist() == [2.0]
        waterfall.close()
    races = simulated.take_races()
    assert bool(races) != is_told, races


def test_the_list_of_exceptions_is_of_today():
    assert set(UNNOTICED) <= set(PLACES)
