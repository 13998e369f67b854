"""What is said of this machine."""

import shutil

import pytest

from penstock.probe import LaneBandwidth, _bandwidth, _machine, machine


@pytest.fixture
def report(tmp_path, monkeypatch):
    lane = LaneBandwidth(lane="device->disk", bandwidth_bytes_per_s=1e9, is_direct=True, measured_s=0.0)
    monkeypatch.setattr(_machine, "bandwidths", lambda directory, refresh, progress=None: (lane,) * (1 + refresh))
    monkeypatch.setattr(_machine, "accelerators", list)
    monkeypatch.setattr(_machine, "accelerator_type", lambda: None)
    return lambda **settings: machine(tmp_path, **settings)


def test_on_a_processor_main_memory_is_the_device(report, tmp_path):
    device, disk = report().places
    assert (device.name, disk.name) == ("device", "disk")
    assert "no accelerator" in device.description
    assert disk.description == str(tmp_path.resolve())
    assert disk.capacity_bytes == shutil.disk_usage(tmp_path).total
    for place in (device, disk):
        assert 0 < place.free_bytes <= place.capacity_bytes


@pytest.mark.parametrize("refresh", [False, True])
def test_bandwidths_are_passed_on(report, refresh):
    assert len(report(refresh=refresh).lanes) == 1 + refresh


def test_features_say_why(report):
    features = {feature.name: feature for feature in report().features}
    assert set(features) == {"direct I/O", "accelerator", "GPUDirect Storage", "triton", "C compiler"}
    assert not features["accelerator"].is_supported
    assert features["GPUDirect Storage"].reason == "needs a CUDA device"
    assert all(feature.reason for feature in features.values())


def test_a_compiler_is_looked_for(report, monkeypatch, tmp_path):
    compiler = tmp_path / "my cc"
    compiler.touch(mode=0o700)
    monkeypatch.setenv("CC", f"'{compiler}' -pthread")
    feature = report().features[-1]
    assert feature.is_supported
    assert feature.reason == f"'{compiler}' -pthread"


def test_without_a_compiler_it_says_what_is_slower(report, monkeypatch):
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    compiler = report().features[-1]
    assert not compiler.is_supported
    assert compiler.reason.startswith("none: planning (remat) takes")
    assert "apt-get install gcc" in compiler.reason


@pytest.mark.parametrize(("is_direct", "text"), [(True, "O_DIRECT opens in"), (False, "O_DIRECT is refused by")])
def test_direct_io_is_tried(report, monkeypatch, tmp_path, is_direct, text):
    class Spill:
        def __init__(self, _):
            self.is_direct = is_direct

        def close(self):
            pass

    monkeypatch.setattr(_machine, "SpillFile", Spill)
    feature = report().features[0]
    assert feature.is_supported is is_direct
    assert feature.reason.startswith(text)
    assert str(tmp_path) in feature.reason


def test_an_unknown_directory_is_named_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(_bandwidth, "_SAMPLE_BYTES", 2**20)
    with pytest.raises(FileNotFoundError, match="mkdir -p"):
        machine(tmp_path / "nowhere")
