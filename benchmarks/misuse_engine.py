"""Working calls of `offload` and `remat`."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.misuse_table import RECORDS, UNCALLED, USES, Arguments, Use, require
from benchmarks.soak_case import Case
from penstock import offload, remat
from penstock.machines import MACHINES


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 64 * 64).view(64, 64)


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def plain(module: nn.Module) -> list[torch.Tensor]:
    """Return gradients of a copy of the module, from plain PyTorch."""
    other = copy.deepcopy(module)
    other.zero_grad()
    other(batch()).square().mean().backward()
    return gradients_of(other)


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor], what: str) -> None:
    equal = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    require(equal, f"{what}: gradients differ from plain PyTorch's")


def trains(offloader: Any, module: nn.Module, num_steps: int = 3) -> None:
    """Require that steps inside of an offloader have plain PyTorch's gradients."""
    expected = plain(module)
    for _ in range(num_steps):
        module.zero_grad()
        with offloader:
            module(batch()).square().mean().backward()
        same(gradients_of(module), expected, "offloaded")


def _offloaded(offloader: Any, arguments: Arguments) -> None:
    try:
        trains(offloader, arguments["model"])
        require(offloader.statistics().num_steps <= 3, "steps are counted")
    finally:
        offloader.close()


def _wrapped(wrapped: Any, arguments: Arguments) -> None:
    module = arguments["module"]
    try:
        expected = plain(module)
        for _ in range(3):
            module.zero_grad()
            wrapped(batch()).square().mean().backward()
            same(gradients_of(module), expected, "wrapped")
    finally:
        wrapped.offloader.close()


def _activations(case: Case) -> Arguments:
    return {"model": model(), "disk": case.disk(), "min_size": 0}


def _budgeted(case: Case) -> Arguments:
    return {"model": model(), "budget": case.budget(device="1GiB", disk=case.disk()), "min_size": 0}


def saved(**changes: Any) -> offload.SavedStorage:
    arguments = {"size_bytes": 2**20, "label": "", "pack_event": 0, "need_event": 2, "free_event": 3}
    return offload.SavedStorage(**(arguments | changes))


def offload_problem(**changes: Any) -> offload.OffloadProblem:
    arguments = {
        "storages": (saved(),), "event_times_s": (0.0, 0.1, 0.2, 0.3), "step_s": 0.3,
        "out_bandwidth_bytes_per_s": 1e9, "in_bandwidth_bytes_per_s": 1e9,
    }  # fmt: skip
    return offload.OffloadProblem(**(arguments | changes))


def offload_plan() -> offload.OffloadPlan:
    return offload.plan(offload_problem())


def _planned_offload(problem: Any, _: Arguments) -> None:
    offload.verify(problem, offload.plan(problem))


def _training(case: Case) -> Arguments:
    module = model()
    return {
        "model": module, "optimizer": torch.optim.AdamW(module.parameters()), "budget": "1GiB", "disk": case.disk(),
    }  # fmt: skip


def _weights(case: Case) -> Path:
    path = case.folder / "model.safetensors"
    save_file(model().state_dict(), path)
    return path


def _saved_training(training: Any) -> Arguments:
    training.save("../out/training")
    return {"path": "../out/training"}


def _on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return model()


def _trained(training: Any, arguments: Arguments) -> None:
    """Require that steps inside of a training equal plain PyTorch's."""
    module, optimizer = arguments["model"], arguments["optimizer"]
    try:
        with training.whole():
            other = copy.deepcopy(module)
        plainly = torch.optim.AdamW(other.parameters())
        for _ in range(2):
            for trained, stepped in ((other, plainly), (module, optimizer)):
                with training:
                    stepped.zero_grad()
                    trained(batch()).square().mean().backward()
                    stepped.step()
        require(training.statistics().num_steps >= 2, "steps are counted")
    finally:
        training.close()
    require(all(map(torch.equal, module.parameters(), other.parameters())), "trained: differs from plain PyTorch's")


