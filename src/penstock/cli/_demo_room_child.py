"""A process that trains what a room is for, plainly or by Penstock, with or without a cap on its memory.

Run as ``python -m penstock.cli._demo_room_child``; it obeys the lines "round" and "finish" on standard input and
answers each with a line of JSON. With a cap the process may take at most that many bytes after its libraries have
loaded: ``RLIMIT_DATA``, enforced by the kernel.
"""

import argparse
import functools
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from penstock import fleet, relational, unified
from penstock.cli._choices import DemoRoom
from penstock.cli._demo_child import STACK_BYTES, Sampled, data_bytes, fail, limit, say
from penstock.cli._trainer import standard_library
from penstock.report import save
from penstock.testing import GPT
from penstock.units import format_bytes, format_duration


class _RoomTask(ABC):
    """The training that a room's demo shows. Made before the cap is set."""

    story: str
    """The task, in a sentence or two."""

    @abstractmethod
    def build(self, cap_bytes: int | None) -> None:
        """Make what the cap covers; by Penstock if there is a cap for it."""

    @abstractmethod
    def train(self) -> list[float]:
        """Train one round and return its losses."""

    @abstractmethod
    def told(self) -> str:
        """Return what Penstock did, in a sentence."""


class _Fleet(_RoomTask):
    """Four models on two devices, each a thread of the CPU; plainly two threads train two of them each."""

    def __init__(self, settings: argparse.Namespace):
        torch.set_num_threads(1)
        self._settings = settings
        self._num_steps, self._length = (3, 64) if settings.small else (10, 256)
        size = sum(parameter.numel() for parameter in self._model().parameters())
        self.story = (
            f"Four GPTs of {size / 1e6:.1f}M parameters train {self._num_steps} steps each on Python's own standard "
            "library, with AdamW at four learning rates, on two cores: two at a time. Parameters, gradients and "
            "optimizer state of all are "
            f"{format_bytes(4 * 16 * size)}."
        )
        self._state_bytes = 16 * size
        self._results: fleet.Results | None = None
        tiny = self._jobs(1)[:1]
        fleet.run(tiny, devices=["cpu"], budget=8 * self._state_bytes, progress=None)  # libraries load before the cap

    def _model(self) -> GPT:
        return GPT(num_layers=4, width=512, num_heads=8, context=self._length)

    def _batches(self, num_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        text, generator = standard_library(), torch.Generator().manual_seed(0)
        starts = torch.randint(len(text) - self._length, (num_steps, 4, 1), generator=generator)
        places = starts + torch.arange(self._length + 1)
        return [(tokens[:, :-1], tokens[:, 1:]) for tokens in text[places].long()]

    def _jobs(self, num_steps: int) -> list[fleet.Job]:
        return [
            fleet.Job(
                name=f"lr={rate}",
                model=self._model,
                data=lambda: self._batches(num_steps),
                loss=lambda model, batch: model(*batch),
                optimizer=functools.partial(torch.optim.AdamW, lr=rate),
                epochs=1,
            )
            for rate in (1e-4, 3e-4, 1e-3, 3e-3)
        ]

    def build(self, cap_bytes: int | None) -> None:
        """Make the jobs; models are made when they train."""
        self._cap_bytes = cap_bytes
        self._run = self._by_fleet if self._settings.penstock else self._plainly

    def train(self) -> list[float]:
        """Train all jobs to their end."""
        return self._run(self._jobs(self._num_steps))

    def _by_fleet(self, jobs: list[fleet.Job]) -> list[float]:
        assert self._cap_bytes is not None
        self._results = fleet.run(
            jobs, devices=["cpu", "cpu"], budget=self._cap_bytes // 4, host=self._cap_bytes // 20,
            disk=self._settings.disk, progress=None,
        )  # fmt: skip
        for result in self._results.values():
            if result.error is not None:
                raise RuntimeError(result.error)
        return [loss for result in self._results.values() for loss in result.losses]

    def _plainly(self, jobs: list[fleet.Job]) -> list[float]:
        """Train as one would with two processes: all models exist, and each thread trains two of them."""
        models = []
        for job in jobs:
            torch.manual_seed(job.seed)
            models.append(job.model())
        optimizers = [job.optimizer(model.parameters()) for job, model in zip(jobs, models, strict=True)]

        def train(number: int) -> list[float]:
            losses = []
            for batch in self._batches(self._num_steps):
                optimizers[number].zero_grad()
                loss = models[number](*batch)
                loss.backward()
                optimizers[number].step()
                losses.append(loss.item())
            return losses

        with ThreadPoolExecutor(2) as pool:
            return [loss for losses in pool.map(train, range(len(jobs))) for loss in losses]

    def told(self) -> str:
        """Return what the devices did."""
        assert self._results is not None
        save(self._settings.out / "runs" / "fleet", self._results)
        devices = self._results.devices
        compute_s, stall_s = (sum(getattr(device, name) for device in devices) for name in ("compute_s", "stall_s"))
        written = sum(device.written_to_disk_bytes for device in devices)
        return (
            f"A device computed for {format_duration(compute_s / len(devices))} and waited for bytes for "
            f"{format_duration(stall_s / len(devices))} of {format_duration(devices[0].wall_s)}; the rest prepared the "
            f"models, once. {format_bytes(written)} were written to the disk."
        )


class _Sage(nn.Module):
    """Two layers of GraphSAGE on sampled blocks."""

    def __init__(self, width: int, num_classes: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * width, 64), nn.Linear(2 * 64, num_classes)])

    def forward(self, sample: unified.Sample, x: torch.Tensor) -> torch.Tensor:
        """Return scores of the seeds."""
        for number, layer in enumerate(self.layers):
            block = sample.block(number)
            sources, targets = block.edge_index
            total = x.new_zeros(block.num_targets, x.shape[1]).index_add(0, targets, x[sources])
            count = torch.bincount(targets, minlength=block.num_targets).clamp(min=1).unsqueeze(1)
            x = layer(torch.cat([x[: block.num_targets], total / count], dim=1))
            x = x if number else x.relu()
        return x


