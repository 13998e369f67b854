"""The formats that Penstock reads: for each, how to write an intact file and how to read it completely."""

import gzip
import json
import os
import random
import sqlite3
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.fuzz_mutations import damaged_json, in_json, in_json_lines, in_rows, in_safetensors
from penstock import fleet, remat, report, unified
from penstock.native import _build, compile_source, keep_source
from penstock.probe import LaneBandwidth, _bandwidth, bandwidths
from penstock.relational import RelationalGraph, RGCNConv, read_id_file, read_ntriples

Inside = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of file, or a folder of them."""

    name: str
    make: Callable[[Path], None]
    """Writes an intact file into a folder."""
    read: Callable[[Path], Any]
    """Reads the file completely; the result is compared."""
    inside: Inside | None = None
    """Damages the content but keeps the outer form: lengths and checksums are made consistent."""
    is_checked: bool = False
    """Whether damage is detected, so that a read that succeeds returns what was written."""
    never_fails: bool = False
    """Whether damaged files are skipped: reading raises nothing."""
    speed: float = 1.0
    """Number of its cases relative to that of other formats."""


def _sweep(name: str, text: str) -> Format:
    def read(folder: Path) -> Any:
        from penstock.cli._sweep import read_sweep

        result = read_sweep(folder / name)
        result.sweep.fleet.options()
        return len(result.points)

    return Format(name=f"sweep, {name}", make=lambda folder: _written(folder / name, text), read=read,
                  inside=in_json if name.endswith("json") else None)  # fmt: skip


_GRID = """job: jobs.py:make
fleet: {devices: [cpu, {name: cpu, budget: 1GiB, threads: 1}], budget: 2GiB, host: 4e9, disk: {/nvme: 1GiB},
        run_dir: runs/1, scheduler: sharded-lrtf, checkpoint_every: 5, keep: 2, verify: true}
parameters:
  lr: [1e-4, 3e-4]
  batch: &sizes [4, 8, 16]
  text: ["a", b]
