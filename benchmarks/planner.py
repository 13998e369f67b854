"""Extra time that plans cost at several budgets, beside optimum and lower bound, and the planner's own time.

Planned are a GPT of 8 x 256, by method and without refinement; small steps, next to the optimum that a solver finds;
and a large graph, next to the lower bound that `remat.least_extra_s` names.

Planned figures only: operator times are a roofline of 60 GFLOP/s and 5 GB/s, the same on every machine,
and the lanes carry 100 MB/s (those of small steps 2 GB/s). Times of the planner itself are the clock's.

Run it with ``python -m benchmarks.planner --json planner.json``.
"""

import random
import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from benchmarks.common import Row, parser, rerun_by_checkpoints, show, write
from benchmarks.optimal import fastest
from penstock import remat
from penstock.errors import BudgetError
from penstock.testing import GPT

MIB = 2**20
FLOPS, BYTES_PER_S, LANE_BYTES_PER_S = 60e9, 5e9, 100e6
SMALL_LANE_BYTES_PER_S = 2e9
"""Bandwidth of the lanes of small steps: a storage takes 4 to 32 ms, an operator 1 to 100."""
WIDTH, BATCH, LENGTH = 256, 8, 256
TOKENS = BATCH * LENGTH
METHODS: tuple[remat.Method, ...] = ("recompute", "hybrid")
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Budgets of small steps, from the smallest that the planner finds to all kept."""
BUDGETS_MIB = (240.0, 160.0, 100.0, 64.4, 58.0, 51.5)


def captured(num_layers: int) -> remat.RematProblem:
    """Return the captured step of a GPT with roofline times and no static bytes."""
    torch.manual_seed(0)
    model = GPT(num_layers=num_layers, width=WIDTH, num_heads=4, context=LENGTH)
    tokens = torch.randint(256, (BATCH, LENGTH))
    problem = remat.optimize(model, [tokens, tokens], None).plan.problem
    sizes = [storage.size_bytes for storage in problem.storages]
    operators = tuple(
        replace(operator, duration_s=_roofline_s(operator, sizes), workspace_bytes=0) for operator in problem.operators
    )
    return replace(
        problem,
        operators=operators,
        static_bytes=0,
        out_bandwidth_bytes_per_s=LANE_BYTES_PER_S,
        in_bandwidth_bytes_per_s=LANE_BYTES_PER_S,
    )


def _roofline_s(operator: remat.Operator, sizes: list[int]) -> float:
    """Return an operator's seconds from its sizes: a matrix product has a token dimension on at least one side."""
    written = sum(sizes[output] for output in operator.outputs)
    read = sum(sizes[storage] for storage in operator.inputs)
    flops = 0.0
    if operator.target in ("aten.addmm.default", "aten.mm.default"):
        if written >= 4 * TOKENS * WIDTH:  # tokens x columns, from tokens x rows
            flops = 2.0 * (written / 4) * max(WIDTH, read / 4 / TOKENS)
        else:  # a weight's gradient: two inputs over all tokens
            flops = 2.0 * TOKENS * written / 4
    if "scaled_dot_product" in operator.target:
        flops = 4.0 * TOKENS * WIDTH * LENGTH * (2.5 if "backward" in operator.target else 1.0)
    return max(flops / FLOPS, 3 * written / BYTES_PER_S)


