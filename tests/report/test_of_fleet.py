"""The part about a fleet: schedule, losses, jobs and devices, from its folder or its results."""

import json

import torch
from page_reader import Page, assert_stands_alone, page_of
from runs_to_report import EVIL, UNITS, write_run

from penstock import fleet, report
from penstock.report._fleet import read_losses
from penstock.units import format_bytes, format_duration


def test_run_dir(tmp_path, run_dir):
    path, trace = report.write_html(tmp_path / "run.html", str(run_dir))
    page = Page(path)
    assert_stands_alone(page)
    jobs = page.table("Jobs")
    assert jobs.line(EVIL)[1] == "failed"
    assert jobs.line(EVIL)[-1] == f"it broke: {EVIL}"
    assert jobs.column("steps") == ["4", "4"]
    assert page.table("Devices").line("device 0")[1:] == ["2", "3.0 s", "0.0 ms", "1.0 s"]
    titles = [title.text for svg in page.svgs for title in svg.iter("title")]
    assert {"a: 1.0 s of 3.0 s in this row, 0.0 ms to 1.0 s", "a: 2.0 s of 3.0 s in this row, 2.0 s to 4.0 s"} <= {
        *titles
    }
    assert f"{EVIL}: 1.5 s, 1.0 s to 2.5 s" in titles
    assert "waits for copies: 1.0 s, 1.0 s to 2.0 s" in titles
    assert "a: 1" in titles  # its last loss
    assert page.says("1 done, 1 failed")
    assert page.says("3 units ran on 2 devices within 4.0 s")
    assert sum("cat" in row for row in json.loads(trace.read_text())["traceEvents"]) == 5


def test_an_empty_run_dir(tmp_path):
    page = page_of(tmp_path, write_run(tmp_path / "runs"))
    assert page.says("There are no jobs yet, and no unit has run.")
    (tmp_path / "runs" / "units.jsonl").unlink()
    assert page_of(tmp_path, tmp_path / "runs").says("There are no jobs yet")


def a_line(steps, name="a line"):
    return fleet.Job(
        name=name,
        model=lambda: torch.nn.Linear(4, 1),
        data=lambda: [(torch.ones(8, 4), torch.ones(8, 1))],
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=steps,
    )


def test_results(tmp_path):
    results = fleet.run([a_line(5)], devices=["cpu"], budget="64MiB", host="64MiB", progress=None)
    page = page_of(tmp_path, results)
    assert page.table("Jobs").line("a line")[1:3] == ["done", "5"]
    assert page.says(f"{results.devices[0].num_units} units ran on 1 device")
    devices = page.table("Devices").line("cpu #0")
    assert devices[-2:] == [format_bytes(results.devices[0].peak_bytes), "64.0 MiB"]
    assert page.table("What ran").lines[0][1:3] == devices[-2:]
    assert page.table("Tier traffic").line("cpu #0")[1] == format_bytes(results.devices[0].parked_bytes)


def test_a_fleet_of_many_units_and_jobs_makes_a_small_page(tmp_path):
    units = [
        (f"job {number % 900}", number % 80, number * 1e-3, number * 1e-3 + 0.07, 0.001) for number in range(60_000)
    ]
    jobs = [(f"job {number}", "done", "y" * 100_000) for number in range(900)]
    folder = write_run(tmp_path / "runs", units, jobs, {f"job {number}": [1.0] * 50 for number in range(900)})
    path = report.write_html(tmp_path / "run.html", folder)[0]
    assert path.stat().st_size < 2_000_000
    page = Page(path)
    assert page.says("16 further devices are not shown")
    assert len(page.table("Jobs").lines) == 200
    assert page.table("Jobs").caption.endswith("700 more are left out.")


def test_more_jobs_than_a_chart_has_groups(tmp_path):
    units = [(f"job {number}", 0, number, number + 1.0, 0.0) for number in range(4500)]
    report.save(tmp_path / "kept", write_run(tmp_path / "runs", units))
    page = page_of(tmp_path, tmp_path / "kept")
    titles = [title.text for svg in page.svgs for title in svg.iter("title")]
    assert "job 3997: 1.0 s" in titles
    assert "further jobs: 8 min" in titles


def test_units_that_are_none_are_passed_over(tmp_path):
    folder = write_run(tmp_path / "runs", UNITS[:1])
    good = json.loads((folder / "units.jsonl").read_text().splitlines()[0])
    bad = [{**good, "end_s": float("nan")}, {**good, "start_s": "now"}, {"job": "a"}, [1, 2], None]
    (folder / "units.jsonl").write_text("".join(json.dumps(unit) + "\n" for unit in [good, *bad]))
    assert page_of(tmp_path, folder).says("1 unit ran on 1 device within 1.0 s")


def _rounded(duration_s):
    """Return what a page may say: it subtracts times of day, which have a quarter of a microsecond."""
    return {format_duration(duration_s + shift_s) for shift_s in (-1e-5, 0.0, 1e-5)}


def test_figures_of_a_resumed_fleet_add_up(tmp_path):
    options = {"devices": ["cpu"], "budget": "64MiB", "host": "64MiB", "progress": None}
    jobs = [a_line(3), a_line(5, "another line")]
    runs = [fleet.run(jobs[:num], run_dir=tmp_path / "run", resume=num > 1, **options) for num in (1, 2)]
    num_units, compute_s, stall_s = (
        sum(getattr(results.devices[0], name) for results in runs) for name in ("num_units", "compute_s", "stall_s")
    )
    assert 0 < runs[1].devices[0].num_units < num_units
    page = page_of(tmp_path, runs[1])
    devices = page.table("Devices")
    assert devices.line("cpu #0")[1] == f"{num_units:,}"
    assert devices.line("cpu #0")[2] in _rounded(compute_s)
    assert "peaks and traffic are of the last process" in devices.caption
    assert page.says(f"{num_units} units ran on 1 device")
    assert any(page.says(f"and took {text} in all") for text in _rounded(compute_s + stall_s))
    from_folder = page_of(tmp_path, tmp_path / "run")
    assert from_folder.table("Devices").line("device 0")[1:] == devices.line("cpu #0")[1:5]
    for either in (page, from_folder):
        assert either.table("Jobs").column("steps") == ["3", "5"]
    assert read_losses(tmp_path / "run") == {name: list(result.losses) for name, result in runs[1].items()}