"""
_RANDOM = {
    "job": "module:function", "search": "random", "num_jobs": 7, "seed": 3, "fleet": {"devices": ["cpu"], "keep": 1},
    "parameters": {"lr": {"low": 1e-5, "high": 1e-3, "log": True}, "n": {"low": 1, "high": 9, "integer": True},
                   "kind": {"choices": ["a", "b", 3]}},
}  # fmt: skip
_LIST = "job: a.py:b\nsearch: list\njobs:\n- {lr: 0.1, name: x}\n- {lr: 0.2, nested: {a: [1, 2]}}\n"


def _written(path: Path, text: str | bytes) -> None:
    path.write_bytes(text.encode() if isinstance(text, str) else text)


def _make_problem(folder: Path) -> None:
    operators = [
        remat.Operator(
            name=f"op{index}",
            target="aten.mm",
            inputs=(index - 1,) if index else (),
            outputs=(index,),
            duration_s=0.1 + index,
        )
        for index in range(6)
    ]
    operators += [
        remat.Operator(name=f"back{index}", target="aten.mm", inputs=(5 - index, *((6 + index - 1,) if index else ())),
                       outputs=(6 + index,), duration_s=0.2)
        for index in range(6)
    ]  # fmt: skip
    storages = tuple(
        remat.Storage(name=f"s{index}", size_bytes=1024 * (1 + index % 3), producer=index, is_output=index in (5, 11))
        for index in range(12)
    )
    problem = remat.RematProblem(
        operators=tuple(operators), num_forward=6, storages=storages, static_bytes=100,
        out_bandwidth_bytes_per_s=1e4, in_bandwidth_bytes_per_s=2e4,
    )  # fmt: skip
    problem.save(folder / "problem.json")


def _read_problem(folder: Path) -> Any:
    problem = remat.RematProblem.load(folder / "problem.json")
    low = remat.smallest_budget_bytes(problem)
    plan = remat.plan(problem, 2**50)
    remat.verify(problem, plan)
    remat.plan(problem, low)
    return None


def _make_graph(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    graph = RelationalGraph(
        torch.randint(20, (2, 60), generator=generator), torch.randint(3, (60,), generator=generator), num_nodes=20,
        num_edge_types=4,
    )  # fmt: skip
    _convolved(graph)
    graph.save(folder / "graph.safetensors")


def _convolved(graph: RelationalGraph) -> torch.Tensor:
    torch.manual_seed(0)
    sources, targets = graph.num_sources, graph.num_targets
    layer = RGCNConv(3, 2, graph.num_edge_types, root_weight=False)
    x = torch.randn(sources, 3)
    return layer((x, torch.randn(targets, 3)) if graph.is_block else x, graph)


def _read_graph(folder: Path) -> Any:
    graph = RelationalGraph.load(folder / "graph.safetensors")
    if max(graph.num_sources, graph.num_targets, graph.num_edge_types) > 10_000:
        return None  # as large as a graph may be; its layers are another matter
    fresh = RelationalGraph(
        graph.edge_index, graph.edge_type, num_nodes=graph.num_nodes, num_edge_types=graph.num_edge_types
    )
    if not torch.equal(_convolved(graph), _convolved(fresh)):
        raise AssertionError("the saved indexes are not those of the edges")
    return None


def _make_triples(name: str) -> Callable[[Path], None]:
    text = '# comment\n<a> <r> <b> .\n_:x <r> "text \\" with"@en .\n\n<a> <s> "3"^^<int> . # end\n' * 5
    raw = gzip.compress(text.encode(), mtime=0) if name.endswith("gz") else text.encode()
    return lambda folder: _written(folder / name, raw)


def _ids(folder: Path) -> None:
    _written(folder / "train2id.txt", "5\n" + "".join(f"{index} {index + 1} {index % 2}\n" for index in range(5)))


def _table() -> torch.Tensor:
    return torch.arange(700, dtype=torch.float32).view(70, 10)


def _features(name: str, make: Callable[[Path], object], **options: Any) -> Format:
    def read(folder: Path) -> Any:
        path = folder / name
        if name.endswith(".rows"):
            unified.check(path)
        whole = unified.from_file(path).as_subclass(torch.Tensor)[:100].clone()
        with (
            mock.patch("penstock.unified._tiered.buffer_bytes_for", return_value=0),
            unified.TieredFeatures(path, host=4 * len(whole) + 300, in_flight=0) as features,
        ):
            rows = features[torch.arange(min(100, len(features)))]
        if not name.endswith(".rows"):
            shared = unified.from_file(path, shared=True)
            del shared
        return whole.tolist() if torch.equal(rows, whole) or bool(whole.isnan().any()) else "rows differ"

    return Format(name=f"features, {name}", make=lambda folder: make(folder / name) and None, read=read, **options)


def _save_npy(path: Path) -> None:
    import numpy as np

    np.save(path, _table().numpy())


def _save_safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": _table()}, path)


def job(name: str = "job", steps: int = 4) -> fleet.Job:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    return fleet.Job(
        name=name, model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.BatchNorm1d(5), nn.Linear(5, 1)),
        data=lambda: batches, loss=lambda model, x: model(x).square().mean(), steps=steps,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        validation=lambda: batches[:1], evaluate_every=2,
    )  # fmt: skip


def _train(run_dir: Path, jobs: Sequence[fleet.Job]) -> dict[str, Any]:
    results = fleet.run(
        jobs, [fleet.Device(name="cpu", threads=1)], "64MB", host="64MB", run_dir=run_dir, resume=True,
        checkpoint_every=2, progress=None,
    )  # fmt: skip
    by_name = {}
    for name, result in results.items():
        if result.error is not None:
            if not result.error.startswith("penstock.errors."):
                raise AssertionError(f"{name} failed of {result.error}")
            by_name[name] = "refused"
        else:
            by_name[name] = [*result.losses, *map(dict, result.validations)]
            weights = result.model().state_dict()
            by_name[name] += [value.tolist() for value in weights.values()]
    return by_name


def _make_run(folder: Path) -> None:
    """Write an unfinished run, of a process that was killed."""
    _train(folder / "run", [job(steps=4)])
    with sqlite3.connect(folder / "run" / "fleet.db") as database:
        database.execute("UPDATE jobs SET state = 'running', num_steps = 8")
        database.execute("PRAGMA journal_mode=DELETE")
    database.close()


def _read_run(folder: Path) -> Any:
    return _train(folder / "run", [job(steps=8)])


def _read_ended(folder: Path) -> Any:
    return _train(folder / "run", [job(steps=4)])


def _make_ended(folder: Path) -> None:
    _train(folder / "run", [job(steps=4)])
    for path in (folder / "run").glob("fleet.db-*"):
        path.unlink()


def _make_state(folder: Path) -> None:
    state = fleet.FleetState(folder)
    state.create()
    state.write(
        [
            fleet.JobRow(
                name=f"job {index}", place=index, state="running", step=3, num_steps=9, epoch=0, loss=0.5,
                validation={"loss": 1.0},
                device="cpu #0", seconds_per_step=0.1, error=None, tags={"lr": 1}, updated_s=1e9,
                source={"path": "a.py:b", "parameters": {"lr": 1}},
            )
            for index in range(3)
        ]
    )  # fmt: skip
    state.ask("clone", "job 1", {"name": "../../escape", "changes": {}})
    with sqlite3.connect(state.path) as database:
        database.execute("PRAGMA journal_mode=DELETE")
    database.close()


def _read_state(folder: Path) -> Any:
    from rich.console import Console

    state = fleet.FleetState(folder)
    if not state.exists:
        return None
    rows = state.jobs()
    with open(os.devnull, "w") as nothing:
        Console(file=nothing).print(fleet.jobs_table(rows))
    state.is_alive, state.commands(), state.answer_to(1, 0.0)
    return None


def in_database(path: Path, choices: random.Random) -> str:
    """Change values in rows of the database, which stays consistent."""
    odd = choices.choice(
        (
            None,
            -1,
            2**62,
            1e400,
            float("nan"),
            "",
            "bogus",
            b"\xff\xfe",
            "[" * 5000,
            "[1]",
            "17",
            "null",
            "../../x",
            "{}",
        )
    )
    tables = {
        "jobs": ("name", "place", "state", "step", "num_steps", "epoch", "loss", "validation", "device",
                 "seconds_per_step", "error", "tags", "source", "updated_s"),
        "commands": ("verb", "job", "arguments"), "fleet": ("key", "value"),
    }  # fmt: skip
    table = choices.choice(tuple(tables))
    column = choices.choice(tables[table])
    with sqlite3.connect(path) as database:
        match choices.randrange(6):
            case 0:
                database.execute(f"DROP TABLE {table}")
            case 1:
                database.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
            case 2:
                database.execute(f"DELETE FROM {table}")
            case _:
                database.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (odd,))
    database.close()
    return f"{table}.{column}: {str(odd)[:20]!r}"


def _make_lines(folder: Path) -> None:
    (folder / "jobs" / "a").mkdir(parents=True)
    unit = {"device": 0, "job": "a", "step": 0, "micro": 0, "shard": 0, "kind": "forward", "start_s": 1.0, "end_s": 2.0,
            "stall_s": 0.1}  # fmt: skip
    lines = [json.dumps({**unit, "start_s": 1.0 + index, "end_s": 2.0 + index}) for index in range(5)]
    _written(folder / "units.jsonl", "\n".join(lines) + "\n")
    lines = [
        json.dumps({"step": index, "time_s": 1e9 + index, "loss": 1 / (1 + index), "epoch": 0.0}) for index in range(5)
    ]
    _written(folder / "jobs" / "a" / "metrics.jsonl", "\n".join(lines) + "\n")


def _read_lines(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report.draw_fleet(folder, folder / "pictures")
    return None


def _make_rates(folder: Path) -> None:
    with _cache_in(folder):
        bandwidths(folder)


def _cache_in(folder: Path) -> Any:
    import contextlib

    lanes = tuple(
        LaneBandwidth(lane=lane, bandwidth_bytes_per_s=1e9, is_direct=True, measured_s=9e9)
        for lane in ("device->disk", "disk->device")
    )
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}))
    stack.enter_context(mock.patch.object(_bandwidth, "_disk_lanes", return_value=lanes))
    stack.enter_context(mock.patch.object(_bandwidth, "_key", return_value="this machine"))
    return stack


def _read_rates(folder: Path) -> Any:
    with _cache_in(folder):
        result = {bandwidth.lane: bandwidth.bandwidth_bytes_per_s for bandwidth in bandwidths(folder)}
    if not {"device->disk", "disk->device"} <= result.keys() or not all(0 < rate < 1e15 for rate in result.values()):
        raise AssertionError(f"rates {result} were taken from the cache")
    return None


_SOURCE = "int answer(int x) { return x * 6; }\n"


def _make_library(folder: Path) -> None:
    _read_library(folder)
    _build._loaded.cache_clear()


def _read_library(folder: Path) -> Any:
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}):
        _build._loaded.cache_clear()
        library = compile_source(_SOURCE, "answer")
        kept = keep_source("ANSWER = 42\n", "answer_1.py")
    return [library.answer(7) if library is not None else 42, kept.read_text()]


FORMATS: tuple[Format, ...] = (
    _sweep("sweep.yaml", _GRID),
    _sweep("random.json", json.dumps(_RANDOM)),
    _sweep("list.yml", _LIST),
    Format(name="problem of remat", make=_make_problem, read=_read_problem, inside=in_json),
    Format(name="saved graph", make=_make_graph, read=_read_graph, inside=in_safetensors),
    Format(name="N-Triples", make=_make_triples("x.nt"), read=lambda folder: len(read_ntriples(folder / "x.nt").nodes)),
    Format(
        name="N-Triples, gzip", make=_make_triples("x.nt.gz"),
        read=lambda folder: len(read_ntriples(folder / "x.nt.gz").nodes),
    ),
    Format(name="ids", make=_ids, read=lambda folder: len(read_id_file(folder / "train2id.txt"))),
    _features("x.npy", _save_npy),
    _features("x.safetensors", _save_safetensors, inside=in_safetensors),
    _features(
        "x.rows", lambda path: unified.write_features(path, _table(), progress=False), inside=in_rows, is_checked=True
    ),
    Format(name="checkpoint", make=_make_run, read=_read_run, is_checked=True, speed=0.5, inside=None),
    Format(name="ended run", make=_make_ended, read=_read_ended, is_checked=True, speed=0.3),
    Format(name="state of a fleet", make=_make_state, read=_read_state),
    Format(name="metrics and units", make=_make_lines, read=_read_lines, inside=in_json_lines, speed=0.2),
    Format(name="remembered rates", make=_make_rates, read=_read_rates, inside=in_json, never_fails=True),
    Format(name="compiled library", make=_make_library, read=_read_library, is_checked=True, never_fails=True),
)  # fmt: skip


def damaged_inside(fuzzed: Format, path: Path, choices: random.Random) -> str | None:
    """Damage a file but keep its outer form; return ``None`` if the format has no such damage."""
    if path.suffix == ".db":
        return in_database(path, choices)
    inside: Inside | None = fuzzed.inside
    if path.name in ("state.json", "checksums.json"):
        inside = in_json
    elif path.suffix == ".jsonl":
        inside = in_json_lines
    elif path.suffix == ".safetensors":
        inside = in_safetensors
    if inside is None:
        return None
    path.write_bytes(inside(path.read_bytes(), choices))
    return "another value inside"


__all__ = ["FORMATS", "Format", "damaged_inside", "damaged_json"]
