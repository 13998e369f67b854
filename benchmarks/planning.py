"""How long `penstock.remat.optimize` takes for architectures of model libraries, beside their step.

Each is small and made from a configuration (`benchmarks.zoo`), with two samples, and planned once, for 0.8 of what its
plain step takes beside parameters and gradients. The time is that until the first planned step can run: to capture,
measure and plan it. Models whose step is not one graph are planned after their first run, and left out here; so are
those that cannot keep the budget.

Run it with ``python -m benchmarks.planning --json planning.json``.
"""

import gc
import random
import time
import warnings
from statistics import median
from typing import Any

import torch

from benchmarks import zoo
from benchmarks.common import Row, parser, show, write
from penstock import probe, remat
from penstock.errors import BudgetError

_SHARE = 0.8


def planning_s(architecture: zoo.Architecture) -> tuple[float, float, int]:
    """Return the seconds of planning and of a plain step, and the number of operators. Raises what planning raises."""
    torch.manual_seed(0)
    model, batch = architecture.make(), architecture.make_batch(2)

    def step(inputs: Any) -> torch.Tensor:
        return zoo.loss_of(model(**inputs))

    for _ in range(2):
        start_s = time.perf_counter()
        step(batch).backward()
        step_s = time.perf_counter() - start_s
    taken_bytes = probe.peak_bytes(lambda: step(batch).backward()).activation_bytes
    state_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    start_s = time.perf_counter()
    planned = remat.optimize(step, [batch], int(_SHARE * taken_bytes) + state_bytes)
    took_s = time.perf_counter() - start_s
    num_operators = len(planned.plan.problem.operators)
    planned.close()
    return took_s, step_s, num_operators


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--limit-s", type=float, default=300.0, help="of the whole; the order is random")
    settings = options.parse_args(arguments)
    architectures = [architecture for architecture in zoo.all_architectures().values() if architecture.is_installed]
    random.Random(0).shuffle(architectures)
    rows, lines, num_left_out = list[Row](), list[list[str]](), 0
    end_s = time.monotonic() + settings.limit_s
    for architecture in architectures:
        if time.monotonic() > end_s or (settings.quick and rows):
            break
        gc.collect()
        try:
            with warnings.catch_warnings(action="ignore"):
                took_s, step_s, num_operators = planning_s(architecture)
        except (BudgetError, ValueError):
            num_left_out += 1
            continue
        rows.append(Row(name=architecture.name, metric="planning", value=took_s, unit="s"))
        rows.append(Row(name=architecture.name, metric="operators", value=num_operators, unit=""))
        lines.append([architecture.name, f"{num_operators:,}", f"{step_s * 1e3:.0f} ms", f"{took_s:.1f} s"])
    took = [row.value for row in rows if row.metric == "planning"]
    rows += [
        Row(name="architectures", metric="planned", value=len(took), unit=""),
        Row(name="architectures", metric="left out", value=num_left_out, unit=""),
        Row(name="architectures", metric="median planning", value=median(took), unit="s"),
        Row(name="architectures", metric="longest planning", value=max(took), unit="s"),
    ]
    show("planning", ["", "operators", "plain step", "planning"], lines)
    print(f"{len(took)} architectures: {median(took):.2f} s (median), {max(took):.1f} s at most", flush=True)
    write(settings.json, {"share": _SHARE, "limit_s": settings.limit_s}, rows)
    return rows


if __name__ == "__main__":
    main()
