"""Cases of several rooms at once, under one account where they can share one."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from benchmarks.soak_case import Case
from benchmarks.soak_fleet import draw_jobs, expected_losses
from benchmarks.soak_models import Loop, Relational, compare, draw, train
from benchmarks.soak_rooms import everything_parked
from penstock import fleet, offload, remat, unified
from penstock.errors import CaptureError
from penstock.fleet import JobState
from penstock.relational import RelationalGraph
from penstock.tiers import Budget

QUIET = {"min_size": 0, "min_saving": 0.0, "max_stall": 1.0, "verify": True, "max_in_flight": "1MiB"}


def offloaded_relational_features(case: Case) -> None:
    """Offload around relational layers over rows that a loader reads from the disk, on one account."""
    budget, num_rows = case.budget(host="64MiB", disk={case.disk(): None}), 600
    generator = torch.Generator().manual_seed(case.choices.randrange(2**30))
    table = torch.randn(num_rows, 16, generator=generator)
    labels = torch.randint(4, (num_rows,), generator=generator)
    edges = torch.randint(num_rows, (2, 4000), generator=generator)
    kind, width = case.draw("model", ("rgcn", "rgat")), case.draw("width", (8, 32))

    def train_on(rows: Any, around: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        drawn: list[torch.Tensor] = []
        empty = RelationalGraph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=1, num_edge_types=3)
        model = Relational(kind, empty, width, 0.0)
        sampler = unified.NeighborSampler(unified.Graph(edges, num_nodes=num_rows), [4, 4])
        loader = unified.Loader(sampler, rows, torch.arange(200), batch_size=64, labels=labels, seed=5)
        context = around(model)
        for batch in loader:
            types = (batch.edge_index[0] + batch.edge_index[1]) % 3
            model.graph = RelationalGraph(batch.edge_index, types, num_nodes=len(batch.nodes), num_edge_types=3)
            model.zero_grad()
            with context:
                hidden = torch.relu(model.first(batch.x, model.graph))
                output = model.second(hidden, model.graph)[: len(batch.seeds)]
                loss = functional.cross_entropy(output, batch.y)
                loss.backward()
            drawn += [
                loss.detach(),
                *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
            ]
            case.figures["steps"] += 1
        if hasattr(context, "close"):
            context.close()
        return drawn

    expected = train_on(table, lambda _: contextlib.nullcontext())
    with mock.patch("penstock.unified._tiered.buffer_bytes_for", return_value=0):
        rows = unified.TieredFeatures(
        table, host=case.draw("host", (200_000, 30_000)), disk={next(iter(budget.disk_bytes)): None},
        in_flight=4096, budget=budget, progress=False,
    )  # fmt: skip
    with rows, everything_parked():
        ours = train_on(rows, lambda model: offload.activations(model, budget=budget, **QUIET))
    case.equal("losses and gradients", ours, expected)


def planned_beside_a_fleet(case: Case) -> None:
    """Run a planned step in its own thread, while a fleet trains."""
    jobs, _ = draw_jobs(case, 2, 2)
    losses = expected_losses(jobs)
    workload = draw(case, ("gpt", "mlp"))
    loop = Loop(
        num_steps=4, accumulate=1, optimizer="sgd", keeps_gradients=False
    )  # AdamW's last bits hang on flags of whoever traces
    if any("dropout" in type(module).__name__.lower() and module.p for module in workload.build().modules()):
        workload = draw(case, ("gpt",))  # the generator is the process's: a thread beside would draw from it
    workload = replace(workload, dtype=None)  # whoever leaves autocast empties its cache under those who trace
    expected = train(case, workload, loop, workload.build())
    model = workload.build()
    box: list[Any] = []

    def beside() -> None:
        try:
            function = lambda *arguments: workload.loss(model, arguments)  # noqa: E731
            step = remat.optimize(function, workload.batches[0], None)
            least = remat.smallest_budget_bytes(step.plan.problem, method="recompute")
            step = remat.optimize(function, workload.batches[0], least, profile=step.plan.problem)
            box.append(train(case, workload, loop, model, step=lambda batch: step(*batch), seeds=False))
        except CaptureError as error:
            case.figures["raised: CaptureError"] += 1
            box.append(error)
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=beside)
    thread.start()
    results = fleet.run(
        jobs, [fleet.Device(name="cpu", threads=1)], case.budget(device="64MB", host="256MiB"), progress=None
    )
    thread.join()
    for name, result in results.items():
        case.figures["steps"] += len(result.losses)
        if result.state is not JobState.DONE:
            case.found("undocumented error", f"{name}: {result.error}")
        case.equal(f"losses of {name}", list(result.losses), losses[name])
    if isinstance(box[0], BaseException):
        if not isinstance(box[0], CaptureError):
            raise box[0]
        return
    compare(case, box[0], expected)


def two_offloaders(case: Case) -> None:
    """Train two models, each with an offloader, in alternation or in two threads, with one budget."""
    budget = case.budget(disk={case.disk(): None})
    workloads = [draw(case, ("gpt", "mlp", "convnet", "rgcn")) for _ in range(2)]
    in_threads = case.draw("threads", (False, True))
    loop = Loop(num_steps=4, accumulate=1, optimizer="sgd", keeps_gradients=False)
    if in_threads:  # the generator is the process's
        workloads = [draw(case, ("gpt",)) for _ in range(2)]
    expected = [train(case, workload, loop, workload.build()) for workload in workloads]
    results: list[Any] = [None, None]
    models = [
        workload.build() for workload in workloads
    ]  # before threads: parameters are drawn from the process's generator

    def one_of(number: int) -> None:
        workload, model = workloads[number], models[number]
        offloader = offload.activations(model, budget=budget, **QUIET)
        try:
            results[number] = train(case, workload, loop, model, around=lambda: offloader)
        except BaseException as error:
            results[number] = error
        finally:
            offloader.close()

    with everything_parked():
        if in_threads:
            threads = [threading.Thread(target=one_of, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            one_of(0)
            one_of(1)
    for ours, other in zip(results, expected, strict=True):
        if isinstance(ours, BaseException):
            raise ours
        compare(case, ours, other)


class Rows:
    """Mini-batches of rows, read when they are asked for."""

    def __init__(self, source: Any, indexes: list[torch.Tensor]):
        self.source, self.indexes = source, indexes

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.source[index] for index in self.indexes)


def fleet_and_features(case: Case) -> None:
    """Train jobs whose data reads tiered rows; the fleet and the rows share one account."""
    budget: Budget = case.budget(device="32MB", host="192MiB", disk={case.disk(): None})
    generator = torch.Generator().manual_seed(case.choices.randrange(2**30))
    table = torch.randn(2000, 24, generator=generator)
    with mock.patch("penstock.unified._tiered.buffer_bytes_for", return_value=0):
        rows = unified.TieredFeatures(
        table, host=case.draw("rows", (120_000, 40_000)), disk={next(iter(budget.disk_bytes)): None},
        in_flight=0, budget=budget, progress=False,
    )  # fmt: skip
    indexes = [torch.randint(2000, (64,), generator=generator) for _ in range(4)]

    def job_of(number: int, source: Any) -> fleet.Job:
        return fleet.Job(
            name=f"job {number}", seed=number, steps=6,
            model=lambda: nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 24)),
            data=lambda: Rows(source, indexes),
            loss=lambda model, x: (model(x) - x).square().mean(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        )  # fmt: skip

    with rows:
        losses = expected_losses([job_of(number, table) for number in range(3)])
        devices = [fleet.Device(name="cpu", threads=1)] * 2
        results = fleet.run([job_of(number, rows) for number in range(3)], devices, budget, progress=None)
        for name, result in results.items():
            case.figures["steps"] += len(result.losses)
            if result.state is not JobState.DONE:
                case.found("undocumented error", f"{name}: {result.error}")
            case.equal(f"losses of {name}", list(result.losses), losses[name])
        if budget.peak_bytes("host") > budget.host_bytes:
            case.found("over budget", f"the account of the host was at {budget.peak_bytes('host')}")
