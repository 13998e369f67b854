"""One table for all ranks of a machine: the memory that it takes, and the rows a second that each rank reads.

For each number of ranks, in turn: processes of one gloo group open the same file and read mini-batches at the same
time, one thread each. "Together" they have one budget for all; "apart" each has a table of its own with that budget, as
without `group=`, which shows what their number costs by itself.

- memory: what all ranks together take more than before they opened the table (``Pss``, which counts a page that
  several processes map once), with as many rows read in advance as the budget allows.
- held rows: mini-batches whose rows are in memory; rows a second of a rank, and of its processor time.
- disk: mini-batches of each rank's own rows that are not in memory, past the page cache; rows a second of all ranks.
- same rows: all ranks read the same cold rows; how many rows the disk gave for each that was wanted.

Run it with ``python -m benchmarks.unified_ranks --disk /nvme --json unified-ranks.json``.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from benchmarks.common import Row, parser, show, write
from penstock import unified
from penstock.units import format_bytes

WIDTH = 256
"""Numbers in a row, of 4 bytes."""
BATCH_ROWS = 10_000
ONE = "1 process"


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--rows", type=int, default=1_500_000)
    options.add_argument("--host", type=int, default=512 * 2**20, help="bytes of memory for the table")
    options.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # a process of the benchmark itself
    options.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.rows, settings.host, settings.ranks = 1, 60_000, 32 * 2**20, [2]
    if settings.rank is not None:
        _work(settings)
        return
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="penstock-ranks-") as folder:
        file = Path(folder) / "rows.features"
        unified.write_features(file, made_rows(settings.rows))
        results: dict[str, list[list[dict[str, Any]]]] = {}
        for number in range(settings.rounds):
            for count in (1, *settings.ranks):
                for how in ("together", "apart") if count > 1 else ("",):
                    meet = Path(folder) / f"{number}-{count}-{how}"
                    name = f"{count} ranks {how}" if how else ONE
                    results.setdefault(name, []).append(_together(settings, file, meet, count, how))
            print(f"round {number + 1} of {settings.rounds}", flush=True)
    rows = _rows(results)
    _show(rows, settings)
    write(settings.json, {"rows": settings.rows, "row_bytes": 4 * WIDTH, "host": settings.host}, rows)


def made_rows(num_rows: int) -> Any:  # any: an iterator of tensors
    """Yield rows of ``WIDTH`` numbers in blocks."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, num_rows, 16_384):
        yield torch.rand(min(16_384, num_rows - start), WIDTH, generator=generator)


def _together(settings: argparse.Namespace, file: Path, meet: Path, count: int, how: str) -> list[dict[str, Any]]:
    """Return the figures of each rank."""
    command = [
        sys.executable, "-m", "benchmarks.unified_ranks", "--size", str(count), "--file", str(file),
        "--meet", str(meet),
        "--rows", str(settings.rows), "--host", str(settings.host), *(["--apart"] if how == "apart" else []),
    ]  # fmt: skip
    return answers_of(command, [{} for _ in range(count)])


