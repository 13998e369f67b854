"""Rows are read from disks in few requests, whatever the file system allows; failed reads say so."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from unified_cases import large_table, room, tiered

from penstock import unified
from penstock.errors import TierDegradedWarning, TierReadError
from penstock.unified import _disk

pytestmark = pytest.mark.usefixtures("no_buffers")


@pytest.mark.usefixtures("no_page_cache")
def test_sectors_are_read_once_and_amplification_is_told(tmp_path):
    plain = torch.randn(20_000, 256)
    np.save(tmp_path / "x.npy", plain.numpy())
    path = unified.write_features(tmp_path / "x.rows", plain)
    apart = torch.arange(0, 20_000, 40)
    for source, least, most in ((path, 1.0, 1.0), (tmp_path / "x.npy", 1.0, 2.0)):
        with unified.TieredFeatures(source, host=4 * 20_000, in_flight=0) as features:
            sector = features._store.files.align_bytes
            assert torch.equal(features[apart], plain[apart])
            statistics = features.statistics()
            assert statistics.disk_requests == len(apart)
            if sector == 512:
                assert least <= statistics.read_amplification <= most
            features.reset_statistics()
            assert torch.equal(features[torch.arange(1000).repeat(3)], plain[:1000].repeat(3, 1))
            assert features.statistics().disk_requests <= 36
            assert features.statistics().disk_read_bytes <= 1000 * 1024 + 36 * 4096


@pytest.mark.parametrize("kind", ["aligned", "in place"])
def test_a_file_that_shrinks_is_told(either, tmp_path, kind):
    path = tmp_path / "x"
    if kind == "aligned":
        unified.write_features(path, large_table())
    else:
        np.save(tmp_path / "x.npy", large_table().numpy())
        path = tmp_path / "x.npy"
    with unified.TieredFeatures(path, host=room(3000, large_table(), 10), in_flight=0) as features:
        os.truncate(path, 20_000)
        with pytest.raises(TierReadError, match="the file ends before that") as caught:
            features[torch.arange(3000)]
        assert caught.value.file == str(path) and caught.value.errno is None


CUT_WHILE_READ = """
import faulthandler, os, sys, threading, time, torch
from penstock import unified
from penstock.errors import TierReadError

path, rows = sys.argv[1], torch.arange(20_000)
table = (rows[:, None] * 3 + torch.arange(256)).float()
unified.write_features(path, table, progress=False)
whole = os.path.getsize(path)
faulthandler.enable()
with open(path, "rb") as file:
    file.read()  # into the page cache
