"""GPUDirect Storage counts as working only after bytes went there and back."""

import os

import pytest
import torch

from penstock import directio
from penstock.probe import _bandwidth, _gds, gpu_direct_storage


class FakeGdsFile:
    """``torch.cuda.gds.GdsFile`` over main memory."""

    corrupts = False

    def __init__(self, path, flags):
        self.fd = os.open(path, flags)

    def __del__(self):
        os.close(self.fd)

    def save_storage(self, storage, offset=0):
        assert os.pwrite(self.fd, bytes(storage.tolist()), offset) == storage.nbytes()

    def load_storage(self, storage, offset=0):
        content = os.pread(self.fd, storage.nbytes(), offset)
        if self.corrupts:
            content = bytes([content[0] ^ 1]) + content[1:]
        storage.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage())


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A machine that says it has a device; its memory is main memory."""

    class Nothing:
        def __init__(self, _):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    module = tmp_path / "version"
    module.write_text("2")
    create = {name: getattr(torch, name) for name in ("randint", "empty")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_bandwidth, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", Nothing)
    monkeypatch.setattr(torch.cuda.gds, "GdsFile", FakeGdsFile)
    for name, make in create.items():
        monkeypatch.setattr(torch, name, lambda *a, make=make, device=None, **k: make(*a, **k))
    monkeypatch.setattr(_gds, "_MODULE", module)
    monkeypatch.setattr(_gds, "_TRIAL_BYTES", 8192)
    _gds._tried.cache_clear()
    yield module
    _gds._tried.cache_clear()


def test_a_round_trip_that_comes_back_unchanged_counts(device, tmp_path):
    feature = gpu_direct_storage(tmp_path)
    assert feature.is_supported
    assert "unchanged" in feature.reason
    assert os.listdir(tmp_path) == [device.name]


def test_bytes_that_come_back_changed_do_not(device, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeGdsFile, "corrupts", True)
    assert gpu_direct_storage(tmp_path).reason == "bytes came back changed"


def test_what_cufile_says_is_the_reason(device, tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("cuFileHandleRegister failed: 5027\nmore")

    monkeypatch.setattr(torch.cuda.gds, "GdsFile", refuse)
    feature = gpu_direct_storage(tmp_path)
    assert not feature.is_supported
    assert feature.reason == "torch.cuda.gds: cuFileHandleRegister failed: 5027"


def test_without_the_kernel_module_cufile_would_copy_through_main_memory(device, tmp_path):
    device.unlink()
    assert gpu_direct_storage(tmp_path).reason == "the nvidia-fs kernel module is not loaded"


def test_it_is_tried_once(device, tmp_path):
    gpu_direct_storage(tmp_path)
    device.unlink()
    assert gpu_direct_storage(tmp_path).is_supported


def test_direct_lanes_are_measured(device, tmp_path, monkeypatch):
    monkeypatch.setattr(_bandwidth, "_SAMPLE_BYTES", 3 * 8192)
    monkeypatch.setattr(_bandwidth, "_REQUEST_BYTES", 8192)
    ticks = []
    lanes = _bandwidth._direct_lanes(tmp_path, lambda: ticks.append(1))
    assert ticks
    assert [lane.lane for lane in lanes] == ["device->disk", "disk->device"]
    assert all(lane.is_direct and lane.bandwidth_bytes_per_s > 0 for lane in lanes)


def test_a_forked_child_does_not_keep_the_parents_space(device, tmp_path):
    spill = directio.SpillFile(tmp_path, direct=False)
    spill.grow(8192)
    file = directio.DeviceFile(spill)
    inode = os.fstat(file._file.fd).st_ino
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        os.write(writable, b"held" if os.fstat(file._file.fd).st_ino == inode else b"gone")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(readable, 4) == b"gone"
    assert os.fstat(file._file.fd).st_ino == inode
    os.close(readable)
    os.close(writable)
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.write(torch.zeros(4).untyped_storage(), 0)
    spill.close()
