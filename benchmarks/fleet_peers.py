"""Peers of the fleet, each with one single-threaded process per device.

- ``plain``: one training a device, side by side, as if everything fitted.
- ``one``: one such training alone: model parallelism, of whose devices one works at a time.
- ``pipeline``: one training cut in two stages, four micro-batches (`torch.distributed.pipelining`, GPipe's schedule).
- ``fsdp``: one training, its batches split over the devices, its state sharded and in main memory between uses
  (FSDP2 with `CPUOffloadPolicy`).
"""

import argparse
import gc
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from benchmarks.fleet_models import batches, make_job, make_model
from benchmarks.forked import Forked
from penstock import fleet
from penstock.testing import GPT
from penstock.tiers import Budget, Handle, waterfalls_for

PIECE_BYTES = 4 * 2**20
NUM_MICRO_BATCHES = 4
RATE = 3e-4
Step = Callable[[tuple[torch.Tensor, ...]], None]


def throughput(settings: Any, kind: str, steps: int, moved: tuple[int, int] = (0, 0)) -> float:
    """Return the samples per second of all processes of the peer ``kind`` together.

    ``moved``: bytes out and in per sample that each moves beside its steps, in vain.
    """
    num_processes = 1 if kind == "one" else settings.devices
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [kind, str(steps)]
    command += [f"--{name}={getattr(settings, name)}" for name in ("model", "layers", "width", "length", "disk")]
    command += ["--batches", *map(str, settings.batches), "--moved", *map(str, moved)]
    common = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [Forked(main, command, more={**common, "RANK": str(rank)}) for rank in range(num_processes)]
    if sum(child.wait() != 0 for child in children):
        raise RuntimeError(f"the peer {kind!r} failed:\n{''.join(line for child in children for line in child.said)}")
    result = [json.loads(next(line for line in reversed(child.said) if line.startswith("{"))) for child in children]
    if kind in ("pipeline", "fsdp"):  # one training by all of them
        return float(result[0]["samples"] / max(child_result["seconds"] for child_result in result))
    return float(sum(child_result["samples"] / child_result["seconds"] for child_result in result))


