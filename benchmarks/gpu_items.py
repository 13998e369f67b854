"""The items of `benchmarks.gpu`: each measures one thing against the usual alternatives and plain PyTorch.

Models are created on the device; medians are over rounds in which all ways run in alternation.
"""

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_rows import GIB, MIB, Context, Found, Item
from benchmarks.gpu_training import larger, parts, planned
from benchmarks.relational_graphs import GRAPHS, Edges, knowledge_graph, synthetic
from benchmarks.relational_peers import PEERS, make
from penstock import fleet, offload, probe, remat, unified
from penstock.devices import backend_of
from penstock.testing import GPT
from penstock.tiers import Budget

ROOT = Path(__file__).parents[1]
PHASES = {1: 5.0, 2: 5.0, 3: 8.0, 4: 6.0, 5: 6.0, 6: 4.0}
"""Minutes per phase."""


# 1: does it work, does it race


def _tests(name: str, *, sanitized: bool = False) -> Callable[[Context], Iterator[Found]]:
    def run(context: Context) -> Iterator[Found]:
        select = ["-k", "links_are_measured or time_is"] if context.quick else []
        sanitizer = {"TORCH_CUDA_SANITIZER": "1"} if sanitized and context.device == "cuda" else {}
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                f"tests/device/test_device_{name}.py",
                "--device",
                context.device,
                "-q",
                *select,
            ],
            cwd=ROOT,
            env={**os.environ, **sanitizer},
            capture_output=True,
            text=True,
            check=False,
        )
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
        broken = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        yield Found(
            name=f"tests of {name}" + (" under the sanitizer" if sanitized else ""),
            ours=counts.get("passed", 0),
            unit="passed",
            peer="failed",
            peer_value=counts.get("failed", 0) + counts.get("error", 0),
            note=", ".join(entry.rpartition("::")[2] for entry in broken[:8]),
        )

    return run


# 2: PyTorch-Direct and SSDTrain