def network(seed: int, num_forward: int) -> remat.RematProblem:
    """Return a step of a random network: a chain with skips that join it again, of cheap and expensive operators."""
    choose = random.Random(seed)
    inputs: list[tuple[int, ...]] = []
    for index in range(num_forward):
        skips = {choose.randrange(max(0, index - 5), index)} if index > 1 and choose.random() < 0.35 else set()
        inputs.append(tuple({index - 1} | skips) if index else ())
    sizes = [choose.choice((8, 16, 32, 64)) * MIB for _ in range(num_forward - 1)] + [4]
    operators = [
        remat.Operator(
            name=f"forward {index}",
            target="any",
            inputs=inputs[index],
            outputs=(index,),
            duration_s=choose.choice((0.001, 0.002, 0.01, 0.05)),
            workspace_bytes=choose.choice((0, 0, 8 * MIB)),
        )
        for index in range(num_forward)
    ]
    storages = [
        remat.Storage(name=f"s{index}", size_bytes=size, producer=index, is_output=index == num_forward - 1)
        for index, size in enumerate(sizes)
    ]
    gradients: dict[int, int] = {}
    for index in reversed(range(1, num_forward)):
        read = (index,) if choose.random() < 0.3 else inputs[index]  # as tanh reads its output, and a product its input
        own = (gradients[index],) if index in gradients else ()
        result, read = [], read + own
        for tensor in inputs[index]:
            if tensor in gradients:
                read += (gradients[tensor],)  # the new gradient is added to what is there
            gradients[tensor] = len(storages)
            result.append(len(storages))
            storages.append(remat.Storage(name=f"g{tensor}", size_bytes=sizes[tensor], producer=len(operators)))
        operators.append(
            remat.Operator(
                name=f"backward {index}",
                target="any",
                inputs=read,
                outputs=tuple(result),
                duration_s=2 * operators[index].duration_s,
                workspace_bytes=0,
            )
        )
    return remat.RematProblem(operators=tuple(operators), num_forward=num_forward, storages=tuple(storages))


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, default=300, help="of the large graph")
    options.add_argument("--limit-s", type=float, default=300.0, help="of the solver, for each budget")
    settings = options.parse_args(arguments)
    rows: list[Row] = []
    first = captured(2 if settings.quick else 8)
    _curve(first, rows)
    num_networks = {8: 1} if settings.quick else {8: 5, 12: 5, 16: 5, 20: 2}
    for method in METHODS:
        _beside_optimum(num_networks, method, settings.limit_s, rows)
    _large(first if settings.quick else captured(settings.layers), rows)
    write(settings.json, {"flops": FLOPS, "bytes_per_s": BYTES_PER_S, "lane_bytes_per_s": LANE_BYTES_PER_S}, rows)
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
                plan = remat.plan(problem, int(budget_mib * MIB), **options)
            except BudgetError:
                line.append("refused")
                continue
            line.append(f"{plan.extra_s / plan.step_s:.2%}")
            rows.append(
                Row(name=name, metric=f"extra time at {budget_mib:g} MiB", value=plan.extra_s / plan.step_s, unit="")
            )
        for method in METHODS:
            least = remat.least_extra_s(problem, int(budget_mib * MIB), method=method) / problem.step_s
            line.append(f"{least:.2%}")
            rows.append(Row(name=method, metric=f"bound of extra time at {budget_mib:g} MiB", value=least, unit=""))
        lines.append(line)
    again = set(rerun_by_checkpoints(problem, [f"blocks.{index}" for index in range(100)]))
    extra = (
        sum(operator.duration_s for operator in problem.operators[: problem.num_forward] if operator.name in again)
        / problem.step_s
    )
    rows.append(Row(name="checkpoint per block", metric="extra time", value=extra, unit="of the step"))
    print(f"a checkpoint per block recomputes {extra:.1%} of the step")
    for name in ("recompute", "hybrid"):
        smallest = remat.smallest_budget_bytes(problem, method=name)  # type: ignore[arg-type]
        rows.append(Row(name=name, metric="smallest budget", value=smallest, unit="bytes"))
        print(f"smallest budget, {name}: {smallest / MIB:.1f} MiB")
    bounds = [f"bound, {method}" for method in METHODS]
    show("extra operator time by budget in MiB", ["budget", *ways, *bounds], lines)


