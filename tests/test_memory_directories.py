"""Directories whose files are main memory: rooms warn of them, and refuse them where they would free nothing."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import penstock
from penstock import fleet, offload, probe, remat, tiers, unified
from penstock.cli import app
from penstock.errors import TierDegradedWarning

SHARED = "/dev/shm"
pytestmark = pytest.mark.skipif(not Path(SHARED).is_dir(), reason="no /dev/shm on this machine")
REFUSED = r"`disk` must be on a disk, got /dev/shm, which is main memory \(tmpfs\): on a CPU .* Give a directory on an"
MEBIBYTE = 2**20


@contextmanager
def warned():
    with pytest.warns(TierDegradedWarning, match=r"`disk` names main memory, not a disk: /dev/shm \(tmpfs\)") as caught:
        yield
    assert len(caught) == 1


def test_a_disk_tier_in_memory_warns_and_counts_as_held(tmp_path):
    before = probe.ledger.held_bytes
    with warned():
        tier = tiers.DiskTier({SHARED: "8MiB"})
    assert not tier.is_disk
    extent = tier.reserve(3 * MEBIBYTE)
    assert probe.ledger.held_bytes - before == tier.reserved_bytes == 8 * MEBIBYTE
    view = memoryview(bytearray(os.urandom(3 * MEBIBYTE)))
    back = memoryview(bytearray(3 * MEBIBYTE))
    tier.write(extent.pieces[0], view)
    tier.read(extent.pieces[0], back)
    assert view == back
    tier.close()
    tier.close()
    assert probe.ledger.held_bytes == before
    on_disk = tiers.DiskTier({tmp_path: "8MiB"})
    on_disk.reserve(MEBIBYTE)
    assert on_disk.is_disk and probe.ledger.held_bytes == before
    on_disk.close()


def test_what_stays_in_memory_does_not_wear_a_disk(tmp_path):
    """As below a GPU, where such a directory is host memory that is not pinned."""
    with warned():
        tier = tiers.DiskTier({SHARED: "8MiB"})
    waterfall = tiers.waterfall_for("cpu", tiers.Budget(disk=tmp_path))
    waterfall.tiers[0].close()
    waterfall.tiers = (tier,)
    handle = waterfall.park(torch.arange(MEBIBYTE, dtype=torch.uint8).untyped_storage(), label="a")
    handle.get()
    handle.release()
    waterfall.drain()
    assert waterfall.statistics().written_to_disk_bytes == 0
    waterfall.close()


def model_of():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())


def job():
    return fleet.Job(
        name="a", model=model_of, data=lambda: [torch.ones(1, 8)], loss=lambda model, x: model(x).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "use",
    [
        lambda: offload.activations(model_of(), disk=SHARED, budget="1GiB"),
        lambda: offload.activations(model_of(), budget=tiers.Budget(disk={".": None, SHARED: "1MiB"})),
        lambda: remat.optimize(lambda x: x.square().sum(), [torch.ones(8, requires_grad=True)], "1MiB", disk=SHARED),
        lambda: fleet.run([job()], devices=["cpu"], budget="1MiB", disk=SHARED, progress=None),
        lambda: tiers.waterfall_for("cpu", tiers.Budget(disk=SHARED)),
    ],
    ids=["offload", "one of several", "remat", "fleet", "tiers"],
)
def test_on_a_cpu_memory_below_memory_is_refused(use):
    with pytest.raises(ValueError, match=REFUSED):
        use()


def test_features_in_memory_are_warned_of():
    with warned():
        features = unified.TieredFeatures(torch.randn(40_000, 64), host="4MiB", disk=SHARED)
    features.close()


def test_probe_says_that_it_is_memory():
    result = CliRunner().invoke(app, ["probe", "--disk", SHARED], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "/dev/shm: memory (tmpfs), not a disk" in result.output
    assert "/dev/shm is main memory (tmpfs), not a disk; give a directory on an SSD" in result.output
    report = penstock.probe.machine(SHARED)
    assert [lane.is_direct for lane in report.lanes if "disk" in lane.lane] == [False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="below a GPU it is allowed")
def test_commands_refuse_it_before_they_begin():
    for arguments in (["demo"], ["bench"], ["plan", "train.py:make"], ["advise", "train.py:make", "--budget", "1GiB"]):
        result = CliRunner().invoke(app, [*arguments, "--disk", SHARED])
        assert result.exit_code == 1
        assert "--disk must be on a disk, got /dev/shm, which is main memory (tmpfs)" in result.stderr
