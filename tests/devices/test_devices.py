"""What this machine's devices are, and what is asked of an accelerator in which order, on one that only takes notes."""

import pytest
import torch

from penstock import devices
from penstock.devices import _of
from penstock.devices._accelerator import Accelerator, AcceleratorAllocator


class Notes:
    """An accelerator of kind "cuda", as far as anybody asks PyTorch: streams and events write down what they do."""

    def __init__(self):
        self.calls = []
        self.stream = Stream(self, "current")

    def install(self, monkeypatch, *, kind="cuda", count=2):
        accelerator = {
            "current_accelerator": lambda: torch.device(kind),
            "device_count": lambda: count,
            "current_device_index": lambda: 1,
            "current_stream": lambda _: self.stream,
            "synchronize": lambda device: self.calls.append(("synchronize", device)),
            "set_device_index": lambda device: self.calls.append(("set device", device)),
            "memory_stats": lambda _=None: {},
            "get_memory_info": lambda _: (10, 30),
            "memory_allocated": lambda _: 4,
            "memory_reserved": lambda _: 6,
            "reset_peak_memory_stats": lambda device: self.calls.append(("reset", device)),
        }
        for name, answer in accelerator.items():
            monkeypatch.setattr(torch.accelerator, name, answer)
        counted = {"allocated": 5, "reserved": 7}
        stats = {f"{name}_bytes": {"all": {"peak": peak}} for name, peak in counted.items()}
        monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
        monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", lambda _: stats)
        monkeypatch.setattr(_of, "_is_here", lambda _: True)
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(self, f"new on {device}"))
        monkeypatch.setattr(torch, "Event", lambda device, **given: Event(self, device, **given))


class Stream:
    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def __enter__(self):
        self.notes.calls.append(("enter", self.name))

    def __exit__(self, *_):
        self.notes.calls.append(("leave", self.name))

    def wait_event(self, event):
        self.notes.calls.append(("wait", self.name, event.number))

    def synchronize(self):
        self.notes.calls.append(("finish", self.name))


class Event:
    def __init__(self, notes, device, enable_timing, blocking):
        assert device == DEVICE and enable_timing and blocking  # waiting threads sleep
        self.notes, self.number = notes, sum(call[0] == "record" for call in notes.calls)

    def record(self, stream):
        self.notes.calls.append(("record", stream.name, self.number))

    def query(self):
        return False

    def synchronize(self):
        self.notes.calls.append(("synchronize event", self.number))

    def elapsed_time(self, end):
        return 1500.0 * (end.number - self.number)


DEVICE = torch.device("cuda", 1)


@pytest.fixture
def notes(monkeypatch):
    made = Notes()
    made.install(monkeypatch)
    return made


