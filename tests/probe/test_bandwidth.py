"""What is measured once is remembered for a week; what is broken is measured anew."""

import errno
import json
import os
from pathlib import Path

import pytest

from penstock.probe import LaneBandwidth, _bandwidth, bandwidths


@pytest.fixture(autouse=True)
def measured(monkeypatch, empty_cache):
    """Transfers of 1 MiB rather than 256; returns a list with one entry per measurement."""
    monkeypatch.setattr(_bandwidth, "_SAMPLE_BYTES", 2**20)
    monkeypatch.setattr(_bandwidth, "_REQUEST_BYTES", 2**18)
    monkeypatch.setattr(_bandwidth.torch.cuda, "is_available", lambda: False)
    measured = []
    real = _bandwidth._disk_lanes

    def counted(directory, tick):
        measured.append(directory)
        return real(directory, tick)

    monkeypatch.setattr(_bandwidth, "_disk_lanes", counted)
    return measured


@pytest.fixture
def cache_file():
    return Path(os.environ["XDG_CACHE_HOME"]) / "penstock" / "bandwidths.json"


def test_every_transfer_is_told(tmp_path, measured):
    told = []
    bandwidths(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == [(number, 8) for number in range(1, 9)]
    bandwidths(tmp_path, progress=told.append)  # remembered: nothing to tell
    assert len(told) == 8


def test_both_directions_are_measured(tmp_path):
    out, back = bandwidths(tmp_path)
    assert (out.lane, back.lane) == ("device->disk", "disk->device")
    assert out.bandwidth_bytes_per_s > 0
    assert back.bandwidth_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_the_second_call_remembers(tmp_path, measured, cache_file):
    first = bandwidths(tmp_path)
    assert cache_file.exists()
    assert bandwidths(tmp_path) == first
    assert all(isinstance(lane, LaneBandwidth) for lane in bandwidths(str(tmp_path)))
    assert len(measured) == 1


def test_refresh_measures_anew(tmp_path, measured):
    first = bandwidths(tmp_path)
    second = bandwidths(tmp_path, refresh=True)
    assert second[0].measured_s > first[0].measured_s
    assert bandwidths(tmp_path) == second
    assert len(measured) == 2


def aged(cache_file, seconds):
    cache = json.loads(cache_file.read_text())
    for lanes in cache.values():
        lanes[-1]["measured_s"] -= seconds
    cache_file.write_text(json.dumps(cache))


@pytest.mark.parametrize(("age_s", "num_measured"), [(6 * 86400, 1), (8 * 86400, 2)])
def test_a_week_later_it_is_measured_anew(tmp_path, measured, cache_file, age_s, num_measured):
    bandwidths(tmp_path)
    aged(cache_file, age_s)
    bandwidths(tmp_path)
    assert len(measured) == num_measured


GOOD = {"lane": "a->b", "bandwidth_bytes_per_s": 1.0, "is_direct": True, "measured_s": 4e9}


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "not json",
        "[]",
        "7",
        '{"key": 7}',
        b"\xff\xfe",
        [{"lane": "a->b"}],
        [GOOD | {"extra": 1}],
        [GOOD | {"measured_s": None}],
        [GOOD | {"measured_s": "yesterday"}],
        [GOOD | {"measured_s": "1700000000"}],
        [GOOD | {"bandwidth_bytes_per_s": "fast"}],
        [],
        {"lane": "a->b"},
    ],
    ids=repr,
)
def test_a_broken_cache_is_ignored_and_replaced(tmp_path, measured, cache_file, broken):
    bandwidths(tmp_path)
    if isinstance(broken, bytes):
        cache_file.write_bytes(broken)
    elif isinstance(broken, str):
        cache_file.write_text(broken)
    else:
        (key,) = json.loads(cache_file.read_text())
        cache_file.write_text(json.dumps({key: broken}))
    lanes = bandwidths(tmp_path)
    assert len(measured) == 2
    assert bandwidths(tmp_path) == lanes
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, measured):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    bandwidths(tmp_path)
    bandwidths(tmp_path)
    assert len(measured) == 2


def test_the_cache_is_written_whole(tmp_path, cache_file):
    bandwidths(tmp_path)
    assert [path.name for path in cache_file.parent.iterdir()] == ["bandwidths.json"]


def test_other_entries_of_the_cache_are_kept(tmp_path, cache_file):
    cache_file.parent.mkdir(parents=True)
    cache_file.write_text(json.dumps({"another machine": [GOOD]}))
    bandwidths(tmp_path)
    cache = json.loads(cache_file.read_text())
    assert cache["another machine"] == [GOOD]
    assert len(cache) == 2


def test_it_says_whether_the_bytes_go_directly(tmp_path, monkeypatch):
    real = os.open

    def buffered(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("penstock.directio.os.open", buffered)
        assert [lane.is_direct for lane in bandwidths(tmp_path, refresh=True)] == [False, False]
    spill = _bandwidth.SpillFile(tmp_path)
    spill.close()
    assert [lane.is_direct for lane in bandwidths(tmp_path, refresh=True)] == [spill.is_direct] * 2


def test_a_directory_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match="mkdir -p"):
        bandwidths(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        bandwidths(tmp_path / "file", refresh=True)


def test_an_error_of_the_disk_is_raised(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("penstock.directio.SpillFile.write", fail)
    with pytest.raises(OSError, match="Input/output error"):
        bandwidths(tmp_path)
