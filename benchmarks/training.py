"""Step times of a model whose parameters, gradients and Adam's state are a multiple of main memory.

Each way to train has its own process. Those of Penstock have a hard cap, ``RLIMIT_DATA``, on their memory in addition
to the interpreter and its libraries: the state of the model is 2, 4 and 8 times the cap. Plain training has no cap; it
is shown to die under the largest. All take the same steps in alternation, and must give bit-identical losses. A fleet
of one job has the same budget and its own runs, since it owns its loop. If DeepSpeed is installed, its ZeRO stage 3
with parameters and optimizer state on NVMe trains in alternation with the others, on its CPU accelerator and without a
cap.

Run it with ``python -m benchmarks.training --disk /nvme --json training.json``.
"""

import argparse
import importlib.util
import json
import math
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks import common
from penstock import fleet, offload, probe
from penstock.testing import GPT
from penstock.units import format_bytes

_WARM_STEPS = 4
_BUDGET_SHARE = 0.7
"""Budget as a share of the cap. The rest is for memory that PyTorch does not count: threads, libraries, fragments."""
_STACK_BYTES = 2**18
"""Stack size of a thread: the kernel counts all of it."""
_FACTORS = (2, 4, 8)
_answers = os.fdopen(os.dup(1), "w")


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--tokens", type=int, action="append", help="per step; default 1024 and 4096")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--child", help="be one of the processes")
    options.add_argument("--cap", type=int)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.layers, settings.width, settings.rounds = 6, 256, 2
    if settings.child:
        _child(settings)
        return
    rows: list[common.Row] = []
    for tokens in settings.tokens or ([256] if settings.quick else [1024, 4096]):
        rows += compared(settings, tokens)
        configuration = {
            "layers": settings.layers,
            "width": settings.width,
            "rounds": settings.rounds,
            "optimizer": "AdamW",
        }
        common.write(settings.json, configuration, rows)