def link(context: Context) -> Iterator[Found]:
    """Measure the link's bandwidth, and the rate of reading rows in place over it."""
    device = torch.device(context.device, 0)
    rate = probe.link_rate_bytes_per_s(device)
    yield Found(name="pinned copy", ours=(rate or 0.0) / 1e9, unit="GB/s")
    if context.device != "cuda":
        return
    num_rows = 20_000 if context.quick else 4_000_000
    for row_bytes in (512, 1024, 2408):
        table = torch.zeros(num_rows, row_bytes // 4)
        shared = unified.wrap(table)
        index = torch.randint(num_rows, (num_rows // 8,), device=device)
        on_host = index.cpu()
        pinned = torch.empty(len(index), row_bytes // 4, pin_memory=True)

        def by_host(table: Any = table, on_host: Any = on_host, pinned: Any = pinned) -> None:
            torch.index_select(table, 0, on_host, out=pinned)
            pinned.to(device, non_blocking=True)

        ways: dict[str, Callable[[], object]] = {
            "ours": lambda shared=shared, index=index: shared[index],
            "host": by_host,
        }  # type: ignore[misc]
        for is_sorted in (False, True):
            ways[f"sort={is_sorted}"] = functools.partial(unified.gather, shared, index, sort=is_sorted)
        seconds = context.timed(ways)
        moved = len(index) * row_bytes
        yield Found(
            name=f"random rows of {row_bytes} bytes",
            ours=moved / seconds["ours"] / 1e9,
            unit="GB/s",
            peer="gathered by the host, then copied:",
            peer_value=moved / seconds["host"] / 1e9,
            note=", ".join(
                f"{way} {moved / taken_s / (rate or 1):.0%} of the link" for way, taken_s in seconds.items()
            ),
        )


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, hidden: int):
        super().__init__()
        self.heads = max(1, hidden // 128)
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.to_qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.to_qkv(self.before(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def wide(context: Context) -> tuple[nn.Sequential, torch.Tensor]:
    """Return a model in SSDTrain's smallest setting, with three layers, and its input."""
    hidden, batch, length = (128, 2, 64) if context.quick else (8192, 16, 1024)
    dtype = torch.float32 if context.quick else torch.bfloat16
    with torch.device(context.device):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(hidden) for _ in range(3))).to(dtype)
        return model, torch.randn(batch, length, hidden, dtype=dtype)


def _offloaders(context: Context, model: nn.Module) -> dict[str, Any]:
    common = {"min_saving": 0.0, "min_size": "64KiB" if context.quick else "1MiB"}
    host = "64MiB" if context.quick else "64GiB"
    result = {"offload": offload.activations(model, host=host, **common)}
    for size in ("128MiB", "1GiB", "4GiB"):
        result[f"offload, {size} in flight"] = offload.activations(model, host=host, max_in_flight=size, **common)
    disk = context.out / "spill"
    disk.mkdir(exist_ok=True)
    result["offload to disk"] = offload.activations(
        model, disk=disk, host="32MiB" if context.quick else "16GiB", **common
    )
    return result


def activations(context: Context) -> Iterator[Found]:
    """Measure peaks and times of a step, ours and those of PyTorch's own methods."""
    model, x = wide(context)
    offloaders = _offloaders(context, model)

    def step(around: Any = None, run: Any = model) -> None:
        with around if around is not None else nullcontext():
            run(x).float().square().mean().backward()

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    ways: dict[str, Callable[[], object]] = {"plain": step, "plain again": step}
    ways["checkpoint"] = lambda: step(run=checkpointed)
    ways["save_on_cpu"] = lambda: step(torch.autograd.graph.save_on_cpu(pin_memory=True))
    ways |= {name: (lambda offloader=offloader: step(offloader)) for name, offloader in offloaders.items()}
    step()
    for _ in range(4):
        for offloader in offloaders.values():
            step(offloader)
    peaks = {name: probe.peak_bytes(way, device=context.device).activation_bytes for name, way in ways.items()}
    seconds = context.timed(ways)
    for name in ways:
        if name != "plain":
            said = offloaders[name].statistics().declined if name in offloaders else ""
            yield Found(
                name=f"activation peak, {name}",
                ours=peaks[name] / peaks["plain"],
                unit="of plain's",
                peer="time",
                peer_value=seconds[name] / seconds["plain"],
                note=said or f"{seconds[name]:.3f} s a step, {peaks[name] / GIB:.2f} GiB",
            )
    for offloader in offloaders.values():
        offloader.close()


# 3: Hector


def _layer(name: str, graph: str = "FB15k-237") -> Callable[[Context], Iterator[Found]]:
    def run(context: Context) -> Iterator[Found]:
        edges, width = _edges(context, graph), 16 if context.quick else 64
        ours, _ = make(_OURS, name, edges, width, context.device)
        first_s = backend_of(context.device).seconds(lambda: ours().square().mean().backward())
        ways: dict[str, Callable[[], object]] = {_OURS: lambda: ours().square().mean().backward()}
        notes = [f"first call {first_s:.1f} s"]
        for kind in () if context.quick else ("RGCNConv", "RGATConv", "HGTConv"):
            if kind in PEERS[name]:
                try:
                    peer, _ = make(kind, name, edges, width, context.device)
                    peer().square().mean().backward()
                except (ImportError, RuntimeError) as error:  # out of memory, mostly: matrices gathered for every edge
                    notes.append(f"{kind}: {str(error).splitlines()[0][:100]}")
                else:
                    ways[kind] = lambda peer=peer: peer().square().mean().backward()  # type: ignore[misc]
        seconds = context.timed(ways)
        peers = {kind: taken for kind, taken in seconds.items() if kind != _OURS}
        yield Found(
            name=f"{name}, training step, {edges.name}, width {width}",
            ours=1e3 * seconds[_OURS],
            unit="ms",
            peer="PyG's" if peers else "",
            peer_value=1e3 * min(peers.values()) if peers else None,
            note="; ".join(notes),
        )

    return run


_OURS = "penstock"


def _edges(context: Context, graph: str) -> Edges:
    """Return FB15k-237 if it is available, otherwise a graph of its size; other graphs are synthetic."""
    if graph != "FB15k-237":
        return GRAPHS[graph]()
    if context.data is not None:
        os.environ["PENSTOCK_DATA"] = str(context.data)
        if (context.data / "fb15k237" / "train2id.txt").is_file():
            return knowledge_graph("fb15k237")
    if context.quick:
        return synthetic("a small graph", 300, 2000, 5, 0.4)
    return synthetic("like FB15k-237", 14_541, 272_115, 237, 0.34)


# 4: Hydra


def fleets(context: Context) -> Iterator[Found]:
    """Train four models, each larger than the budget, with parts of the engine switched off one at a time."""
    layers, width, length = (4, 64, 32) if context.quick else (24, 1024, 512)
    budget, host = ("1536KiB", "64MiB") if context.quick else ("2GiB", "64GiB")
    generator = torch.Generator().manual_seed(0)
    data = [
        tuple(torch.randint(256, (2 if context.quick else 8, length), generator=generator) for _ in range(2))
        for _ in range(2)
    ]

    def job(name: str) -> fleet.Job:
        return fleet.Job(
            name=name,
            model=lambda: GPT(num_layers=layers, width=width, num_heads=max(1, width // 64), context=length),
            data=lambda: data,
            loss=lambda model, batch: model(*batch),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            steps=2 if context.quick else 6,
        )

    parts = {
        "whole": fleet.Ablation(),
        "without double buffer": fleet.Ablation(double_buffer=False),
        "one job after the other": fleet.Ablation(sharp=False),
    }
    whole_s, losses = math.nan, {}
    for name, ablation in parts.items():
        results: Any = None

        def run(ablation: Any = ablation) -> None:
            nonlocal results
            results = fleet.run(
                [job(letter) for letter in "abcd"], [f"{context.device}:0"], budget, host=host,
                ablation=ablation, progress=None,
            )  # fmt: skip

        taken_s = backend_of(context.device).seconds(run)
        losses[name] = [loss for result in results.values() for loss in result.losses]
        if any(result.error is not None for result in results.values()):
            raise RuntimeError(str([result.error for result in results.values()]))
        compute_s, stall_s = (
            sum(getattr(device, key) for device in results.devices) for key in ("compute_s", "stall_s")
        )
        step_s = (compute_s + stall_s) / len(losses[name])
        whole_s = step_s if name == "whole" else whole_s
        apart = max(abs(loss - two) / abs(two) for loss, two in zip(losses[name], losses["whole"], strict=True))
        yield Found(
            name=f"four models of {layers} x {width} in {budget}: {name}",
            ours=1e3 * step_s,
            unit="ms a step",
            peer="" if name == "whole" else "over the whole engine's",
            peer_value=None if name == "whole" else step_s / whole_s,
            note=f"{stall_s / max(1e-9, compute_s + stall_s):.0%} of it waits for bytes; {taken_s:.0f} s in all, with "
            f"making and measuring; losses within {apart:.0e} of the whole engine's",
        )


# 5: Libra


def batches(context: Context) -> Iterator[Found]:
    """Find the largest batch whose step stays below a cap, plainly and by a plan; train and measure each."""
    layers, width, length, cap = (2, 64, 64, 4 * MIB) if context.quick else (12, 1024, 512, 8 * GIB)
    with torch.device(context.device):
        torch.manual_seed(0)
        model = GPT(num_layers=layers, width=width, num_heads=max(1, width // 64), context=length)

    def made(size: int) -> tuple[nn.Module, list[torch.Tensor]]:
        tokens = torch.randint(256, (size, length)).to(context.device)
        return model, [tokens, tokens]

    def peak_bytes(step: Any, size: int) -> int:
        inputs = made(size)[1]
        step(*inputs).backward()
        return probe.peak_bytes(lambda: step(*inputs).backward(), device=context.device).peak_bytes

    plain = 4
    while peak_bytes(model, plain + 4) <= cap:
        plain += 4
    options: dict[str, Any] = {"host": "64MiB" if context.quick else "64GiB"}
    quarters = remat.max_batch(lambda size: made(size * plain // 4), cap, start=4, **options)
    result = quarters * plain // 4
    with closing(remat.optimize(*made(result), cap, **options)) as step:
        peak = peak_bytes(step, result)
    yield Found(
        name=f"largest batch of a GPT {layers} x {width} within {cap / GIB:.3g} GiB",
        ours=result / plain,
        unit="of plain's",
        note=f"{result} sequences, plainly {plain}; its measured peak is {peak / cap:.3f} of the cap",
    )


def budgets(context: Context) -> Iterator[Found]:
    """Train a GPT in shares of its peak, by recomputing alone and with swapping."""
    layers, width, batch, length = (2, 64, 4, 64) if context.quick else (12, 1024, 16, 1024)
    with torch.device(context.device):
        torch.manual_seed(0)
        model = GPT(num_layers=layers, width=width, num_heads=max(1, width // 64), context=length)
        tokens = torch.randint(256, (batch, length))
    host = "64MiB" if context.quick else "64GiB"

    def plain() -> None:
        model(tokens, tokens).backward()

    plain()
    report = probe.peak_bytes(plain, device=context.device)
    for share in (0.7, 0.5):
        budget = report.start_bytes + int(share * report.activation_bytes)
        for method in ("recompute", "hybrid"):
            account = Budget(device=budget, host=host if method == "hybrid" else None)
            with closing(remat.optimize(model, [tokens, tokens], account, method=method)) as step:

                def ours(step: Any = step) -> None:
                    step(tokens, tokens).backward()

                ours()
                peak = probe.peak_bytes(ours, device=context.device)
                seconds = context.timed({"plain": plain, "ours": ours})
            yield Found(
                name=f"GPT {layers} x {width}, {share:.0%} of its activation peak, {method}",
                ours=seconds["ours"] / seconds["plain"],
                unit="of plain's time",
                peer="peak over the budget",
                peer_value=peak.peak_bytes / budget,
                note=f"{report.peak_bytes / GIB:.2f} GiB without a plan; bytes asked for at the peak "
                f"{peak.requested_bytes / budget:.4f} of the budget",
            )


ITEMS = (
    *(
        Item(
            name=f"tests of {room}",
            phase=1,
            headline="does it work",
            paper="",
            run=_tests(room),
            is_quick=room == "tiers",
        )
        for room in ("tiers", "clocks", "offload", "unified", "remat", "fleet", "relational")
    ),
    Item(
        name="races in tiers",
        phase=1,
        headline="does it race",
        paper="",
        run=_tests("tiers", sanitized=True),
        is_quick=False,
    ),
    Item(
        name="races in offload",
        phase=1,
        headline="does it race",
        paper="",
        run=_tests("offload", sanitized=True),
        is_quick=False,
    ),
    Item(name="link", phase=2, headline="PyTorch-Direct", paper="transfer -47.1%, 90% of the link", run=link),
    Item(
        name="activations",
        phase=2,
        headline="SSDTrain",
        paper="-28% to -47% of the peak at plain's time",
        run=activations,
    ),
    Item(name="RGCN", phase=3, headline="Hector", paper="up to 43.7x in training", run=_layer("RGCN")),
    Item(name="RGAT", phase=3, headline="Hector", paper="up to 43.7x in training", run=_layer("RGAT"), is_quick=False),
    Item(name="HGT", phase=3, headline="Hector", paper="up to 43.7x in training", run=_layer("HGT"), is_quick=False),
    *(
        Item(
            name=f"{layer_name}, AM-like",
            phase=3,
            headline="Hector",
            paper="up to 43.7x in training",
            run=_layer(layer_name, "AM-like"),
            is_quick=False,
        )
        for layer_name in ("RGCN", "RGAT")
    ),
    Item(name="fleets", phase=4, headline="Hydra", paper="double buffer 1.5-2x", run=fleets),
    Item(name="planned steps", phase=6, headline="a model larger than the budget", paper="", run=planned),
    Item(name="larger", phase=6, headline="a model larger than the budget", paper="FSDP2's offloading", run=larger),
    Item(name="parts of a step", phase=6, headline="a model larger than the budget", paper="", run=parts),
    Item(name="batches", phase=5, headline="Libra", paper="batch 3.12x", run=batches),
    Item(name="budgets", phase=5, headline="Libra", paper="peak within the budget; batch 3.12x", run=budgets),
)