def _meta_step() -> Arguments:
    """Return a step on tensors without bytes, for a machine by its data sheet."""
    with torch.device("meta"):
        model, batch = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3))), torch.empty(1024, 1024)
    step = lambda: model(batch).sum().backward()  # noqa: E731
    return {"model": model, "step": step, "machine": MACHINES["h200"], "min_size_bytes": 2**20}


USES |= {
    "offload.activations": Use(call=offload.activations, good=_activations, check=_offloaded),
    "offload.wrap": Use(
        call=offload.wrap,
        good=lambda case: {"module": model(), "disk": case.disk(), "min_size": 0},
        check=_wrapped,
    ),
    "offload.Offloader": Use(
        call=offload.activations, good=_budgeted, check=_offloaded, made_by="offload.activations",
    ),
    "offload.OffloadedModule": Use(
        call=offload.wrap, good=lambda case: {"module": model(), "disk": case.disk()}, check=_wrapped,
        made_by="offload.wrap", methods={"forward": lambda _: {"*arguments": (batch(),)}},
    ),
    "offload.training": Use(call=offload.training, good=_training, check=_trained),
    "offload.parameters": Use(call=offload.parameters, good=_training, check=_trained),
    "offload.Training": Use(
        call=offload.training, good=_training, check=_trained, made_by="offload.training",
        methods={
            "whole": lambda _: {}, "save": lambda _: {"path": "../out/training"}, "load": _saved_training,
            "save_weights": lambda _: {"path": "../out/weights"},
        },
    ),
    "offload.load": Use(
        call=offload.load, good=lambda case: {"model": _on_meta(), "path": _weights(case)},
        check=lambda result, _: require(not any(parameter.is_meta for parameter in result.parameters()), "values"),
    ),
    "offload.modelled_cycle": Use(
        call=offload.modelled_cycle, good=lambda _: _meta_step(),
        check=lambda problem, _: require(problem.storages and problem.step_s > 0, "a cycle"),
    ),
    "offload.plan": Use(
        call=offload.plan, good=lambda _: {"problem": offload_problem()},
        check=lambda plan, arguments: offload.verify(arguments["problem"], plan),
    ),
    "offload.verify": Use(
        call=offload.verify, good=lambda _: {"problem": offload_problem(), "plan": offload_plan()},
    ),
    "offload.OffloadProblem": Use(
        call=offload.OffloadProblem,
        good=lambda _: {name: getattr(offload_problem(), name) for name in offload.OffloadProblem.__slots__},
        check=_planned_offload,
    ),
    "offload.SavedStorage": Use(
        call=offload.SavedStorage, good=lambda _: {name: getattr(saved(), name) for name in saved().__slots__},
        check=lambda result, _: _planned_offload(offload_problem(storages=(result,)), {}),
    ),
}  # fmt: skip
RECORDS |= {
    "offload.OffloadPlan": offload_plan,
    "offload.Transfer": lambda: offload_plan().transfers[0],
    "offload.SavedTensor": lambda: offload.SavedTensor(
        module="", shape=(1,), dtype=torch.float32, size_bytes=4, is_checkpoint_input=False
    ),
    "offload.Held": lambda: offload.Held(at_s=0.0, held_bytes={"parameters": 4}, others_bytes=0),
    "offload.TrainingStatistics": lambda: offload.TrainingStatistics(
        num_steps=1,
        state_bytes=2**20,
        num_parameters=2**18,
        fetched_bytes=0,
        parked_bytes=0,
        step_fetched={},
        step_parked={},
        written_to_disk_bytes=0,
        stall_s=0.0,
        wall_s=1.0,
        num_host_updates=None,
        held_bytes=0,
        measured_peak_bytes=None,
    ),
    "offload.OffloadStatistics": lambda: offload.OffloadStatistics(
        num_steps=0, saved_bytes=0, parked_bytes=0, fetched_bytes=0, forwarded_bytes=0
    ),
}
UNCALLED |= {"offload.Policy": "the type of a function that the user writes"}


# remat


def operator(**changes: Any) -> remat.Operator:
    arguments = {"name": "exp", "target": "aten.exp.default", "inputs": (), "outputs": (0,), "duration_s": 0.1}
    return remat.Operator(**(arguments | changes))