@pytest.fixture
def alone(monkeypatch):
    """A machine without an accelerator."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)


def test_main_memory_has_neither_streams_nor_a_counting_allocator():
    backend = devices.backend_of("cpu")
    assert (backend.streams, backend.allocator) == (None, None)
    backend.finish()
    backend.finish_current()
    assert backend.is_on_default_stream()
    assert backend.seconds(lambda: sum(range(1000))) > 0
    free_bytes, total_bytes = backend.memory_bytes()
    assert 0 < free_bytes <= total_bytes
    assert backend.name


def test_random_states_of_main_memory_go_there_and_back():
    backend = devices.backend_of("cpu")
    state = backend.random_state()
    drawn = torch.rand(3)
    backend.set_random_state(state)
    assert torch.equal(torch.rand(3), drawn)
    with devices.random_forked([torch.device("cpu")]):
        torch.rand(5)
    after = torch.rand(3)
    backend.set_random_state(state)
    torch.rand(3)
    assert torch.equal(torch.rand(3), after)


def test_a_machine_without_an_accelerator(alone):
    assert devices.accelerator_type() is None
    assert devices.accelerators() == []
    assert devices.kinds() == ("cpu",)
    assert devices.used_device() == torch.device("cpu")
    for device in ("meta", "cuda", "cuda:0"):
        assert not devices.has_backend(torch.device(device))
        with pytest.raises(ValueError, match=rf"must be 'cpu' on this machine, got '{device[:4]}'"):
            devices.backend_of(device)


def test_accelerators_are_named_and_kept(notes):
    assert devices.kinds() == ("cpu", "cuda")
    assert devices.accelerators() == [torch.device("cuda", 0), DEVICE]
    assert devices.backend_of("cuda").device == DEVICE  # the current one
    assert devices.backend_of("cuda:1") is devices.backend_of(DEVICE)
    assert devices.used_device() == torch.device("cpu")  # nothing was made there
    with pytest.raises(ValueError, match="must be 'cpu' or 'cuda' on this machine, got 'meta'"):
        devices.backend_of("meta")


def test_an_accelerator_without_streams_is_none(monkeypatch):
    Notes().install(monkeypatch, kind="mps", count=1)
    assert devices.kinds() == ("cpu",)
    assert devices.accelerators() == []


def test_time_is_the_devices_own(notes):
    backend = Accelerator(DEVICE)
    assert backend.seconds(lambda: notes.calls.append(("run",))) == 1.5
    assert notes.calls == [("record", "current", 0), ("run",), ("record", "current", 1), ("synchronize event", 1)]


def test_a_copy_is_on_its_stream_and_no_other(notes):
    streams = Accelerator(DEVICE).streams
    stream = streams.create()
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    mark = streams.record(streams.current())
    streams.wait(stream, mark)
    streams.copy(stream, target, source)
    assert torch.equal(source, target)
    assert not streams.is_done(mark)
    assert notes.calls == [
        ("record", "current", 0),
        ("wait", "new on cuda:1", 0),
        ("enter", "new on cuda:1"),
        ("leave", "new on cuda:1"),
    ]


def test_waiting_for_a_stream_and_for_all(notes):
    backend = Accelerator(DEVICE)
    backend.use(num_threads=3)
    backend.finish_current()
    backend.finish()
    assert notes.calls == [("set device", DEVICE), ("finish", "current"), ("synchronize", DEVICE)]


def test_an_allocator_counts(notes):
    backend = Accelerator(DEVICE)
    allocator = backend.allocator
    with allocator.watching() as watch:
        assert watch.peaks() == devices.Peaks(allocated_bytes=5, requested_bytes=5, reserved_bytes=7)
    assert (allocator.allocated_bytes(), allocator.reserved_bytes()) == (4, 6)
    assert backend.memory_bytes() == (10, 30)
    assert notes.calls == [("reset", DEVICE)]


def test_each_watch_has_a_beginning_of_its_own(monkeypatch):
    """The allocator has one for the whole process."""
    highest = {"now": 100, "peak": 100}

    def stats(_):
        peaks = {"allocated": highest["peak"], "requested": highest["peak"] - 1, "reserved": 2 * highest["peak"]}
        return {f"{name}_bytes": {"all": {"peak": peak}} for name, peak in peaks.items()}

    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", stats)

    def reset(_):
        highest["peak"] = highest["now"]

    def rise_to(peak):
        highest["peak"] = max(highest["peak"], peak)

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    allocator = AcceleratorAllocator(DEVICE)
    rise_to(900)
    with allocator.watching() as outer:
        rise_to(500)
        with allocator.watching() as inner:
            rise_to(300)
            assert inner.peaks() == devices.Peaks(300, 299, 600)
            inner.restart()
            rise_to(200)
            assert inner.peaks() == devices.Peaks(200, 199, 400)
        assert outer.peaks() == devices.Peaks(500, 499, 1000)
    assert allocator._watches == []


class Clocked:
    """Streams of a device whose clock and the host's are one, with ``float32`` milliseconds as PyTorch tells them."""

    def __init__(self):
        self.now_s = 0.0

    def create(self):
        return self

    def record(self, stream):
        return self.now_s

    def synchronize(self, event):
        """It is over."""

    def elapsed_s(self, start, end):
        return torch.tensor((end - start) * 1e3, dtype=torch.float32).item() / 1e3


def test_a_devices_marks_are_on_the_hosts_clock_for_days(monkeypatch):
    streams = Clocked()
    monkeypatch.setattr("penstock.devices._timeline.time.time", lambda: 1e6 + streams.now_s)
    timeline = devices.DeviceTimeline(streams)
    for _ in range(20_000):
        streams.now_s += 10.0
        assert timeline.host_s(streams.record(streams)) == pytest.approx(1e6 + streams.now_s, abs=1e-3)


def test_a_threads_workspaces_are_taken_before_they_are_measured(notes, monkeypatch):
    multiplied = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *given: multiplied.append(given[1].dtype) or addmm(*given))
    backend = Accelerator(DEVICE)
    backend.device = torch.device("cpu")
    backend.warm_up()
    assert multiplied == [torch.float32, torch.bfloat16, torch.float16]
    assert notes.calls == [("finish", "current")]
    devices.backend_of("cpu").warm_up()
    assert len(multiplied) == 3
