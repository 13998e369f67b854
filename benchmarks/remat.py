"""Peaks and step times of plans, against eager training, checkpoints and PyTorch's activation_memory_budget.

For each model: peaks measured and predicted at budgets that leave 90% to 20% of eager's activation peak, gradients
compared bit for bit, the time of steps at the peak of a checkpoint per block, the smallest budget of each method, and
the maximum batch at eager's peak. Losses and gradients come from the node-by-node runner.

Run it with ``python -m benchmarks.remat --disk /nvme --json remat.json``.
"""

import copy
import functools
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from benchmarks.common import Row, interleaved, paired_ratio, parser, rerun_by_checkpoints, show, write
from benchmarks.models import WORKLOADS, Workload, checkpointed, make
from penstock import probe, remat
from penstock.errors import BudgetError
from penstock.units import format_bytes

QUICK_MODELS = ("BERT", "U-Net")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
METHODS: tuple[remat.Method, ...] = ("recompute", "swap", "hybrid")
LINKS = (50e6, 200e6, 800e6, 3200e6)
"""Bytes per second out and back, for plans only."""
RATIOS = (0.5, 0.25, 0.1, 0.0)
"""Values of activation_memory_budget."""
SOLVERS = ("greedy", "ilp", "dp_knapsack_sliding_hirschberg")
"""Further solvers of it, tried at one value."""


@dataclass(slots=True)
class Trainer:
    """A model with gradients, and a step of it."""

    module: nn.Module
    batch: tuple[torch.Tensor, ...]
    step: Callable[..., torch.Tensor]

    def __call__(self) -> torch.Tensor:
        """Run forward and backward with gradients zeroed in place and the generator set, for equal random numbers."""
        torch.manual_seed(1)
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        loss = self.step(*self.batch)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def peak(self) -> probe.PeakReport:
        self()
        gc.collect()
        return probe.peak_bytes(self, device=self.batch[0].device)


def trainer(workload: Workload, device: str, step_of: Callable[[nn.Module], Callable[..., Any]], batch: int) -> Trainer:
    module, tensors = make(workload.name, batch)
    module = module.to(device)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Trainer(module, tuple(tensor.to(device) for tensor in tensors), step_of(module))