def _beside_optimum(num_networks: dict[int, int], method: remat.Method, limit_s: float, rows: list[Row]) -> None:
    """Compare plans with the solver's optimum and our bound, for random networks by number of forward operators."""
    lines, all_steps, all_extras, all_bounds, num_unproven = [], [], [], [], 0
    for num_forward, num_each in num_networks.items():
        over_step, over_extra, over_bound, gaps = [], [], [], []
        for seed in range(num_each):
            problem = network(seed, num_forward).scaled(out=SMALL_LANE_BYTES_PER_S, back=SMALL_LANE_BYTES_PER_S)
            low = remat.smallest_budget_bytes(problem, method=method)
            high = remat.plan(problem, 2**62).keep_all_peak_bytes
            for share in SHARES:
                budget = int(low + share * (high - low))
                best = fastest(problem, budget, limit_s, method=method)
                plan = remat.plan(problem, budget, method=method)
                bound_s = remat.least_extra_s(problem, budget, method=method)
                assert best is not None, "the solver found no plan where the planner did"
                assert bound_s <= best.extra_s + 1e-9, f"the bound {bound_s} is above the optimum {best.extra_s}"
                over_step.append((plan.step_s + plan.extra_s) / (plan.step_s + best.extra_s))
                over_bound.append((plan.step_s + best.extra_s) / (plan.step_s + bound_s))
                if best.extra_s > 0:
                    over_extra.append(plan.extra_s / best.extra_s)
                gaps.append((best.extra_s - best.bound_s) / (plan.step_s + best.extra_s))
        unproven = sum(gap > 1e-3 for gap in gaps)
        num_unproven += unproven
        all_steps += over_step
        all_extras += over_extra
        all_bounds += over_bound
        lines.append(
            [
                str(len(problem.operators)),
                str(len(over_step)),
                f"{fmean(over_step):.3f}",
                f"{max(over_step):.3f}",
                f"{fmean(over_extra):.3f}",
                f"{unproven}, {max(gaps):.1%}",
                f"{fmean(over_bound):.3f}, {max(over_bound):.3f}",
            ]
        )
        print(f"{len(problem.operators)} operators, {method}: step over optimum {fmean(over_step):.3f}", flush=True)
    rows.append(Row(name=method, metric="step over the optimum's, mean", value=fmean(all_steps), unit=""))
    rows.append(Row(name=method, metric="step over the optimum's, worst", value=max(all_steps), unit=""))
    rows.append(Row(name=method, metric="extra time over the optimum's, mean", value=fmean(all_extras), unit=""))
    rows.append(Row(name=method, metric="optimum's step over the bound's, mean", value=fmean(all_bounds), unit=""))
    rows.append(Row(name=method, metric="optimum's step over the bound's, worst", value=max(all_bounds), unit=""))
    rows.append(Row(name=method, metric="budgets not proven optimal", value=num_unproven, unit=""))
    header = [
        "operators",
        "budgets",
        "step, mean",
        "worst",
        "extra, mean",
        "unproven, largest gap",
        "optimum over bound",
    ]
    show(f"{method}: plans over the optimum, and the optimum over the bound", header, lines)


def _large(problem: remat.RematProblem, rows: list[Row]) -> None:
    keep_all_bytes = remat.plan(problem, 2**62).keep_all_peak_bytes
    problem = problem.scaled(out=2 * LANE_BYTES_PER_S, back=2 * LANE_BYTES_PER_S)
    budgets = [int(keep_all_bytes * (0.12 + 0.044 * step)) for step in range(20)]
    for method in METHODS:
        for what, asked in (("one budget", budgets[8:9]), ("20 budgets", budgets)):
            start_s = time.perf_counter()
            plans = remat.pareto(problem, asked, method=method)
            taken_s = time.perf_counter() - start_s
            accepted = sum(plan is not None for plan in plans)
            over = [
                (plan.step_s + plan.extra_s) / (plan.step_s + remat.least_extra_s(problem, budget, method=method))
                for budget, plan in zip(asked, plans, strict=True)
                if plan is not None
            ]
            rows.append(Row(name=f"{method}, {what}", metric="planning", value=taken_s, unit="s"))
            rows.append(Row(name=f"{method}, {what}", metric="step over the bound's, worst", value=max(over), unit=""))
            print(
                f"{len(problem.operators)} operators, {method}, {what} ({accepted} accepted): {taken_s:.1f} s; "
                f"step over the bound's {fmean(over):.4f}, worst {max(over):.4f}"
            )


if __name__ == "__main__":
    main()