class _Unified(_RoomTask):
    """GraphSAGE over features that are larger than the cap."""

    def __init__(self, settings: argparse.Namespace):
        num_nodes, self._width = (60_000, 256) if settings.small else (200_000, 512)
        generator = torch.Generator().manual_seed(0)
        self._classes = torch.randint(16, (num_nodes,), generator=generator)
        targets = torch.randint(num_nodes, (10 * num_nodes,), generator=generator)
        sources = (torch.rand(len(targets), generator=generator) ** 4 * num_nodes).long() * 7919 % num_nodes
        self._graph = unified.Graph(torch.stack([sources, targets]), num_nodes)
        self._train = torch.randperm(num_nodes, generator=generator)[: num_nodes // 20]
        self._settings = settings
        self._path = settings.disk / f"penstock-demo-{num_nodes}x{self._width}.npy"
        size_bytes = 4 * num_nodes * self._width
        self.story = (
            f"GraphSAGE trains on a graph of {num_nodes:,} nodes and {len(targets):,} edges whose features, "
            f"{format_bytes(size_bytes)}, are in a .npy file."
        )
        if not self._path.exists():
            self._write(num_nodes)
        self._scores = unified.expected_accesses(self._graph, self._train, [10, 5], batch_size=64)
        for _ in unified.Loader(self._sampler(), torch.zeros(num_nodes, 1), self._train[:8], batch_size=8):
            pass  # libraries load, and loops are compiled, before the cap
        torch.use_deterministic_algorithms(True)

    def _write(self, num_nodes: int) -> None:
        """Write the file in few rows at once; it gets its name when it is whole."""
        part = self._path.with_suffix(".part")
        table = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=(num_nodes, self._width))
        centres = torch.randn(16, self._width, generator=torch.Generator().manual_seed(1))
        for number, rows in enumerate(self._classes.split(4096)):
            noise = torch.randn(len(rows), self._width, generator=torch.Generator().manual_seed(2 + number))
            table[4096 * number : 4096 * number + len(rows)] = (noise + 0.1 * centres[rows]).numpy()
        table.flush()
        part.rename(self._path)

    def _sampler(self) -> unified.NeighborSampler:
        return unified.NeighborSampler(self._graph, [10, 5])

    def build(self, cap_bytes: int | None) -> None:
        """Load the features, or open them with most of their rows on the disk."""
        self._features: Any = None
        if self._settings.penstock:
            assert cap_bytes is not None
            self._features = unified.TieredFeatures(self._path, host=int(0.4 * cap_bytes), scores=self._scores)
        else:
            self._features = torch.from_numpy(np.load(self._path))
        torch.manual_seed(0)
        self._model = _Sage(self._width, 16)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-3)
        self._loader = unified.Loader(self._sampler(), self._features, self._train, batch_size=64, ahead=1)

    def train(self) -> list[float]:
        """Train an epoch."""
        losses = []
        for batch in self._loader:
            self._optimizer.zero_grad()
            loss = functional.cross_entropy(self._model(batch.sample, batch.x), self._classes[batch.sample.seeds])
            loss.backward()
            self._optimizer.step()
            losses.append(loss.item())
        return losses

    def told(self) -> str:
        """Return where rows came from."""
        save(self._settings.out / "runs" / "features", self._features)
        counts, plan = self._features.statistics(), self._features.plan
        rest = counts.cached_rows + counts.disk_rows
        return (
            f"{counts.hit_rate:.1%} of the rows read were held in memory ({plan.hit_rate:.1%} planned); of the other "
            f"{rest:,} the system's page cache still had {counts.cached_rows / max(1, rest):.0%}."
        )


