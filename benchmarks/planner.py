"""What the planner makes of a GPT of 8 x 256 at several budgets, by method and without refinement; and a large graph.

Planned figures only: operator times are a roofline of 60 GFLOP/s and 5 GB/s, the same on every machine,
and the lanes carry 100 MB/s. Times of the planner itself are the clock's.
"""

import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import Row, parser, show, write
from penstock import remat
from penstock.errors import BudgetError
from penstock.testing import GPT

MIB = 2**20
FLOPS, BYTES_PER_S, LANE_BYTES_PER_S = 60e9, 5e9, 100e6
WIDTH, BATCH, LENGTH = 256, 8, 256
TOKENS = BATCH * LENGTH
BUDGETS_MIB = (240.0, 160.0, 100.0, 64.4, 58.0, 51.5)


def captured(num_layers: int) -> remat.RematProblem:
    """The step of a GPT with roofline times, static bytes left out."""
    torch.manual_seed(0)
    model = GPT(num_layers=num_layers, width=WIDTH, num_heads=4, context=LENGTH)
    tokens = torch.randint(256, (BATCH, LENGTH))
    problem = remat.optimize(model, [tokens, tokens], None).plan.problem
    sizes = [one.size_bytes for one in problem.storages]
    operators = tuple(replace(one, duration_s=_roofline_s(one, sizes), workspace_bytes=0) for one in problem.operators)
    return replace(
        problem,
        operators=operators,
        static_bytes=0,
        out_bandwidth_bytes_per_s=LANE_BYTES_PER_S,
        in_bandwidth_bytes_per_s=LANE_BYTES_PER_S,
    )


def _roofline_s(operator: remat.Operator, sizes: list[int]) -> float:
    """Matrix products have a token dimension on one side at least; sums of sizes tell the rest."""
    made = sum(sizes[one] for one in operator.outputs)
    read = sum(sizes[one] for one in operator.inputs)
    flops = 0.0
    if operator.target in ("aten.addmm.default", "aten.mm.default"):
        if made >= 4 * TOKENS * WIDTH:  # tokens x columns, from tokens x rows
            flops = 2.0 * (made / 4) * max(WIDTH, read / 4 / TOKENS)
        else:  # a weight's gradient: two inputs over all tokens
            flops = 2.0 * TOKENS * made / 4
    if "scaled_dot_product" in operator.target:
        flops = 4.0 * TOKENS * WIDTH * LENGTH * (2.5 if "backward" in operator.target else 1.0)
    return max(flops / FLOPS, 3 * made / BYTES_PER_S)


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, default=300, help="of the large graph")
    given = options.parse_args(arguments)
    rows: list[Row] = []
    _curve(captured(2 if given.quick else 8), rows)
    _large(captured(4 if given.quick else given.layers), rows)
    write(given.json, {"flops": FLOPS, "bytes_per_s": BYTES_PER_S, "lane_bytes_per_s": LANE_BYTES_PER_S}, rows)
    return rows


def _curve(problem: remat.RematProblem, rows: list[Row]) -> None:
    keep_all_bytes = remat.plan(problem, 2**62).keep_all_peak_bytes
    print(f"{len(problem.operators)} operators, {keep_all_bytes / MIB:.2f} MiB if all is kept")
    ways: dict[str, dict[str, Any]] = {
        "recompute": {"method": "recompute"},
        "swap": {"method": "swap"},
        "hybrid": {"method": "hybrid"},
        "recompute, unrefined": {"method": "recompute", "refine": False},
        "hybrid, unrefined": {"method": "hybrid", "refine": False},
    }
    lines = []
    for budget_mib in BUDGETS_MIB:
        line = [f"{budget_mib:g}"]
        for name, options in ways.items():
            try:
                made = remat.plan(problem, int(budget_mib * MIB), **options)
            except BudgetError:
                line.append("refused")
                continue
            line.append(f"{made.extra_s / made.step_s:.2%}")
            rows.append(
                Row(name=name, metric=f"extra time at {budget_mib:g} MiB", value=made.extra_s / made.step_s, unit="")
            )
        lines.append(line)
    for name in ("recompute", "hybrid"):
        smallest = remat.smallest_budget_bytes(problem, method=name)  # type: ignore[arg-type]
        rows.append(Row(name=name, metric="smallest budget", value=smallest, unit="bytes"))
        print(f"smallest budget, {name}: {smallest / MIB:.1f} MiB")
    show("extra operator time by budget in MiB", ["budget", *ways], lines)


def _large(problem: remat.RematProblem, rows: list[Row]) -> None:
    keep_all_bytes = remat.plan(problem, 2**62).keep_all_peak_bytes
    problem = problem.scaled(out=2 * LANE_BYTES_PER_S, back=2 * LANE_BYTES_PER_S)
    budgets = [int(keep_all_bytes * (0.12 + 0.044 * step)) for step in range(20)]
    for method in ("recompute", "hybrid"):
        for what, asked in (("one budget", budgets[8:9]), ("20 budgets", budgets)):
            start_s = time.perf_counter()
            made = remat.pareto(problem, asked, method=method)  # type: ignore[arg-type]
            taken_s = time.perf_counter() - start_s
            accepted = sum(one is not None for one in made)
            rows.append(Row(name=f"{method}, {what}", metric="planning", value=taken_s, unit="s"))
            print(f"{len(problem.operators)} operators, {method}, {what} ({accepted} accepted): {taken_s:.1f} s")


if __name__ == "__main__":
    main()