with unified.TieredFeatures(path, host="4MiB", in_flight=0) as features:
    order = torch.randperm(20_000)
    features[order]
    faulthandler.disable()  # which puts the handler back that was there before ours
    counts = {"right": 0, "told": 0}
    for number in range(20):
        cutter = threading.Timer(0.0005 * number, os.truncate, (path, whole // 3))
        cutter.start()
        try:
            while True:
                assert torch.equal(features[order], table[order]), "wrong rows"
                counts["right"] += 1
        except TierReadError:
            counts["told"] += 1
        cutter.join()
        with open(path, "r+b") as file:
            file.seek(features._store.files.tables[0].first_byte)
            file.write(table.numpy().tobytes())
            os.ftruncate(file.fileno(), whole)
print(counts["told"] == 20, features.statistics().cached_rows > 0)
"""


def test_a_file_that_is_cut_while_it_is_read_ends_no_process(tmp_path):
    """Rows are copied from a map of the file, which has no such page any more."""
    command = [sys.executable, "-c", CUT_WHILE_READ, str(tmp_path / "x")]
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stdout.strip()) == (0, "True True"), process.stderr


OWN_MAP = """
import mmap, os, sys, torch
from penstock import unified

path = sys.argv[1]
unified.write_features(path, torch.zeros(20_000, 64), progress=False)
with open(path, "rb") as file:
    file.read()
with unified.TieredFeatures(path, host="4MiB", in_flight=0) as features:
    features[torch.arange(20_000)]
    assert features.statistics().cached_rows
with open(path, "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0)
    os.ftruncate(file.fileno(), 4096)
    pages[1_000_000]
"""


SIGNALS = """
import faulthandler, os, signal, sys, torch
from penstock import unified

path, what = sys.argv[1:]
unified.write_features(path, torch.zeros(20_000, 64), progress=False)
with open(path, "rb") as file:
    file.read()
heard = []
if what == "handler":
    signal.signal(signal.SIGBUS, lambda *_: heard.append(1))
if what == "ignored":
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
if what == "faulthandler":
    faulthandler.enable()
features = unified.TieredFeatures(path, host="4MiB", in_flight=0)
features[torch.arange(20_000)]
assert features.statistics().cached_rows
if what == "replaced":
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    features[torch.arange(20_000)]
if what == "faulthandler after":
    faulthandler.enable()
    features[torch.arange(20_000)]
os.kill(os.getpid(), signal.SIGBUS)
for _ in range(1000):
    pass
print("lives", heard)
"""


@pytest.mark.parametrize(
    ("what", "code", "out"),
    [
        ("handler", 0, "lives [1]"), ("ignored", 0, "lives []"), ("default", -signal.SIGBUS, ""),
        ("faulthandler", -signal.SIGBUS, ""), ("replaced", -signal.SIGBUS, ""),
        ("faulthandler after", -signal.SIGBUS, ""),
    ],
)  # fmt: skip
def test_a_signal_that_somebody_sends_does_what_it_did(tmp_path, what, code, out):
    command = [sys.executable, "-c", SIGNALS, str(tmp_path / "x"), what]
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stdout.strip()) == (code, out), process.stderr


def test_the_signal_of_somebody_elses_map_is_passed_on(tmp_path):
    process = subprocess.run([sys.executable, "-c", OWN_MAP, str(tmp_path / "x")], check=False, timeout=300)
    assert process.returncode == -signal.SIGBUS


def test_a_failed_read_is_told(either, tmp_path):
    path = unified.write_features(tmp_path / "x", large_table())
    with unified.TieredFeatures(path, host=room(3000, large_table(), 10), in_flight=0) as features:
        descriptor = os.open(tmp_path, os.O_RDONLY)  # a folder: reading it fails
        os.dup2(descriptor, features._store.files._descriptors[0])
        with pytest.raises(TierReadError, match="directory") as caught:
            features[torch.arange(3000)]
        assert caught.value.errno == errno.EISDIR
        os.close(descriptor)


def test_a_file_system_without_direct_reads(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    path = unified.write_features(tmp_path / "x", large_table())
    monkeypatch.setattr(os, "open", refusing)
    with pytest.warns(TierDegradedWarning, match="refuses O_DIRECT") as caught:
        features = unified.TieredFeatures(path, host=room(3000, large_table(), 10), in_flight=0)
    assert caught[0].filename == __file__
    assert torch.equal(features[torch.arange(3000)], large_table())
    features.close()


def test_a_disk_with_large_sectors(either, tmp_path, monkeypatch):
    monkeypatch.setattr(_disk, "_can_read", lambda descriptor, size: size == 4096)
    np.save(tmp_path / "x.npy", large_table().numpy())
    with unified.TieredFeatures(tmp_path / "x.npy", host=room(3000, large_table(), 10), in_flight=0) as features:
        assert features._store.files.align_bytes in (1, 4096)
        index = torch.randint(3000, (500,))
        assert torch.equal(features[index], large_table()[index])


def test_rows_wider_than_a_request(either, tmp_path):
    plain = torch.randn(12, 50_000)  # 200 KB each
    with tiered(tmp_path, plain, 2) as features:
        index = torch.tensor([11, 3, 3, 0])
        assert torch.equal(features[index], plain[index])
