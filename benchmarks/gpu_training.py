"""Items of `benchmarks.gpu` on one model whose parameters, gradients and Adam's state exceed a budget.

Each way has its own model, one after the other: two at once would change each other's peak. Several steps are timed
together, from an idle device to an idle device.
"""

import functools
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.gpu_rows import GIB, Context, Found
from penstock import offload, probe
from penstock.testing import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A model and what it trains on."""

    layers: int
    width: int
    tokens: tuple[int, int]
    device: str

    def model(self) -> GPT:
        """Return a model with checkpointed blocks, on the device."""
        with torch.device(self.device):
            torch.manual_seed(0)
            return GPT(
                num_layers=self.layers,
                width=self.width,
                num_heads=max(1, self.width // 128),
                context=self.tokens[1],
                checkpointed=True,
            )

    def batch(self) -> torch.Tensor:
        """Return tokens, which are also the targets."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(256, self.tokens, generator=generator).to(self.device)


@dataclass(slots=True)
class _Run:
    """Measured steps of one way."""

    step_s: float = math.nan
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    said: str = ""


def larger(context: Context) -> Iterator[Found]:
    """Measure steps within budgets that hold a part of the state, plain training, and FSDP2 with its offloading."""
    backward: dict[str, Any] = {"update_in_backward": True}
    host = {**backward, "update": "host"}
    ways: list[tuple[float, dict[str, Any]]] = [(0.25, {}), (0.25, backward), (0.25, host), (0.125, backward)]
    layers, width = (2, 64) if context.quick else (24, 2048)
    for tokens, chosen in [((2, 32), ways)] if context.quick else [((8, 1024), ways), ((32, 1024), ways[1:3])]:
        case = _Case(layers=layers, width=width, tokens=tokens, device=context.device)
        yield from _compared(case, context, chosen)


def parts(context: Context) -> Iterator[Found]:
    """Measure for how long the device computes, copies in and copies out in steps within a quarter of the state."""
    for layers, width in [(2, 64)] if context.quick else [(24, 2048), (12, 4096)]:
        case = _Case(layers=layers, width=width, tokens=(2, 32) if context.quick else (8, 1024), device=context.device)
        plain = _plain(case, context)
        for update in ("device", "host"):
            yield _parts(case, context, plain, update)
            _clear()


def planned(context: Context) -> Iterator[Found]:
    """Measure steps that follow a plan beside ones decided operator by operator, with what the plan predicts."""
    large = [(24, 2048, (8, 1024)), (12, 4096, (8, 1024)), (12, 4096, (32, 1024))]
    for layers, width, tokens in [(2, 64, (2, 32))] if context.quick else large:
        case = _Case(layers=layers, width=width, tokens=tokens, device=context.device)
        plain = _plain(case, context)
        for in_backward, follows_plans in [(True, True), (True, False), (False, True)]:
            yield _planned(case, context, plain, in_backward=in_backward, follows_plans=follows_plans)
            _clear()


def _planned(case: _Case, context: Context, plain: _Run, *, in_backward: bool, follows_plans: bool) -> Found:
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    budget_bytes, host = max(4 * num_parameters, 2**20), "64MiB" if context.quick else "90GiB"
    training = offload.training(model, optimizer, budget_bytes, host=host, update_in_backward=in_backward)
    training._managed.pages.follows_plans = follows_plans
    try:
        run = _trained(case, context, model, optimizer, lambda: training, num_warm=4 if context.quick else 14)
        busy_s = _busy(lambda: _trained(case, context, model, optimizer, lambda: training, num_warm=0), context)
        statistics, reserved_bytes = training.statistics(), torch.accelerator.max_memory_reserved()
    finally:
        training.close(discard=True)
    predicted = statistics.predicted_step_s
    moved = statistics.step_fetched_bytes / num_parameters, statistics.step_parked_bytes / num_parameters
    notes = [
        f"{statistics.num_planned_steps} of {statistics.num_steps} steps planned",
        *([] if predicted is None else [f"predicted {1e3 * predicted:.0f} ms"]),
        f"in {moved[0]:.1f} out {moved[1]:.1f} bytes per parameter",
        f"peak {run.peak_bytes / budget_bytes:.3f} and reserved {reserved_bytes / budget_bytes:.3f} of the budget",
        *(f"{kind} {1e3 * taken_s:.0f} ms" for kind, taken_s in busy_s.items()),
    ]
    where = "updates in backward" if in_backward else "plain defaults"
    way = "planned" if follows_plans else "operator by operator"
    name = f"{num_parameters / 1e9:.2g}B parameters, {math.prod(case.tokens)} tokens, a quarter, {where}, {way}"
    return _over_plain(name, run, plain, ", ".join(notes))


def _parts(case: _Case, context: Context, plain: _Run, update: Literal["device", "host"]) -> Found:
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    budget_bytes, host = max(4 * num_parameters, 2**20), "64MiB" if context.quick else "90GiB"
    training = offload.training(model, optimizer, budget_bytes, host=host, update=update, update_in_backward=True)
    try:
        run = _trained(case, context, model, optimizer, lambda: training)
        busy_s = _busy(lambda: _trained(case, context, model, optimizer, lambda: training, num_warm=0), context)
    finally:
        training.close(discard=True)
    name = f"{num_parameters / 1e9:.2g}B parameters, width {case.width}, updates on the {update}"
    return _over_plain(
        name, run, plain, ", ".join(f"{kind} {1e3 * taken_s:.0f} ms" for kind, taken_s in busy_s.items())
    )