class Bench:
    """One model, measured."""

    def __init__(self, workload: Workload, device: str, disk: Path, quick: bool):
        self.workload, self.device, self.disk, self.quick = workload, device, disk, quick
        self.batch = max(2, workload.batch // 4) if quick else workload.batch
        self.rows: list[Row] = []
        self.eager = trainer(workload, device, lambda module: module, self.batch)
        self.loss = self.eager()
        self.expected = [gradient.clone() for gradient in self.eager.gradients()]
        self.eager()
        self.is_repeatable = self._equals(self.eager)
        self.eager_peak = self.eager.peak()
        start_s = time.perf_counter()
        module, batch = copy.deepcopy(self.eager.module), self.eager.batch
        self.problem = remat.optimize(module, batch, None, disk=disk).plan.problem
        self.problems = {self.batch: self.problem}
        self.note("capture and profile", time.perf_counter() - start_s, "s")
        self.note("operators", len(self.problem.operators), "")
        self.note("activation peak", self.eager_peak.activation_bytes, "bytes", method="eager")

    def note(
        self, metric: str, value: float, unit: str, *, method: str = "Penstock", ratio: float | None = None
    ) -> None:
        self.rows.append(
            Row(
                name=f"{self.workload.name}, {method}", metric=metric, value=value, unit=unit, peer="eager", ratio=ratio
            )
        )

    def planned(self, budget_bytes: int, method: str) -> tuple[Trainer, remat.OptimizedStep]:
        steps: list[remat.OptimizedStep] = []

        def optimized(module: nn.Module) -> remat.OptimizedStep:
            disk = self.disk if method != "recompute" else None
            steps.append(
                remat.optimize(module, self.eager.batch, budget_bytes, method=method, disk=disk, profile=self.problem)
            )
            return steps[0]

        trained = trainer(self.workload, self.device, optimized, self.batch)
        return trained, steps[0]

    def budgets(self, method: str) -> list[tuple[float, int, int, bool]]:
        """Measure each accepted budget: the share, the predicted and measured peak, and whether gradients are equal."""
        outcomes = []
        for share in SHARES if not self.quick else SHARES[4:5]:
            budget = self.problem.static_bytes + int(share * self.eager_peak.activation_bytes)
            try:
                trained, step = self.planned(budget, method)
            except BudgetError:
                self.note(f"refused at {share:.0%}", budget, "bytes", method=method)
                continue
            report = trained.peak()
            measured = report.activation_bytes + self.problem.static_bytes
            is_equal = torch.equal(report.result, self.loss) and self._gives_equal_gradients(trained)
            outcomes.append((share, step.plan.peak_bytes, measured, is_equal))
            self.note(f"measured over budget at {share:.0%}", measured / budget, "", method=method)
            self.note(f"measured over predicted at {share:.0%}", measured / step.plan.peak_bytes, "", method=method)
            extra = step.plan.plan.extra_s / step.plan.plan.step_s
            self.note(f"planned extra operator time at {share:.0%}", extra, "of the step", method=method)
            self.note(f"gradients and loss equal at {share:.0%}", is_equal, "", method=method)
            del trained, step
            gc.collect()
        return outcomes

    def _gives_equal_gradients(self, trained: Trainer) -> bool:
        """Compare what ``made`` left; where eager differs from itself with several threads, both again on one."""
        if self.is_repeatable:
            return self._equals(trained)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self.eager()
            expected = [gradient.clone() for gradient in self.eager.gradients()]
            trained()
            return self._equals(trained, expected)
        finally:
            torch.set_num_threads(num_threads)

    def _equals(self, trained: Trainer, expected: list[torch.Tensor] | None = None) -> bool:
        pairs = zip(trained.gradients(), expected or self.expected, strict=True)
        return all(torch.equal(ours, two) for ours, two in pairs)

    def at_checkpoint(self, rounds: int) -> None:
        """Compare with a checkpoint per block at its measured peak: time, and planned extra operator seconds."""
        wrapped = trainer(self.workload, self.device, lambda module: checkpointed(self.workload, module), self.batch)
        report = wrapped.peak()
        self.note("activation peak", report.activation_bytes, "bytes", method="checkpoint per block")
        names = {module: name for name, module in self.eager.module.named_modules()}
        blocks = [names[parent.get_submodule(child)] for parent, child in self.workload.blocks(self.eager.module)]
        extra = self._extra(rerun_by_checkpoints(self.problem, blocks))
        self.note("extra operator time", extra, "of the step", method="checkpoint per block")
        budget = report.activation_bytes + self.problem.static_bytes
        steps: dict[str, Callable[[], Any]] = {"eager": self.eager, "checkpoint per block": wrapped}
        for method in ("recompute", "hybrid"):
            smallest = remat.smallest_budget_bytes(self.problem, method=method) - self.problem.static_bytes
            self.note("smallest activation peak", smallest, "bytes", method=method)
            try:
                trained, step = self.planned(budget, method)
            except BudgetError:
                continue
            steps[method] = trained
            extra = step.plan.plan.extra_s / step.plan.plan.step_s
            self.note("planned extra operator time at checkpoint's peak", extra, "of the step", method=method)
            trained()
        seconds = interleaved(steps, rounds=rounds, device=self.device)
        for method in list(steps)[1:]:
            ratio, low, high = paired_ratio(seconds[method], seconds["eager"])
            self.note("step time over eager's at checkpoint's peak", ratio, "", method=method)
            self.note("the same, 95% low", low, "", method=method)
            self.note("the same, 95% high", high, "", method=method)

    def pytorch(self) -> None:
        """Compare extra times with PyTorch's own knob, with boxed runners: at its peak, planned by it and by us."""
        tried = [("dp", ratio) for ratio in RATIOS] + [(solver, 0.25) for solver in SOLVERS]
        for solver, ratio in tried[1:2] if self.quick else tried:
            method = f"activation_memory_budget ({solver})"
            runs_again: list[str] = []
            try:
                peak_bytes = self._min_cut_peak(solver, ratio, _min_cut(runs_again, decomposes=False))
            except RuntimeError as error:  # batch norm's statistics are overwritten before it reads them again
                print(f"{self.workload.name}, {method} at {ratio}: {str(error).splitlines()[0][:80]}", flush=True)
                runs_again.clear()
                peak_bytes = self._min_cut_peak(solver, ratio, _min_cut([], decomposes=True))
                method += ", decomposed"
            self.note(f"activation peak at {ratio}", peak_bytes, "bytes", method=method)
            if runs_again:
                self.note(f"extra operator time at {ratio}", self._extra(runs_again), "of the step", method=method)
            for ours in ("recompute", "hybrid"):
                (plan,) = remat.pareto(self.problem, [peak_bytes + self.problem.static_bytes], method=ours)
                if plan is not None:
                    extra = plan.extra_s / plan.step_s
                    self.note(f"planned extra operator time at the peak of {solver}, {ratio}", extra, "", method=ours)

    def _min_cut_peak(self, solver: str, ratio: float, compiled: Callable[[nn.Module], Callable[..., Any]]) -> int:
        torch._dynamo.reset()
        gc.collect()
        setting = {"activation_memory_budget": ratio, "activation_memory_budget_solver": solver}
        with torch._functorch.config.patch(setting):
            return trainer(self.workload, self.device, compiled, self.batch).peak().activation_bytes

    def _extra(self, names: list[str]) -> float:
        """Return the share of the step that forward's operators of these names take."""
        seconds = {
            operator.name: operator.duration_s for operator in self.problem.operators[: self.problem.num_forward]
        }
        return sum(seconds.get(name, 0.0) for name in names) / self.problem.step_s

    def max_batch(self) -> None:
        """Find the largest batch whose plan fits eager's peak, from the plan of each batch, over eager's batch."""
        budget = self.problem.static_bytes + self.eager_peak.activation_bytes
        for method in METHODS:
            largest = step = self.batch
            while step >= max(1, self.batch // 4):
                if self._fits(self._of_batch(largest + step), budget, method):
                    largest += step
                else:
                    step //= 2
            self.note("largest batch at eager's peak", largest, "", method=method, ratio=largest / self.batch)

    def _of_batch(self, batch: int) -> remat.RematProblem:
        """Return the step on a batch of that size, captured and measured once."""
        if batch not in self.problems:
            module, tensors = make(self.workload.name, batch)
            tensors = tuple(tensor.to(self.device) for tensor in tensors)
            step = remat.optimize(module.to(self.device), tensors, None, disk=self.disk)
            self.problems[batch] = step.plan.problem
        return self.problems[batch]

    def _fits(self, problem: remat.RematProblem, budget_bytes: int, method: str) -> bool:
        return remat.pareto(problem, [budget_bytes], method=method, refine=False)[0] is not None

    def adapt(self) -> None:
        """Measure the planned extra time when something changes: the link's speed, the batch, the optimizer's state."""
        half = self.problem.static_bytes + self.eager_peak.activation_bytes // 2
        for rate in LINKS[1:2] if self.quick else LINKS:
            problem = self.problem.scaled(out=rate, back=rate)
            for method in METHODS:
                self._planned_extra(problem, half, method, f"half the peak and a link of {rate / 1e6:.0f} MB/s")
        budget = self.problem.static_bytes + self.eager_peak.activation_bytes
        for batch in (self.batch * 2,) if self.quick else (self.batch * 3 // 2, self.batch * 2):
            for method in METHODS:
                self._planned_extra(self._of_batch(batch), budget, method, f"eager's peak and {batch} samples")
        parameters = sum(parameter.nbytes for parameter in self.eager.module.parameters())
        for name, copies in (("SGD with momentum", 1), ("Adam", 2)):
            problem = replace(self.problem, static_bytes=self.problem.static_bytes + copies * parameters)
            for method in METHODS:
                self._planned_extra(problem, budget, method, f"eager's peak and {name}")

    def _planned_extra(self, problem: remat.RematProblem, budget: int, method: str, what: str) -> None:
        start_s = time.perf_counter()
        (plan,) = remat.pareto(problem, [budget], method=method)
        self.note(f"solving at {what}", time.perf_counter() - start_s, "s", method=method)
        if plan is not None:
            self.note(f"planned extra operator time at {what}", plan.extra_s / plan.step_s, "", method=method)


def _min_cut(runs_again: list[str], *, decomposes: bool) -> Callable[[nn.Module], Callable[..., Any]]:
    """Compile with PyTorch's partitioner and boxed runners; ``runs_again`` gets the names of backward's nodes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from penstock.remat._aot import boxed

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        runs_again.extend([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return boxed(graph)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: boxed(graph),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        **({"decompositions": select_decomp_table} if decomposes else {}),
    )
    return functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser(__doc__ or "")
    options.add_argument("--model", action="append", choices=list(WORKLOADS), help="only this one; may be repeated")
    options.add_argument("--part", action="append", choices=["budgets", "checkpoint", "pytorch", "batch", "adapt"])
    options.add_argument("--rounds", type=int, default=9)
    settings = options.parse_args(arguments)
    parts = settings.part or ["budgets", "checkpoint", "pytorch", "batch", "adapt"]
    rows: list[Row] = []
    lines = []
    for name in settings.model or (QUICK_MODELS if settings.quick else WORKLOADS):
        torch._dynamo.reset()
        bench = Bench(WORKLOADS[name], settings.device, settings.disk, settings.quick)
        outcomes = []
        if "budgets" in parts:
            for method in ("recompute", "hybrid"):
                outcomes += bench.budgets(method)
        if "checkpoint" in parts:
            bench.at_checkpoint(3 if settings.quick else settings.rounds)
        if "pytorch" in parts:
            bench.pytorch()
        if "batch" in parts:
            bench.max_batch()
        if "adapt" in parts:
            bench.adapt()
        rows += bench.rows
        lines.append(_line(bench, outcomes))
        print(lines[-1], flush=True)
        write(
            settings.json,
            {"device": settings.device, "quick": settings.quick, "parts": parts},
            rows,
            device=settings.device,
        )
    _summary(lines, rows)
    return rows


def _line(bench: Bench, outcomes: list[tuple[float, int, int, bool]]) -> list[str]:
    result = {(row.name.partition(", ")[2], row.metric): row.value for row in bench.rows}

    def shown(method: str, metric: str, form: str = "{:.3f}") -> str:
        value = result.get((method, metric))
        return "-" if value is None else format_bytes(int(value)) if form == "bytes" else form.format(value)

    off = max((abs(measured / predicted - 1) for _, predicted, measured, _ in outcomes), default=0.0)
    lowest = min(
        (value for (_, metric), value in result.items() if metric.startswith("activation peak at")),
        default=float("nan"),
    )
    extra, ratio = "planned extra operator time at checkpoint's peak", "step time over eager's at checkpoint's peak"
    return [
        bench.workload.name,
        format_bytes(bench.eager_peak.activation_bytes),
        f"{len(outcomes)}, {off:.2%}",
        "all" if all(equal for *_, equal in outcomes) else "NOT ALL",
        shown("checkpoint per block", "activation peak", "bytes"),
        "-" if math.isnan(lowest) else format_bytes(int(lowest)),
        shown("recompute", "smallest activation peak", "bytes"),
        shown("hybrid", "smallest activation peak", "bytes"),
        f"{shown('recompute', extra, '{:.1%}')} / {shown('hybrid', extra, '{:.1%}')}",
        f"{shown('checkpoint per block', ratio)} / {shown('recompute', ratio)} / {shown('hybrid', ratio)}",
    ]


def _summary(lines: list[list[str]], rows: list[Row]) -> None:
    header = [
        "model",
        "eager",
        "budgets kept, worst off",
        "equal",
        "checkpoint",
        "PyTorch's lowest",
        "least, recompute",
        "least, hybrid",
        "extra at checkpoint's",
        "time at checkpoint's: checkpoint / recompute / hybrid",
    ]
    show("activation peaks; predicted against measured; planned extra operator time", header, lines)
    for method in METHODS:
        ratios = [
            row.ratio
            for row in rows
            if row.ratio is not None and row.metric.startswith("largest batch") and row.name.endswith(method)
        ]
        if ratios:
            print(
                f"largest batch at eager's peak, {method}: {geometric_mean(ratios):.2f} times eager's (geometric mean)"
            )


if __name__ == "__main__":
    main()