def storage(**changes: Any) -> remat.Storage:
    return remat.Storage(**({"name": "a", "size_bytes": 2**20, "producer": 0} | changes))


def remat_problem(**changes: Any) -> remat.RematProblem:
    arguments = {
        "operators": (
            operator(), operator(name="sin", inputs=(0,), outputs=(1,)),
            operator(name="mul", inputs=(0, 1), outputs=(2,)),
        ),
        "num_forward": 2,
        "storages": (storage(), storage(name="b", producer=1), storage(name="c", producer=2, is_output=True)),
    }  # fmt: skip
    return remat.RematProblem(**(arguments | changes))


def remat_plan() -> remat.RematPlan:
    return remat.plan(remat_problem(), 2**30)


def _planned(problem: Any, _: Arguments) -> None:
    remat.verify(problem, remat.plan(problem, 2**30))
    remat.smallest_budget_bytes(problem)


def loss_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: module(x).square().mean()


def steps(step: Any, module: nn.Module, what: str) -> None:
    """Require that a planned step has plain PyTorch's gradients."""
    expected = plain(module)
    for _ in range(2):
        module.zero_grad()
        result = step(batch())
        (result if result.dim() == 0 else result.square().mean()).backward()
        same(gradients_of(module), expected, what)


def _optimized(step: Any, arguments: Arguments) -> None:
    try:
        if isinstance(arguments["step"], nn.Module):
            steps(step, arguments["step"], "planned")
    finally:
        step.close()


def _compiled(compiled: Any, arguments: Arguments) -> None:
    if not isinstance(arguments["model"], nn.Module):  # a function, which is compiled as well
        return compiled.close()
    try:
        steps(compiled, arguments["model"], "compiled")
    finally:
        compiled.close()


@functools.cache
def graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(model())


def _named_backend(call: Any, arguments: Arguments) -> None:
    require(callable(call), "a backend returns a callable")


def _backend(backend: Any, _: Arguments) -> None:
    module = model()
    steps(torch.compile(module, backend=backend), module, "torch.compile")
    backend.close()


def _file(case: Case, name: str, text: str) -> Path:
    path = case.folder / name
    path.write_text(text)
    return path


def _problem_file() -> Path:
    path = Path("../out/problem.json").resolve()
    remat_problem().save(path)
    return path


def _remat_options(case: Case) -> Arguments:
    """Return every option that `compile` takes in its ``**options``."""
    return {
        "budget": case.budget(device="1GiB"), "optimizer": None, "reserve": 0, "disk": None, "host": None,
        "accumulates": True, "adds_gradients": True, "method": "hybrid", "profile": None, "compiler": "eager",
        "verify": False, "strict": False, "as_eager": True,
    }  # fmt: skip


def compiling(
    model: Any, budget: Any, optimizer: Any, reserve: Any, disk: Any, host: Any, accumulates: Any, adds_gradients: Any,
    method: Any, profile: Any, compiler: Any, verify: Any, strict: Any, as_eager: Any, **potatoes: Any,
) -> Any:  # fmt: skip
    """Call `remat.compile` with its options as parameters, from which misuses are derived."""
    options = {name: value for name, value in locals().items() if name not in ("model", "potatoes")}
    return remat.compile(model, **options, **potatoes)


compiling.__annotations__ = {
    **{name: hint for name, hint in remat.optimize.__annotations__.items() if name not in ("step", "return")},
    "model": remat.compile.__annotations__["model"], "as_eager": bool,
}  # fmt: skip