def answers_of(command: list[str], environments: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Run the command as so many ranks, each with more in its environment, and return what each printed last."""
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=os.environ | more)
        for rank, more in enumerate(environments)
    ]
    answers = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit("a rank failed")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def _work(settings: argparse.Namespace) -> None:
    """Be one rank: open the table with the others, read, and print figures."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(settings.meet), settings.size)
    distributed.init_process_group("gloo", store=store, rank=settings.rank, world_size=settings.size)
    with unified.TieredFeatures(settings.file, host="16MiB") as tried:
        tried[torch.arange(BATCH_ROWS)]  # libraries are loaded before memory is measured
    distributed.barrier()
    before = _pss_bytes()
    group = distributed.group.WORLD if settings.size > 1 and not settings.apart else None
    features = unified.TieredFeatures(settings.file, host=settings.host, group=group)  # the first rows are held
    num_held = len(features.plan.host_rows)
    own = torch.Generator().manual_seed(settings.rank)
    shared = torch.Generator().manual_seed(1000)

    def held() -> torch.Tensor:
        return torch.randint(num_held, (BATCH_ROWS,), generator=own)

    def cold(generator: torch.Generator = own) -> torch.Tensor:
        return torch.randint(num_held, settings.rows, (BATCH_ROWS // 10,), generator=generator)

    answer = {"held": _timed(features, 15 * [held() for _ in range(60)])}
    _forget(settings.file)
    answer["disk"] = _timed(features, [cold() for _ in range(100)])
    _forget(settings.file)
    features.reset_statistics()
    wanted = [cold(shared) for _ in range(20)]
    answer["same"] = _timed(features, wanted)
    counts = features.statistics()
    answer["same"]["disk_rows"] = counts.disk_rows
    answer["same"]["wanted_rows"] = counts.disk_rows + counts.shared_rows
    ahead = features[torch.arange((features.in_flight_bytes or 0) // features.row_bytes)]
    distributed.barrier()
    answer["memory"] = {"bytes": _pss_bytes() - before, "planned": features.host_bytes}
    distributed.barrier()  # nobody leaves while another counts pages
    del ahead
    print(json.dumps(answer))
    distributed.destroy_process_group()


def _timed(features: unified.TieredFeatures, batches: list[torch.Tensor]) -> dict[str, float]:
    features[batches[0]]
    distributed.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for batch in batches:
        features[batch]
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    distributed.barrier()
    return {"rows": sum(len(batch) for batch in batches), "wall_s": wall_s, "cpu_s": cpu_s}


def _forget(file: Path) -> None:
    """Take a file's pages out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    distributed.barrier()


def _pss_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no Pss; this benchmark needs Linux")


def _rows(results: dict[str, list[list[dict[str, Any]]]]) -> list[Row]:
    """Return medians over rounds, each beside those of the smallest number of ranks in the same round."""
    figures = {
        ("memory of all ranks", "bytes"): lambda ranks: sum(rank["memory"]["bytes"] for rank in ranks),
        ("held rows, of each rank", "rows/s"): lambda ranks: median(
            rank["held"]["rows"] / rank["held"]["wall_s"] for rank in ranks
        ),
        ("held rows, of a second of processor time", "rows/s"): lambda ranks: (
            sum(rank["held"]["rows"] for rank in ranks) / sum(rank["held"]["cpu_s"] for rank in ranks)
        ),
        ("rows from the disk, of all ranks", "rows/s"): lambda ranks: (
            sum(rank["disk"]["rows"] for rank in ranks) / max(rank["disk"]["wall_s"] for rank in ranks)
        ),
        ("rows that the disk gave, for each that a rank wanted", "share"): lambda ranks: (
            sum(rank["same"]["disk_rows"] for rank in ranks)
            / max(1, sum(rank["same"]["wanted_rows"] for rank in ranks))
        ),
    }
    rows = []
    for (metric, unit), figure in figures.items():
        for name, rounds in results.items():
            values = [figure(ranks) for ranks in rounds]
            for peer in (ONE, name.replace("together", "apart")):
                if peer == name or peer not in results:
                    continue
                beside = [figure(ranks) for ranks in results[peer]]
                ratio = median(value / other for value, other in zip(values, beside, strict=True))
                row = Row(name=name, metric=metric, value=median(values), unit=unit, peer=peer, ratio=ratio)
                rows.append(row)
            if name == ONE:
                rows.append(Row(name=name, metric=metric, value=median(values), unit=unit))
    return rows


def _show(rows: list[Row], settings: argparse.Namespace) -> None:
    lines = []
    for row in rows:
        value = format_bytes(int(row.value)) if row.unit == "bytes" else f"{row.value:,.3g} {row.unit}"
        lines.append([row.metric, row.name, value, "" if row.ratio is None else f"{row.ratio:.2f} of {row.peer}"])
    title = f"{settings.rows:,} rows of {format_bytes(4 * WIDTH)}, host={format_bytes(settings.host)}"
    show(title, ["figure", "ranks", "median", "beside"], lines)


if __name__ == "__main__":
    main()
