"""Working calls of `advisor`, `report`, `testing` and `integrations`."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.misuse_engine import (
    batch,
    gradients_of,
    model,
    plain,
    remat_plan,
    remat_problem,
    same,
    trains,
)
from benchmarks.misuse_fleets import job, ran, trained
from benchmarks.misuse_graphs import graph, rows
from benchmarks.misuse_table import RECORDS, UNCALLED, USES, Arguments, Use, require
from benchmarks.soak_case import Case
from penstock import advisor, fleet, integrations, report, testing, tiers


def _advised(advice: Any, _: Arguments) -> None:
    require(advice.explain(), "it explains")


def option(**changes: Any) -> advisor.Option:
    arguments = {
        "name": "plain", "rooms": (), "is_refused": False, "reason": "", "peak_bytes": 1, "ratio": 1.0,
        "is_measured": True, "code": "",
    }  # fmt: skip
    return advisor.Option(**(arguments | changes))


USES |= {
    "advisor.advise": Use(
        call=advisor.advise,
        good=lambda case: {
            "model": model(), "batch": batch(), "budget": "64MiB", "loss": lambda net, x: net(x).square().mean(),
            "optimizer": None, "rounds": 1, "disk": case.disk(),
        },
        check=_advised,
    ),
    "advisor.choose": Use(
        call=advisor.choose, good=lambda _: {"options": [option(), option(name="remat", ratio=2.0)]},
        check=lambda result, arguments: require(result is None or result.name == "plain", "the fastest"),
    ),
}  # fmt: skip
RECORDS |= {
    "advisor.Option": option,
    "advisor.Advice": lambda: advisor.Advice(
        options=(option(),), budget_bytes=None, plain_peak_bytes=None, plain_is_measured=False, smallest_bytes=None,
        notes=(), best_name="plain",
    ),
}  # fmt: skip


# report


def _folder(case: Case) -> Path:
    return case.folder / "out"


def _is_written(_: Any, arguments: Arguments) -> None:
    require(Path(arguments["path"]).stat().st_size > 0, "a file")


def _pages(files: Any, _: Arguments) -> None:
    require(all(Path(file).stat().st_size > 0 for file in files), "files")


def _planned() -> Any:
    from penstock import remat

    return remat.Planned(problem=remat_problem(), plan=remat_plan(), budget_bytes=2**30)


if importlib.util.find_spec("matplotlib"):
    USES |= {
        "report.curves": Use(
            call=report.curves, good=lambda case: {"path": _folder(case) / "a.png", "series": {"a": [1.0, 2.0]}},
            check=_is_written,
        ),
        "report.gantt": Use(
            call=report.gantt,
            good=lambda case: {"path": _folder(case) / "a.png", "rows": {"cpu": [(0.0, 1.0, "a")]}}, check=_is_written,
        ),
        "report.memory_timeline": Use(
            call=report.memory_timeline,
            good=lambda case: {"path": _folder(case) / "a.png", "timelines": {"a": [(0.0, 10), (1.0, 20)]}},
            check=_is_written,
        ),
        "report.pareto_curve": Use(
            call=report.pareto_curve, good=lambda case: {"path": _folder(case) / "a.png", "curves": {"a": [(10, 0.1)]}},
            check=_is_written,
        ),
        "report.throughput_curve": Use(
            call=report.throughput_curve,
            good=lambda case: {"path": _folder(case) / "a.png", "points": {"a": [(1.0, 2.0, "b")]}}, check=_is_written,
        ),
        "report.draw_fleet": Use(
            call=report.draw_fleet, good=lambda case: {"run_dir": ran(case).run_dir, "folder": _folder(case)},
            check=_pages,
        ),
    }  # fmt: skip
else:
    UNCALLED |= {
        f"report.{name}": "matplotlib is not there"
        for name in ("curves", "gantt", "memory_timeline", "pareto_curve", "throughput_curve", "draw_fleet")
    }
USES |= {
    "report.write_html": Use(
        call=report.write_html,
        good=lambda case: {"path": _folder(case) / "a.html", "*things": (_planned(),), "title": "a"}, check=_pages,
    ),
    "report.save": Use(
        call=report.save, good=lambda case: {"folder": _folder(case), "*things": (_planned(),)},
        check=lambda path, _: require(path.stat().st_size > 0, "a file"),
    ),
    "report.save_asked": Use(
        call=report.save_asked,
        good=lambda case: {"folder": _folder(case), "budgets_bytes": [2**20], "method": "hybrid"},
    ),
    "report.plan_marks": Use(
        call=report.plan_marks, good=lambda _: {"problem": remat_problem(), "plan": remat_plan()}
    ),
    "report.plan_timeline": Use(
        call=report.plan_timeline, good=lambda _: {"problem": remat_problem(), "plan": remat_plan()}
    ),
}  # fmt: skip
UNCALLED |= {"report.REPORT_FILE": "the name of a file"}


# testing


def _with_gradients() -> nn.Module:
    module = model()
    module(batch()).sum().backward()
    return module


def _fault(tier: Any, _: Arguments) -> None:
    try:
        extent = tier.reserve(4096)
        for piece in extent.pieces:
            tier.write(piece, memoryview(bytes(piece.size_bytes)))
        tier.release(extent)
    finally:
        tier.close()


USES |= {
    "testing.assert_gradients_equal": Use(
        call=testing.assert_gradients_equal,
        good=lambda _: {"expected": _with_gradients(), "actual": _with_gradients()},
    ),
    "testing.assert_peak_below": Use(
        call=testing.assert_peak_below,
        good=lambda _: {"function": lambda: torch.ones(1000), "limit": "8GiB", "device": "cpu"},
    ),
    "testing.FaultyTier": Use(
        call=testing.FaultyTier,
        good=lambda _: {"inner": tiers.HostTier("1MiB", pinned=False), "seed": 0, "full": 0.0}, check=_fault,
        methods={
            "reserve": lambda _: {"size_bytes": 4096}, "release": lambda subject: {"extent": subject.reserve(4096)},
            "file_name": lambda subject: {"piece": subject.reserve(4096).pieces[0]},
            "write": lambda subject: {"piece": subject.reserve(4096).pieces[0], "view": memoryview(bytes(4096))},
            "read": lambda subject: {"piece": subject.reserve(4096).pieces[0], "view": memoryview(bytearray(4096))},
        },
        skips=frozenset({"write_storage", "read_storage", "tensor"}),
    ),
    "testing.GPT": Use(
        call=testing.GPT,
        good=lambda _: {"num_layers": 1, "width": 8, "num_heads": 2, "context": 8, "vocabulary": 16},
        check=lambda result, arguments: result(
            *torch.zeros(2, 1, arguments["context"], dtype=torch.long)
        ).backward(),
        methods={
            "forward": lambda _: {
                "tokens": torch.zeros(1, 8, dtype=torch.long), "targets": torch.zeros(1, 8, dtype=torch.long)
            }
        },
    ),
}  # fmt: skip


# integrations


def _loops(loop: Any, arguments: Arguments) -> None:
    try:
        trains(_Entering(loop), arguments["model"])
        require(loop.summary().num_cycles >= 1, "cycles are counted")
    finally:
        loop.close()


class _Entering:
    """An offloader of a loop, entered again for every step."""

    def __init__(self, loop: Any):
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._loop.__exit__(*error)


def _offloading_of(accelerator: Any, arguments: Arguments) -> None:
    module = arguments["model"]
    expected = plain(module)
    with accelerator as loop:
        module.zero_grad()
        module(batch()).square().mean().backward()
        loop.figures()
    same(gradients_of(module), expected, "offloading")


def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _rest(offloader: Any, arguments: Arguments) -> None:
    try:
        trains(offloader, arguments["module"])
    finally:
        offloader.close()


def _logs(tracker: Any, _: Arguments) -> None:
    tracker.log(job(), 1, {"loss": 1.0})
    tracker.end(job(), fleet.JobState.DONE)
    tracker.close()


_TRACKING = {
    "log": lambda _: {"job": job(), "step": 1, "metrics": {"loss": 1.0}},
    "end": lambda _: {"job": job(), "state": fleet.JobState.DONE},
}


def _searching(**arguments: Any) -> Any:
    return integrations.search(**arguments)


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


USES |= {
    "integrations.LoopOffloader": Use(
        call=integrations.LoopOffloader,
        good=lambda case: {"model": model(), "options": {"disk": case.disk(), "min_size": 0}}, check=_loops,
        made_by="integrations.offloading", methods={"abort": lambda _: {"error": ValueError("a user's")}},
    ),
    "integrations.offloading_of_the_rest": Use(
        call=integrations.offloading_of_the_rest,
        good=lambda case: {"module": model(), "account": case.budget(disk=case.disk())}, check=_rest,
    ),
    "integrations.PenstockArguments": Use(
        call=integrations.PenstockArguments,
        good=lambda _: {"penstock_budget": "6GiB", "penstock_disk": None, "penstock_method": "offload"},
        check=lambda result, _: integrations.PenstockCallback(result),
    ),
}  # fmt: skip
RECORDS |= {
    "integrations.OffloadSummary": lambda: integrations.OffloadSummary(
        num_cycles=0, parked_bytes=0, written_to_disk_bytes=0, stall_s=0.0, busy_s=0.0, peak_bytes=None, declined=""
    )
}
UNCALLED |= {
    "integrations.run_on_ray": "starts a cluster for each case; its own tests misuse it",
    "integrations.MLflowTracker": "makes a database for each case, which takes seconds; TensorBoardTracker is misused",
}
_EXTRA: dict[str, tuple[str, Use]] = {
    "integrations.offloading": (
        "accelerate",
        Use(
            call=integrations.offloading,
            good=lambda case: {"accelerator": _accelerator(), "model": model(), "disk": case.disk(), "min_size": 0},
            check=_offloading_of,
        ),
    ),
    "integrations.PenstockCallback": (
        "transformers",
        Use(
            call=integrations.PenstockCallback, good=lambda case: {"disk": case.disk(), "arguments": None},
            methods={
                "on_log": lambda _: {"_args": None, "state": None, "logs": {}},
                "on_step_end": lambda _: {"optimizer": None}, "on_train_begin": lambda _: {"args": None},
            },
            skips=frozenset({"on_log", "on_step_end", "on_train_begin", "on_init_end", "on_train_end"}),
        ),
    ),
    "integrations.LightningOffload": (
        "lightning",
        Use(
            call=integrations.LightningOffload, good=lambda case: {"disk": case.disk(), "logs": True},
            skips=frozenset(
                {
                    "on_after_backward", "on_exception", "on_train_batch_end", "on_train_batch_start", "on_train_end",
                    "on_train_start", "teardown",
                }
            ),
        ),
    ),
    "integrations.TensorBoardTracker": (
        "tensorboard",
        Use(
            call=integrations.TensorBoardTracker, good=lambda case: {"folder": _folder(case)}, check=_logs,
            methods=_TRACKING,
        ),
    ),
    "integrations.OptunaStopper": (
        "optuna",
        Use(
            call=integrations.OptunaStopper,
            good=lambda _: {"pruner": _pruner(), "metric": "loss", "direction": "minimize"}, check=_logs,
            methods={**_TRACKING, "__call__": _TRACKING["log"]},
        ),
    ),
    "integrations.search": (
        "optuna",
        Use(
            call=integrations.search,
            good=lambda case: {
                "study": _study(), "make_job": lambda trial: job(name=f"t{trial.number}"), "num_trials": 1,
                "at_once": 1, "metric": "loss", "devices": ["cpu"], "budget": "64MiB", "host": "64MiB",
                "run_dir": case.folder / "run", "progress": None,
            },
            check=trained,
        ),
    ),
    "integrations.pyg_features": (
        "torch_geometric", Use(call=integrations.pyg_features, good=lambda _: {"features": {"x": rows()}})
    ),
    "integrations.pyg_sampler": (
        "torch_geometric", Use(call=integrations.pyg_sampler, good=lambda _: {"data": graph(), "fanouts": [2]})
    ),
}  # fmt: skip


def _study() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study()


def _pruner() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.pruners.NopPruner()


for _name, (_library, _use) in _EXTRA.items():
    if _has(_library):
        USES[_name] = _use
    else:
        UNCALLED[_name] = f"{_library} is not there"
