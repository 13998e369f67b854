"""Pages say what happened, load nothing, and keep what users named as text."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch
from benchmarks import pictures
from page_reader import Page, assert_stands_alone, page_of
from runs_to_report import EVIL, MIB, Account, advice, peak_report, planned, problem

from penstock import offload, probe, remat, report, tiers, unified
from penstock.errors import PenstockError
from penstock.offload import OffloadStatistics
from penstock.report import _of_offload, _of_tiers, _page
from penstock.report._part import Part
from penstock.testing import GPT
from penstock.tiers import Event, TierStatistics
from penstock.units import format_bytes


def test_offloader(tmp_path, offloader):
    path, trace = report.write_html(tmp_path / "run.html", offloader, title=f"A run {EVIL}")
    page, last = Page(path), offloader.statistics()
    assert_stands_alone(page)
    assert page.says(f"A run {EVIL}")
    decisions = page.table("Decisions on the saved storages")
    sizes = dict(zip(decisions.column("decision"), decisions.column("bytes"), strict=True))
    assert sizes["parked"] == format_bytes(last.parked_bytes)
    assert page.table("By module").column("module")
    summary = page.table("What ran").line("offload, step 3")
    assert summary[4:6] == [format_bytes(last.parked_bytes), format_bytes(last.fetched_bytes)]
    assert page.says("Its rating is not known")
    assert page_of(tmp_path, offloader, rated_bytes="600TB").says("a drive rated for 600 TB of writes")
    assert trace.name == "run.offload.trace.json"
    kinds = {row.get("cat") for row in json.loads(trace.read_text())["traceEvents"]}
    assert {"park", "fetch"} <= kinds
    assert trace.name in page.values_of("href")


def test_the_drives_rating_decides_on_its_life(tmp_path):
    last = OffloadStatistics(
        num_steps=1, saved_bytes=10, parked_bytes=10, fetched_bytes=10, forwarded_bytes=0, step_s=2.0,
        written_to_disk_bytes=10**9, stall_s=0.5,
    )  # fmt: skip
    sums = TierStatistics(
        parked_bytes=0, fetched_bytes=0, forwarded_bytes=0, kept_bytes=0, bounced_bytes=0, written_to_disk_bytes=0,
        stall_s=0.0, num_live_handles=0, num_failed_writes=0, in_flight_peak_bytes=0,
    )  # fmt: skip
    section = _of_offload.section_of(last, sums, (), disks=[tmp_path])
    assert section.headline.stall_share == 0.25
    assert section.headline.wear.capacity_bytes == shutil.disk_usage(tmp_path).total
    rated = 86400 * 365 * 10 * 10**9 // 2  # ten years at half a gigabyte a second
    assert _page._life(section.headline.wear, rated) == "10.0 years"
    assert _page._life(_of_offload.section_of(last, sums, (), disks=[Path("/nowhere")]).headline.wear, None) == (
        "unknown (953.7 MiB written)"
    )


def test_an_offloader_that_has_not_run(tmp_path, disk):
    with_less = offload.activations(torch.nn.Linear(2, 2), disk=disk)
    page = page_of(tmp_path, with_less)
    assert page.says("No step has ended yet")
    assert page.svgs == []
    with_less.close()


def test_training(tmp_path, disk):
    model = GPT(num_layers=4, width=128, num_heads=4, context=64)
    optimizer = torch.optim.AdamW(model.parameters())
    training = offload.training(model, optimizer, probe.held_bytes("cpu") + 4 * MIB, disk=disk)
    page = page_of(tmp_path, training)
    assert "No step has ended yet." in page.text
    for _ in range(6):
        with training:
            model(*torch.randint(256, (2, 2, 64))).backward()
            optimizer.step()
            optimizer.zero_grad()
    timeline = training.timeline()
    held = [sample.others_bytes + sum(sample.held_bytes.values()) for sample in timeline]
    page = page_of(tmp_path, training)
    report.save(tmp_path / "saved", training)
    last = training.statistics()
    training.close(discard=True)
    assert max(held) <= training.budget_bytes
    assert {kind for sample in timeline for kind, size in sample.held_bytes.items() if size} == set(last.step_fetched)
    assert_stands_alone(page)
    for said in ("Bytes on the device during a step.", "and optimizer state", "budget", "in, bytes per parameter"):
        assert said in page.text
    assert format_bytes(last.step_fetched_bytes) in page.text
    assert last.wall_s > 0
    assert any(text.endswith(("days", "years", "hours")) for text in page.table("What ran").column("SSD life"))
    assert "Bytes on the device during a step." in page_of(tmp_path, tmp_path / "saved").text


def test_planned(tmp_path):
    plan = planned()
    page = page_of(tmp_path, plan)
    assert_stands_alone(page)
    storages = page.table("The largest storages")
    assert storages.column("storage") == [plan.problem.storages[index].name for index, _ in plan.reasons()]
    assert set(storages.column("decision")) == {"kept", "recomputed"}
    assert set(storages.column("bytes")) == {"1.0 MiB"}
    summary = page.table("What ran").line("remat, the plan")
    assert summary[1:3] == [f"{format_bytes(plan.plan.peak_bytes)} (plan)", "7.0 MiB"]
    keys = [title.text for svg in page.svgs for title in svg.iter("title")]
    num_again = len(plan.plan.slots) - len(plan.problem.operators)
    assert num_again > 0
    assert f"recomputed: {num_again}" in keys
    assert "budget: 7.0 MiB" in page.source


def test_optimized_step_of_two_shapes(tmp_path):
    layer = torch.nn.Linear(64, 64)
    step = remat.optimize(lambda x: layer(x).square().mean(), [torch.ones(32, 64)], None)
    step(torch.ones(16, 64))
    page = page_of(tmp_path, step)
    assert len(page.table("What ran").lines) == 2
    assert page.table("What ran").lines[0][2] == "-"  # no budget


def test_features(tmp_path, disk):
    table = torch.arange(4000 * 256, dtype=torch.float32).view(4000, 256)
    scores = torch.arange(4000, 0, -1)
    with unified.TieredFeatures(table, host="3500KiB", disk=disk, scores=scores, progress=False) as features:
        assert page_of(tmp_path, features).says("No row has been read yet")
        features[torch.arange(0, 4000, 40)]
        page, counted = page_of(tmp_path, features), features.statistics()
    tiers_table = page.table("Tiers")
    assert tiers_table.column("rows") == [
        "0", f"{len(features.plan.host_rows):,}", "0", f"{features.plan.num_disk_rows:,}",
    ]  # fmt: skip
    assert tiers_table.column("rows served") == [
        "0", str(counted.host_rows), str(counted.cached_rows), str(counted.disk_rows),
    ]  # fmt: skip
    assert page.says(f"{counted.hit_rate:.1%} of 100 rows were held in memory")
    assert page.says(f"read {counted.read_amplification:.2f} bytes for each byte of a row")


def test_account(tmp_path):
    page = page_of(tmp_path, Account())
    assert_stands_alone(page)
    lines = page.table("Places and holders").lines
    assert lines[0] == ["device", "all", "30.0 MiB", "80.0 MiB", "100.0 MiB", "80.0%"]
    assert lines[2] == ["device", EVIL, "20.0 MiB", "20.0 MiB", "", ""]
    assert lines[3][:5] == ["/nvme", "all", "0 B", "2.0 MiB", "-"]
    titles = [title.text for title in page.svgs[0].iter("title")]
    assert titles == ["offload: 20.0%", f"{EVIL}: 10.0%", "held before, at the peak: 50.0%"]


def test_advice(tmp_path):
    page = page_of(tmp_path, advice())
    assert_stands_alone(page)
    options = page.table("Options")
    assert options.line("plain") == ["plain", "refused", "5.0 MiB", "-", "predicted", f"needs 9 MiB {EVIL}"]
    assert options.line("offload")[1:5] == ["best", "5.0 MiB", "1.10", "measured"]
    assert page.table("What ran").line("advice: offload")[1:3] == ["5.0 MiB", "8.0 MiB"]
    assert page.source.index("# &lt;b&gt;") < page.source.index("remat.optimize(...)")  # the best comes first
    assert page.says("The loss is the model's own.")


def test_advice_that_knows_no_way(tmp_path):
    page = page_of(tmp_path, advice(best=None))
    assert page.says("No option works; the table says why.")
    assert page.table("What ran").line("advice: none")[1:3] == ["-", "8.0 MiB"]


def test_peak_and_what_moved_meanwhile(tmp_path):
    page = page_of(tmp_path, peak_report())
    assert page.says("held 5.0 MiB when it began and 9.0 MiB at its peak, 4.0 MiB more")
    assert "held: peak 9.0 MiB" in [title.text for title in page.svgs[0].iter("title")]
    assert page_of(tmp_path, peak_report(timeline=())).says("keeps no history")


def test_peak_with_an_offloader_shows_its_copies(tmp_path, offloader):
    events = offloader.trace()
    around = [(min(event.start_s for event in events) - 1, MIB), (max(event.end_s for event in events) + 1, 2 * MIB)]
    page = page_of(tmp_path, peak_report(timeline=around), offloader)
    num_parked = sum(event.kind == "park" for event in events)
    assert f"parked: {num_parked}" in page.values_of("title")
    outside = peak_report(timeline=[(1.0, MIB), (2.0, MIB)])
    assert not any(title.startswith("parked") for title in page_of(tmp_path, outside, offloader).values_of("title"))


def test_a_million_events_make_a_small_page(tmp_path):
    events = [
        Event(
            lane="device->disk", kind="park", label=f"layer {at_s % 997}", size_bytes=2**20, start_s=at_s,
            end_s=at_s + 0.5,
        )
        for at_s in range(50_000)
    ] + [
        Event(lane="disk->device", kind="fetch", label="x" * 5000, size_bytes=1, start_s=number, end_s=number + 0.2)
        for number in range(50_000)
    ]  # fmt: skip
    events *= 10
    last = OffloadStatistics(num_steps=1, saved_bytes=1, parked_bytes=1, fetched_bytes=1, forwarded_bytes=0)
    sums = TierStatistics(
        parked_bytes=0, fetched_bytes=0, forwarded_bytes=0, kept_bytes=0, bounced_bytes=0, written_to_disk_bytes=0,
        stall_s=0.0, num_live_handles=0, num_failed_writes=0, in_flight_peak_bytes=0,
    )  # fmt: skip
    section = _of_offload.section_of(last, sums, events)
    timeline = [
        (float(number), (number * 7919) % 1000 + (10_000 if number == 123_456 else 0)) for number in range(200_000)
    ]
    parts = [Part(section=section), _of_tiers.part_of_peak(peak_report(timeline=timeline))]
    text = _page.page("Long", [part.section for part in parts], [None, None], rated_bytes=None, now=datetime.now())
    assert len(text) < 600_000
    (curve,) = parts[1].section.charts[0].series
    assert max(curve.points, key=lambda point: point[1])[1] == 10_000 + (123_456 * 7919) % 1000  # the peak is there


def test_what_plan_left(tmp_path):
    problem().save(tmp_path / "problem.json")
    page = page_of(tmp_path, tmp_path)
    smallest = format_bytes(remat.smallest_budget_bytes(problem()))
    assert page.table("What ran").lines[0][:3] == ["remat, the tightest plan", f"{smallest} (plan)", smallest]
    (tmp_path / "problem.json").write_text("{}")
    with pytest.raises(PenstockError, match="not a saved problem"):
        page_of(tmp_path, tmp_path)


def test_what_cannot_be_shown(tmp_path):
    with pytest.raises(ValueError, match=r"nothing to report on: write_html\('run.html', offloader\)"):
        report.write_html(tmp_path / "run.html")
    with pytest.raises(TypeError, match="PeakReport.*not dict"):
        report.write_html(tmp_path / "run.html", {})
    with pytest.raises(PenstockError, match="no folder"):
        report.write_html(tmp_path / "run.html", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PenstockError, match="holds nothing to report on"):
        report.write_html(tmp_path / "run.html", tmp_path / "empty")
    assert not (tmp_path / "run.html").exists()


def test_a_real_budget(tmp_path):
    account = tiers.Budget(device="8MiB")
    account.named("offload").charge("device", 2 * MIB)
    lines = page_of(tmp_path, account).table("Places and holders").lines
    assert lines[0] == ["device", "all", "2.0 MiB", "2.0 MiB", "8.0 MiB", "25.0%"]
    assert lines[1][1:4] == ["offload", "2.0 MiB", "2.0 MiB"]


needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium: apt-get install chromium")


@needs_chromium
def test_the_pictures_of_the_docs_are_made_anew(tmp_path):
    (picture,) = pictures.main(["--only", "report-unified", "--out", str(tmp_path / "pictures")])
    assert 0 < picture.stat().st_size < pictures.MOST_BYTES


@needs_chromium
def test_in_a_browser(tmp_path, run_dir):
    from PIL import Image

    path = report.write_html(tmp_path / "run.html", planned(), run_dir, Account(), advice(), peak_report())[0]
    lightness = {}
    for width in (1280, 390):
        for is_dark in (False, True):
            png = tmp_path / "shot.png"
            shown_width, height = pictures.screenshot(path, png, pictures.Shot(name="", width=width, is_dark=is_dark))
            assert shown_width == width  # wide tables scroll inside of their boxes
            assert height > 2000
            with Image.open(png) as image:
                grey = image.convert("L")
                lightness[width, is_dark] = grey.getpixel((2, 2))
                assert grey.size == (width, 1500)
                shades = grey.getextrema()
                assert shades[1] - shades[0] > 180  # text is readable on it
    assert {size: value < 40 for size, value in lightness.items()} == {
        (1280, False): False, (1280, True): True, (390, False): False, (390, True): True,
    }  # fmt: skip