class Traffic:
    """Dummy traffic: bytes that leave and come back during a step, on separate lanes, and that nothing needs."""

    def __init__(self, disk: Path, out_bytes: int, in_bytes: int):
        (self._waterfall,) = waterfalls_for([torch.device("cpu")], Budget(disk=disk))
        pieces = [
            torch.ones(PIECE_BYTES, dtype=torch.uint8).untyped_storage()
            for _ in range(max(1, out_bytes // PIECE_BYTES))
        ]
        self._pieces = pieces
        self._below = [self._waterfall.park(pieces[index % len(pieces)]) for index in range(in_bytes // PIECE_BYTES)]
        self._leaving: list[Handle] = []
        self._waterfall.drain()

    def begin(self) -> None:
        """Start moving the step's bytes on both lanes."""
        self._leaving = [self._waterfall.park(piece) for piece in self._pieces]
        for handle in self._below:
            handle.prefetch()

    def end(self) -> None:
        """Wait until the lanes have moved the step's bytes."""
        for handle in self._leaving:
            handle.finish_out()
            handle.release()
        for handle in self._below:
            handle.get()


def train_plainly(
    job: fleet.Job, device: str, steps: int, traffic: Traffic | None = None
) -> tuple[list[float], float, int]:
    """Train in a plain PyTorch loop; return losses, seconds and samples, counted after one step to warm up."""
    torch.manual_seed(job.seed)
    model = job.model().to(device)
    optimizer = job.optimizer(list(model.parameters()))
    losses, start_s, num_samples = [], 0.0, 0
    for number, batch in zip(range(steps + 1), job.data(), strict=False):
        if number == 1:
            start_s = time.perf_counter()
        if traffic is not None:
            traffic.begin()
        loss = job.loss(model, tuple(part.to(device) for part in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if traffic is not None:
            traffic.end()
        losses.append(loss.item())
        num_samples += len(batch[0]) if number else 0
    return losses, time.perf_counter() - start_s, num_samples


class Stage(nn.Module):
    """Some blocks of a GPT, with what comes before the first or after the last."""

    def __init__(self, model: GPT, rank: int, num_stages: int):
        super().__init__()
        per_stage = -(-len(model.blocks) // num_stages)
        self.blocks = nn.ModuleList(list(model.blocks)[rank * per_stage : (rank + 1) * per_stage])
        self.first = nn.ModuleList([model.token, model.position] if rank == 0 else [])
        self.last = nn.Sequential(*([model.norm, model.head] if rank == num_stages - 1 else []))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this stage: tokens or ``[batch, length, width]`` in, the same shape or scores out."""
        if len(self.first):
            token, position = self.first
            x = token(x) + position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.last(x)
        return scores


def pipeline_step(settings: Any, batch: int) -> Step:
    """Return a step of GPipe's schedule."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    if settings.model != "gpt":
        raise ValueError("the pipeline's stages are cut for --model gpt only")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = make_model(settings)
    assert isinstance(model, GPT)
    module = Stage(model, rank, size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, foreach=False)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, min(NUM_MICRO_BATCHES, batch), loss_fn=_cross_entropy)

    def step(inputs: tuple[torch.Tensor, ...]) -> None:
        tokens, targets = inputs
        schedule.step(*([tokens] if rank == 0 else []), target=targets if rank == size - 1 else None)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp_step(settings: Any, batch: int) -> Step:
    """Return a step of FSDP2, with each block as a unit."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    rank, size = distributed.get_rank(), distributed.get_world_size()
    model, policy = make_model(settings), CPUOffloadPolicy(pin_memory=settings.device == "cuda")
    mesh = distributed.init_device_mesh("cpu", (size,))
    for module in model.modules():
        if type(module).__name__ in ("Block", "ViTLayer"):
            fully_shard(module, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)
    share = batch // size

    def step(inputs: tuple[torch.Tensor, ...]) -> None:
        model(*(part[rank * share : (rank + 1) * share] for part in inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train_together(settings: Any, make: Callable[[Any, int], Step], batch: int, steps: int) -> tuple[float, int]:
    """Return the seconds and samples of ``steps`` steps, counted after one to warm up."""
    torch.manual_seed(0)
    step, start_s = make(settings, batch), 0.0
    for number, inputs in zip(range(steps + 1), batches(settings, batch), strict=False):
        if number == 1:
            distributed.barrier()
            start_s = time.perf_counter()
        step(inputs)
    distributed.barrier()
    return time.perf_counter() - start_s, steps * batch


def main(arguments: list[str]) -> None:
    """Run one process of a peer: half of its samples in small batches and half in large ones, as the fleet's jobs."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind", choices=["plain", "one", "pipeline", "fsdp"])
    options.add_argument("steps", type=int)
    options.add_argument("--model", default="gpt")
    for name in ("layers", "width", "length"):
        options.add_argument(f"--{name}", type=int)
    options.add_argument("--disk", type=Path)
    options.add_argument("--batches", type=int, nargs="+")
    options.add_argument("--moved", type=int, nargs=2, default=(0, 0))
    settings = options.parse_args(arguments)
    settings.device = "cpu"
    torch.set_num_threads(1)
    samples, seconds = 0, 0.0
    if settings.kind in ("pipeline", "fsdp"):
        distributed.init_process_group("gloo")
    for batch in settings.batches:
        steps = settings.steps * settings.batches[-1] // batch
        if settings.kind in ("pipeline", "fsdp"):
            taken_s, count = train_together(
                settings, pipeline_step if settings.kind == "pipeline" else fsdp_step, batch, steps
            )
        else:
            out_bytes, in_bytes = (moved_gib * batch for moved_gib in settings.moved)
            traffic = Traffic(settings.disk, out_bytes, in_bytes) if out_bytes + in_bytes else None
            _, taken_s, count = train_plainly(make_job(settings, RATE, batch, 1), "cpu", steps, traffic)
        samples, seconds = samples + count, seconds + taken_s
    if distributed.is_initialized():
        gc.collect()  # gloo's threads end with the models; Python must not end before them
        distributed.destroy_process_group()
    print(json.dumps({"samples": samples, "seconds": seconds}))