def compared(settings: argparse.Namespace, tokens: int) -> list[common.Row]:
    """Compare all ways, in alternation."""
    state = 4 * _num_parameters(settings) * 4
    ways: dict[str, tuple[str, int | None]] = {"plain, no cap": ("plain", None)}
    for factor in _FACTORS:
        ways[f"Penstock, state {factor} x cap"] = ("training", state // factor)
    ways[f"in backward, state {_FACTORS[-1]} x cap"] = ("backward", state // _FACTORS[-1])
    if importlib.util.find_spec("deepspeed") is not None:
        ways["DeepSpeed ZeRO-3, NVMe, no cap"] = ("deepspeed", None)
    processes = {name: _Process(settings, method, cap, tokens) for name, (method, cap) in ways.items()}
    rows: list[common.Row] = []
    lines: list[list[str]] = []
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    losses: dict[str, list[str]] = {name: [] for name in processes}
    failed: dict[str, dict[str, Any]] = {}
    for number in range(_WARM_STEPS + settings.rounds):
        for name, process in processes.items():
            answer = process.ask("step")
            if "error" in answer:
                failed.setdefault(name, answer)
                continue
            losses[name].append(answer["loss"])
            if number >= _WARM_STEPS:
                seconds[name].append(answer["seconds"])
        print(f"step {number + 1} of {_WARM_STEPS + settings.rounds}", flush=True)
    plain = "plain, no cap"
    for name, process in processes.items():
        result = {**process.ask("finish"), **failed.get(name, {})}
        cap = ways[name][1]
        line = [name, "" if cap is None else format_bytes(cap)]
        title = f"{name}, {tokens} tokens"
        if "error" in result:
            rows.append(common.Row(name=title, metric="failed", value=1.0, unit="bool"))
            lines.append([*line, "", "", "", "", "", str(result["error"])[:90]])
            continue
        step_s, equal = median(seconds[name]), losses[name] == losses[plain]
        ratio = common.paired_ratio(seconds[name], seconds[plain]) if name != plain else None
        shown = "" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        lines.append(
            [*line, f"{step_s:.2f} s", shown, f"{tokens / step_s:.0f}", str(equal), result.get("moved", ""), ""]
        )
        peer, value = ("", None) if ratio is None else (plain, ratio.median)
        rows.append(common.Row(name=title, metric="step", value=step_s, unit="s", peer=peer, ratio=value))
        rows.append(common.Row(name=title, metric="losses equal to plain's", value=float(equal), unit="bool"))
        for key, unit in (("in", "B"), ("out", "B"), ("stall", "s"), ("peak", "B"), ("data", "B"), ("resident", "B")):
            if key in result:
                rows.append(common.Row(name=title, metric=key, value=result[key], unit=unit))
    smallest = state // _FACTORS[-1]
    died = _Process(settings, "plain", smallest, tokens).ask("step").get("error")
    lines.append(["plain under that cap", format_bytes(smallest), "", "", "", "", "", str(died)[:90]])
    title = f"plain under that cap, {tokens} tokens"
    rows.append(common.Row(name=title, metric="died", value=float(died is not None), unit="bool"))
    for factor in _FACTORS:
        result = _Process(settings, "fleet", state // factor, tokens).ask("run")
        title, step_s = f"a fleet of one, state {factor} x budget", result.get("seconds", math.nan)
        value = step_s / median(seconds[plain])
        lines.append([title, "", f"{step_s:.2f} s", f"{value:.2f}", "", "", "", str(result.get("error", ""))[:90]])
        name = f"{title}, {tokens} tokens"
        rows.append(common.Row(name=name, metric="step", value=step_s, unit="s", peer=plain, ratio=value))
    common.show(
        f"state {format_bytes(state)}, {tokens} tokens a step, {settings.rounds} steps in turn",
        ["way", "cap", "step", "ratio to plain", "tokens/s", "equal", "bytes per parameter", "error"],
        lines,
    )
    return rows


def _num_parameters(settings: argparse.Namespace) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _model(settings).parameters())


def _model(settings: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(num_layers=settings.layers, width=settings.width, num_heads=8, context=256)


class _Process:
    """One way to train, in its own process."""

    def __init__(self, settings: argparse.Namespace, method: str, cap: int | None, tokens: int):
        command = [sys.executable, "-m", "benchmarks.training", "--child", method, "--tokens", str(tokens)]
        command += ["--layers", str(settings.layers), "--width", str(settings.width), "--disk", str(settings.disk)]
        if cap is not None:
            command += ["--cap", str(cap)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "ended"}
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        assert self._process.stderr is not None
        return {"error": (self._process.stderr.read().strip().splitlines() or ["ended"])[-1]}


def _child(settings: argparse.Namespace) -> None:
    (tokens,) = settings.tokens
    shape = (tokens // 256, 257) if tokens >= 256 else (1, tokens + 1)
    generator = torch.Generator().manual_seed(1)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield torch.randint(256, shape, generator=generator)

    if settings.child == "deepspeed":  # which writes to both, whoever reads them
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    else:
        threading.stack_size(_STACK_BYTES)
    with tempfile.TemporaryDirectory(dir=settings.disk) as directory:
        _warm_up(directory)
        before, resident = _data_bytes(), _most_resident_bytes()
        if settings.cap is not None and settings.child != "fleet":
            limit = before + settings.cap
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if settings.child == "fleet":
            sys.stdin.readline()
            _say(_fleet(settings, directory, batches))
            return
        step, finish = _trainer(settings, directory)
        for batch, line in zip(batches(), sys.stdin, strict=False):
            if line.strip() == "finish":
                _say({**finish(), "data": _data_bytes() - before, "resident": _most_resident_bytes() - resident})
                return
            start_s = time.perf_counter()
            loss = step(batch)
            _say({"loss": loss.hex(), "seconds": time.perf_counter() - start_s})


def _trainer(settings: argparse.Namespace, directory: str) -> tuple[Callable[[torch.Tensor], float], Callable[[], Any]]:
    make_optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)  # noqa: E731

    def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    if settings.child == "plain":
        model = _model(settings)
        optimizer = make_optimizer(model.parameters())
        return lambda batch: one_step(model, optimizer, batch), dict
    if settings.child == "deepspeed":
        return _deepspeed(settings, directory)
    training = offload.training(
        lambda: _model(settings),
        make_optimizer,
        int(settings.cap * _BUDGET_SHARE),
        disk=directory,
        update_in_backward=settings.child == "backward",
    )

    def step(batch: torch.Tensor) -> float:
        with training:
            return one_step(training.model, training.optimizer, batch)

    def finish() -> dict[str, Any]:
        statistics = training.statistics()
        into, out = (
            size / statistics.num_parameters for size in (statistics.step_fetched_bytes, statistics.step_parked_bytes)
        )
        training.close(discard=True)
        return {
            "in": into, "out": out, "moved": f"{into:.1f} in, {out:.1f} out",
            "stall": statistics.stall_s / statistics.num_steps,
            "peak": statistics.measured_peak_bytes or 0,
        }  # fmt: skip

    return step, finish


def _deepspeed(
    settings: argparse.Namespace, directory: str
) -> tuple[Callable[[torch.Tensor], float], Callable[[], Any]]:
    """Return the configuration that DeepSpeed documents for models beyond memory; it keeps a block or two live."""
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_free_port()),
    )  # fmt: skip
    import deepspeed

    model = _model(settings)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    nvme = {"device": "nvme", "nvme_path": directory, "pin_memory": False}
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {**nvme, "buffer_size": 2 * largest, "buffer_count": 8},
                "offload_optimizer": nvme,
                "sub_group_size": 2 * largest,
                "stage3_max_live_parameters": 2 * block,
                "stage3_prefetch_bucket_size": block,
                "stage3_param_persistence_threshold": 4096,
            },
            "aio": {"block_size": 2**20, "queue_depth": 8, "thread_count": 2, "overlap_events": True},
        },
    )

    def step(batch: torch.Tensor) -> float:
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step, dict


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _fleet(
    settings: argparse.Namespace, directory: str, batches: Callable[[], Iterator[torch.Tensor]]
) -> dict[str, Any]:
    num_steps = _WARM_STEPS + max(2, settings.rounds // 2)

    def data() -> list[torch.Tensor]:
        stream = batches()
        return [next(stream) for _ in range(num_steps)]

    job = fleet.Job(
        name="one",
        epochs=1,
        model=lambda: _model(settings),
        data=data,
        loss=lambda model, batch: model(batch[:, :-1], batch[:, 1:]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )
    try:
        with fleet.Fleet(["cpu"], int(settings.cap * _BUDGET_SHARE), disk=directory, progress=None) as running:
            running.add(job)
            result = running.wait()["one"]
            records = sorted(running.records, key=lambda record: record.start_s)
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    if result.state is not fleet.JobState.DONE:
        return {"error": str(result.error)}
    per_step = len(records) // num_steps
    warm = records[_WARM_STEPS * per_step :]
    return {"seconds": (warm[-1].end_s - warm[0].start_s) / (num_steps - _WARM_STEPS)}


def _warm_up(directory: str) -> None:
    """Train a small model in the same way, so that threads, kernels and buffers of libraries exist."""
    model = GPT(num_layers=1, width=128, num_heads=8, context=256)
    optimizer = torch.optim.AdamW(model.parameters())
    training = offload.training(model, optimizer, probe.held_bytes("cpu") + 2**25, disk=directory)
    for _ in range(3):
        tokens = torch.randint(256, (4, 257))
        with training:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    training.close()


def _data_bytes() -> int:
    """Return the bytes that the kernel counts against ``RLIMIT_DATA``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _most_resident_bytes() -> int:
    """Return the most bytes of main memory that the process ever held at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True, file=_answers)


if __name__ == "__main__":
    main()