class _ByEdge(nn.Module):
    """RGAT as it is usually written: operators of PyTorch with a row for every edge."""

    def __init__(self, layer: relational.RGATConv):
        super().__init__()
        self.weight, self.q, self.k, self.bias = layer.weight, layer.q, layer.k, layer.bias

    def forward(self, x: torch.Tensor, edges: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return new features of all nodes; ``edges``: sources and targets of every relation."""
        targets = torch.cat([edge[1] for edge in edges])
        at_source = torch.cat([x[edge[0]] @ weight for edge, weight in zip(edges, self.weight, strict=True)])
        at_target = torch.cat([x[edge[1]] @ weight for edge, weight in zip(edges, self.weight, strict=True)])
        score = functional.leaky_relu(at_target @ self.q + at_source @ self.k, 0.2)
        largest = x.new_full((len(x), 1), -torch.inf).scatter_reduce(0, targets[:, None], score.detach(), "amax")
        power = (score - largest[targets]).exp()
        total = x.new_zeros(len(x), 1).index_add(0, targets, power)
        message = power / total[targets] * at_source
        assert self.bias is not None
        return x.new_zeros(len(x), at_source.shape[1]).index_add(0, targets, message) + self.bias


class _Relational(_RoomTask):
    """Two RGAT layers over a whole graph."""

    def __init__(self, settings: argparse.Namespace):
        num_nodes, num_edges, self._width = (20_000, 200_000, 64) if settings.small else (40_000, 400_000, 64)
        self._num_relations, self._settings = 24, settings
        generator = torch.Generator().manual_seed(0)
        edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
        kinds = torch.randint(self._num_relations, (num_edges,), generator=generator)
        self._graph = relational.RelationalGraph(edges, kinds, num_nodes=num_nodes)
        self._edges = [tuple(edges[:, kinds == kind]) for kind in range(self._num_relations)]
        self._x = torch.randn(num_nodes, self._width, generator=generator)
        self._classes = torch.randint(8, (num_nodes,), generator=generator)
        self.story = (
            f"Two RGAT layers of width {self._width} train on a graph of {num_nodes:,} nodes and {num_edges:,} edges "
            f"of {self._num_relations} types, all of it in each step."
        )
        few = relational.RelationalGraph(edges[:, :100], kinds[:100], num_nodes=num_nodes)
        warm = self._layers_of(True)[0]
        torch.optim.SGD(warm.parameters())  # imports PyTorch's compiler, 70 MiB, before memory is counted
        warm(self._x, few).sum().backward()  # compiles kernels before the cap

    def _layers_of(self, by_penstock: bool) -> list[nn.Module]:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(2):
            layer = relational.RGATConv(self._width, self._width, self._num_relations)
            layers.append(layer if by_penstock else _ByEdge(layer))
        return layers

    def build(self, cap_bytes: int | None) -> None:  # noqa: ARG002
        """Make the layers."""
        self._layers = self._layers_of(self._settings.penstock)
        self._head = nn.Linear(self._width, 8)
        parameters = [parameter for layer in (*self._layers, self._head) for parameter in layer.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=1.0)

    def train(self) -> list[float]:
        """Train two steps."""
        graph, losses = self._graph if self._settings.penstock else self._edges, []
        for _ in range(2):
            self._optimizer.zero_grad()
            hidden = self._layers[0](self._x, graph).relu()
            loss = functional.cross_entropy(self._head(self._layers[1](hidden, graph)), self._classes)
            loss.backward()
            self._optimizer.step()
            losses.append(loss.item())
        return losses

    def told(self) -> str:
        """Return what the compiler saves."""
        return "The compiled layers save rows for pairs of a node and a relation, and single numbers for edges."


_ROOMS: dict[DemoRoom, Callable[[argparse.Namespace], _RoomTask]] = {
    DemoRoom.FLEET: _Fleet,
    DemoRoom.UNIFIED: _Unified,
    DemoRoom.RELATIONAL: _Relational,
}


def main() -> None:
    """Train as the arguments and the lines on standard input say."""
    settings = _arguments()
    threading.stack_size(STACK_BYTES)
    shown = _ROOMS[settings.room](settings)
    start_bytes = data_bytes()
    limit(settings.cap)
    is_built = False
    say({"story": shown.story})
    for line in sys.stdin:
        try:
            if line.strip() == "round":
                with Sampled(start_bytes) as memory:
                    start_s = time.perf_counter()
                    if not is_built:
                        shown.build(settings.cap)
                    is_built = True
                    losses = shown.train()
                    round_s = time.perf_counter() - start_s
                say({
                    "losses": [loss.hex() for loss in losses], "round_s": round_s, "timeline": memory.timeline,
                    "taken_bytes": max(held for _, held in memory.timeline),
                })  # fmt: skip
            elif line.strip() == "finish":
                say({"told": shown.told()})
                return
        except (RuntimeError, MemoryError) as error:  # PyTorch's and NumPy's own errors for memory they cannot have
            fail(error)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--room", type=DemoRoom, required=True)
    parser.add_argument("--penstock", action="store_true")
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cap", type=int)
    parser.add_argument("--small", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
