"""A long random campaign over the tiers: put, prefetch, get, release and drop under random faults.

    python -m benchmarks.soak_tiers --cycles 10000 --json benchmarks/results/soak_tiers.json

Never a wrong byte, never a leaked handle or file, bounded memory; the figures say how many faults were met.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import Row, parser, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tiers"))
from random_cycles import run_cycles  # the campaign and the test share one driver

_CYCLES_PER_SEED = 200


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--cycles", type=int, default=10_000)
    settings = options.parse_args(arguments)
    figures: Counter[str] = Counter()
    start_s = time.monotonic()
    files_before = len(os.listdir("/proc/self/fd"))
    memory_bytes = []
    for seed in range(-(-settings.cycles // _CYCLES_PER_SEED)):
        figures.update(run_cycles(seed, min(_CYCLES_PER_SEED, settings.cycles), settings.disk))
        memory_bytes.append(_resident_bytes())
    figures["num_leaked_files"] = len(os.listdir("/proc/self/fd")) - files_before
    figures["resident_bytes_after_first"] = memory_bytes[0]
    figures["resident_bytes_at_end"] = memory_bytes[-1]
    figures["duration_s"] = round(time.monotonic() - start_s)
    for name, value in sorted(figures.items()):
        print(f"{name}: {value}")
    rows = [Row(name="tiers under random faults", metric=name, value=value, unit="") for name, value in figures.items()]
    leaks = {name: figures[name] for name in ("num_wrong", "num_live_handles", "used_bytes", "num_leaked_files")}
    write(settings.json, {"cycles": settings.cycles, "cycles_per_seed": _CYCLES_PER_SEED}, rows)
    if any(leaks.values()):
        raise SystemExit(f"the campaign failed: {leaks}")
    return dict(figures)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