def _over_plain(name: str, run: _Run, plain: _Run, note: str) -> Found:
    return Found(
        name=name,
        ours=1e3 * run.step_s,
        unit="ms a step",
        peer="over plain",
        peer_value=run.step_s / plain.step_s,
        note=note,
    )


def _busy(run: Callable[[], object], context: Context) -> dict[str, float]:
    """Return the seconds a step in which the device is busy, by the kind of its work; empty without CUDA's profiler."""
    if context.device != "cuda":
        run()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    spans: dict[str, list[tuple[float, float]]] = {"computes": [], "copies in": [], "copies out": []}
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            kind = "copies in" if "HtoD" in event.name else "copies out" if "DtoH" in event.name else "computes"
            spans[kind].append((event.time_range.start, event.time_range.end))
    result = {kind: _union_us(each) for kind, each in spans.items()}
    copies = _union_us([*spans["copies in"], *spans["copies out"]])
    result["both copies at once"] = result["copies in"] + result["copies out"] - copies
    result["anything"] = _union_us([span for each in spans.values() for span in each])
    return {kind: taken / 1e6 / _num_steps(context) for kind, taken in result.items()}


def _union_us(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _num_steps(context: Context) -> int:
    return 1 if context.quick else 6


def _compared(case: _Case, context: Context, chosen: Sequence[tuple[float, dict[str, Any]]]) -> Iterator[Found]:
    model = case.model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    state_bytes, name = 16 * num_parameters, f"{num_parameters / 1e9:.2g}B parameters, {math.prod(case.tokens)} tokens"
    plain = _plain(case, context)
    yield Found(
        name=f"{name}: plain training",
        ours=1e3 * plain.step_s,
        unit="ms a step",
        note=f"peak {plain.peak_bytes / GIB:.2f} GiB, parameters, gradients and state {state_bytes / GIB:.2f} GiB",
    )
    ways: dict[str, Callable[[], _Run]] = {}
    if context.device == "cuda":
        ways["FSDP2, CPUOffloadPolicy"] = functools.partial(_sharded, case, context)
    for share, options in chosen:
        said = "".join(f", {key}={value}" for key, value in options.items())
        ways[f"budget {share:.1%} of the state{said}"] = functools.partial(
            _ours, case, context, int(share * state_bytes), options
        )
    for way, run in ways.items():
        try:
            result = run()
        except (RuntimeError, MemoryError) as error:
            yield Found(name=f"{name}: {way}", ours=math.nan, unit="", note=str(error).splitlines()[0][:160])
            continue
        finally:
            _clear()
        pairs = list(zip(result.losses, plain.losses, strict=True))
        apart = max(abs(ours - two) / abs(two) for ours, two in pairs)
        note = f"peak {result.peak_bytes / GIB:.2f} GiB{result.said}; losses "
        note += "equal to the bit" if not apart else f"within {apart:.1e}"
        yield _over_plain(f"{name}: {way}", result, plain, note)


def _plain(case: _Case, context: Context) -> _Run:
    model = case.model()
    try:
        return _trained(case, context, model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    finally:
        del model
        _clear()


def _ours(case: _Case, context: Context, budget_bytes: int, options: dict[str, Any]) -> _Run:
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    host = "64MiB" if context.quick else "90GiB"
    training = offload.training(model, optimizer, max(budget_bytes, 2**20), host=host, **options)
    try:
        run = _trained(case, context, model, optimizer, lambda: training)
        statistics = training.statistics()
        moved = (statistics.step_fetched_bytes + statistics.step_parked_bytes) / statistics.num_parameters
        run.said = f", {run.peak_bytes / budget_bytes:.3f} of the budget; {moved:.1f} bytes per parameter"
        return run
    finally:
        training.close(discard=True)


def _sharded(case: _Case, context: Context) -> _Run:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = case.model().cpu()
            for block in model.blocks:
                fully_shard(block, offload_policy=CPUOffloadPolicy())
            fully_shard(model, offload_policy=CPUOffloadPolicy())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            return _trained(case, context, model, optimizer)
        finally:
            dist.destroy_process_group()


def _trained(
    case: _Case,
    context: Context,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    num_warm: int | None = None,
) -> _Run:
    """Run a few steps to warm up, then time some."""
    batch, run = case.batch(), _Run()
    losses: list[torch.Tensor] = []

    def step() -> None:
        with inside():
            with torch.autocast(context.device, dtype=torch.bfloat16):
                loss = model(batch, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())

    if num_warm is None:
        num_warm = 2 if context.quick else 7  # an order of operators is measured twice before it is followed
    for _ in range(num_warm):
        step()
    num_steps = _num_steps(context)

    def steps() -> None:
        for _ in range(num_steps):
            step()

    torch.accelerator.synchronize()
    begin_s = time.perf_counter()
    run.peak_bytes = probe.peak_bytes(steps, device=context.device).peak_bytes
    torch.accelerator.synchronize()
    run.step_s = (time.perf_counter() - begin_s) / num_steps
    run.losses = [loss.item() for loss in losses]
    return run


def _clear() -> None:
    """Free what a run left. The autograd engine's own threads drop their last hooks some time after backward."""
    for _ in range(10):
        gc.collect()
        if not torch.accelerator.memory_allocated():
            break
        time.sleep(0.05)
    torch.accelerator.empty_cache()
