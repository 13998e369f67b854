"""An accelerator that only takes notes of what is asked of it."""

import torch

from penstock.devices import _of


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
        monkeypatch.setattr(torch._C, "_accelerator_getStream", lambda _: self.stream)
        monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
        monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", lambda _: stats)
        monkeypatch.setattr(_of, "_is_here", lambda _: True)
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(self, f"new on {device}"))
        monkeypatch.setattr(torch, "Event", lambda device, **options: Event(self, device, **options))
        return self


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