USES |= {
    "remat.optimize": Use(
        call=remat.optimize,
        good=lambda case: {"step": model(), "example_inputs": [batch()], "budget": case.budget(device="1GiB")},
        check=_optimized,
    ),
    "remat.OptimizedStep": Use(
        call=remat.optimize,
        good=lambda case: {"step": model(), "example_inputs": [batch()], "budget": case.budget(device="1GiB")},
        check=_optimized, made_by="remat.optimize", methods={"__call__": lambda _: {"*arguments": (batch(),)}},
    ),
    "remat.compile": Use(
        call=compiling, good=lambda case: {"model": model(), **_remat_options(case)}, check=_compiled
    ),
    "remat.CompiledModule": Use(
        call=remat.compile, good=lambda case: {"model": model(), "budget": case.budget(device="1GiB")},
        check=_compiled, made_by="remat.compile", methods={"forward": lambda _: {"*arguments": (batch(),)}},
    ),
    "remat.CompiledFunction": Use(
        call=remat.compile,
        good=lambda case: {"model": loss_of(model()), "budget": case.budget(device="1GiB")},
        made_by="remat.compile", methods={"__call__": lambda _: {"*arguments": (batch(),)}},
    ),
    "remat.compile_backend": Use(
        call=remat.compile_backend,
        good=lambda _: {"module": graph(), "_": [batch()], "options": {"budget": "1GiB"}}, check=_named_backend,
    ),
    "remat.Backend": Use(
        call=remat.Backend, good=lambda _: {"budget": "1GiB"}, check=_backend,
        methods={"__call__": lambda _: {"module": graph(), "_": [batch()]}, "context_of": lambda _: {"_": {}}},
    ),
    "remat.max_batch": Use(
        call=remat.max_batch,
        good=lambda _: {"make": lambda size: (model(), [torch.ones(size, 64)]), "budget": "1MiB", "start": 64},
        check=lambda size, arguments: require(
            isinstance(size, int) and (not size or size >= arguments["start"]), "a batch"
        ),
    ),
    "remat.optimizer_state_bytes": Use(
        call=remat.optimizer_state_bytes, good=lambda _: {"optimizer": torch.optim.Adam(model().parameters())},
        check=lambda size, _: require(size >= 2 * 4 * (64 * 128 + 128 + 129), "Adam has two numbers per parameter"),
    ),
    "remat.pareto": Use(
        call=remat.pareto, good=lambda _: {"problem": remat_problem(), "budgets_bytes": [2**22, 2**30]},
        check=lambda plans, arguments: require(len(plans) == len(arguments["budgets_bytes"]), "a plan per budget"),
    ),
    "remat.plan": Use(
        call=remat.plan, good=lambda _: {"problem": remat_problem(), "budget_bytes": 2**30},
        check=lambda plan, arguments: remat.verify(arguments["problem"], plan),
    ),
    "remat.least_extra_s": Use(
        call=remat.least_extra_s, good=lambda _: {"problem": remat_problem(), "budget_bytes": 2**30},
        check=lambda seconds, _: require(seconds == 0, "nothing is too large"),
    ),
    "remat.smallest_budget_bytes": Use(
        call=remat.smallest_budget_bytes, good=lambda _: {"problem": remat_problem()},
        check=lambda size, _: require(0 < size <= 3 * 2**20, "no more than all storages"),
    ),
    "remat.verify": Use(call=remat.verify, good=lambda _: {"problem": remat_problem(), "plan": remat_plan()}),
    "remat.live_bytes": Use(call=remat.live_bytes, good=lambda _: {"problem": remat_problem(), "plan": remat_plan()}),
    "remat.RematProblem": Use(
        call=remat.RematProblem,
        good=lambda _: {name: getattr(remat_problem(), name) for name in remat.RematProblem.__slots__},
        check=_planned,
        methods={"save": lambda _: {"file": "../out/problem.json"}, "load": lambda _: {"file": _problem_file()}},
    ),
    "remat.Operator": Use(
        call=remat.Operator, good=lambda _: {name: getattr(operator(), name) for name in operator().__slots__},
        check=lambda result, _: _planned(remat_problem(operators=(result, *remat_problem().operators[1:])), {}),
    ),
    "remat.Storage": Use(
        call=remat.Storage, good=lambda _: {name: getattr(storage(), name) for name in storage().__slots__},
        check=lambda result, _: _planned(remat_problem(storages=(result, *remat_problem().storages[1:])), {}),
    ),
}  # fmt: skip
RECORDS |= {
    "remat.Planned": lambda: remat.Planned(problem=remat_problem(), plan=remat_plan(), budget_bytes=2**30),
    "remat.RematPlan": remat_plan,
    "remat.Decision": lambda: remat.Decision.KEEP,
}
UNCALLED |= {"remat.Method": "the names of the ways to plan"}
