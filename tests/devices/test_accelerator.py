"""Calls of an accelerator's interface, in their order, on one that only takes notes."""

import threading
import types

import pytest
import torch
from notes import DEVICE, Notes

from penstock import devices
from penstock.devices._accelerator import Accelerator


@pytest.fixture
def notes(monkeypatch):
    return Notes().install(monkeypatch)


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


def test_a_threads_workspaces_are_taken_before_they_are_measured(notes, monkeypatch):
    multiplied = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *arguments: multiplied.append(arguments[1].dtype) or addmm(*arguments))
    backend = Accelerator(DEVICE)
    backend.device = torch.device("cpu")
    backend.warm_up()
    assert multiplied == [torch.float32, torch.bfloat16, torch.float16]
    assert notes.calls == [("finish", "current")]
    devices.backend_of("cpu").warm_up()
    assert len(multiplied) == 3


@pytest.mark.parametrize("is_named", [True, False])
def test_the_default_stream_is_known_where_pytorch_does_not_name_it(monkeypatch, is_named):
    """Every thread begins with it, and the stream is chosen per thread."""
    streams = threading.local()
    numbered = types.SimpleNamespace
    monkeypatch.setattr(torch._C, "_accelerator_getStream", lambda _: getattr(streams, "chosen", numbered(stream_id=7)))
    module = numbered(default_stream=lambda _: numbered(stream_id=7)) if is_named else numbered()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    backend = Accelerator(DEVICE)
    assert backend.is_on_default_stream()
    streams.chosen = numbered(stream_id=8)
    assert not backend.is_on_default_stream()
    assert not Accelerator(DEVICE).is_on_default_stream()
