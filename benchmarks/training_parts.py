"""Seconds and bytes of steps within a share of the state: as planned, operator by operator, and in a fleet of one.

Models of three shapes take AdamW steps plainly, in `penstock.offload.training` with and without plans, and as the only
job of a fleet, within the same budget, in turn in one process. A fleet's steps are timed where it takes its batches,
after it has read ahead. Waits, processor time and page faults show what a step's time consists of. Variables of the
environment (``OMP_WAIT_POLICY=passive``, ``MALLOC_TRIM_THRESHOLD_``, ``OMP_NUM_THREADS``) show what each part costs.

Run it with ``python -m benchmarks.training_parts --disk /nvme --json parts.json``.
"""

import functools
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks import common
from benchmarks.state_plans import Llama
from penstock import fleet, native, offload, probe
from penstock.testing import GPT

_NUM_STEPS, _NUM_WARM = 16, 9
_NUM_ROUNDS = 2
_ROOM_BYTES = 24 * 2**20
"""Bytes of the budget beside the share, for activations."""
Figures = dict[str, float]
Batch = tuple[torch.Tensor, torch.Tensor]


class ViT(nn.Module):
    """A vision transformer of PyTorch's own layers."""

    def __init__(self, *, num_layers: int, width: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of images ``(batch, 3, height, width)`` with labels ``(batch,)``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(self.blocks(patches).mean(1)), labels)


def make_model(name: str, num_layers: int, width: int) -> nn.Module:
    """Return a model with the same weights each time."""
    torch.manual_seed(0)
    if name == "GPT":
        return GPT(num_layers=num_layers, width=width, num_heads=6, context=128)
    if name == "Llama":
        return Llama(num_layers, width, 8 * width // 3, 6, 2, 2048)
    return ViT(num_layers=num_layers, width=width)


def make_batch(name: str, number: int) -> Batch:
    """Return a mini-batch."""
    generator = torch.Generator().manual_seed(number)
    if name == "ViT":
        return torch.randn(8, 3, 128, 128, generator=generator), torch.randint(1000, (8,), generator=generator)
    tokens = torch.randint(256, (4, 129), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=384)
    options.add_argument("--model", action="append", choices=["GPT", "Llama", "ViT"])
    options.add_argument(
        "--kept", type=int, action="append", help="MiB of freed blocks that are kept, as ways of their own"
    )
    options.add_argument("--share", type=float, action="append", help="of the state, beside 24 MiB")
    settings = options.parse_args(arguments)
    shares, rounds = settings.share or [0.5, 0.25, 0.125], _NUM_ROUNDS
    if settings.quick:
        settings.layers, settings.width, shares, rounds = 2, 192, [0.5], 1
    rows: list[common.Row] = []
    lines = []
    for name in settings.model or ["GPT", "Llama", "ViT"]:
        make = functools.partial(make_model, name, settings.layers, settings.width)
        plain = _plainly(name, make)
        for share in shares:
            ways = _in_turn(name, make, share, settings.disk, rounds, settings.kept or [])
            for way, figures in {"plain": plain, **ways}.items():
                label = f"{name}, {share:.3g} of the state, {way}"
                rows += [
                    common.Row(
                        name=label,
                        metric=metric,
                        value=value,
                        unit={"page faults": "count", "in": "B", "out": "B"}.get(metric, "s"),
                        peer="plain" if metric == "step" else "",
                        ratio=value / plain["step"] if metric == "step" else None,
                    )
                    for metric, value in figures.items()
                ]
                shown = ("step", "waits", "user", "system", "in", "out")
                lines.append([label, *(f"{figures[metric]:.3g}" if metric in figures else "" for metric in shown)])
    sizes = {"layers": settings.layers, "width": settings.width, "steps": _NUM_STEPS, "rounds": rounds}
    common.write(settings.json, sizes, rows)
    common.show("A step within a share of the state", ["", "step", "waits", "user", "system", "in", "out"], lines)


def _in_turn(
    name: str, make: Callable[[], nn.Module], share: float, disk: Path, rounds: int, kept: Sequence[int]
) -> dict[str, Figures]:
    """Return figures of all ways within a budget, medians over the rounds; bytes are per parameter and step."""
    found: dict[str, list[Figures]] = {}
    for _ in range(rounds):
        for way, follows_plans in (("operator by operator", False), ("planned", True)):
            found.setdefault(way, []).append(_in_training(name, make, share, disk, follows_plans=follows_plans))
        found.setdefault("fleet of one", []).append(_in_fleet(name, make, share, disk))
        for size in kept:
            figures = _in_training(name, make, share, disk, follows_plans=True, kept_bytes=size * 2**20)
            found.setdefault(f"planned, {size} MiB kept", []).append(figures)
    return {way: {key: median(figures[key] for figures in some) for key in some[0]} for way, some in found.items()}


def _budget_bytes(make: Callable[[], nn.Module], share: float) -> int:
    gc.collect()
    num_parameters = sum(parameter.numel() for parameter in make().parameters())
    return probe.held_bytes("cpu") + int(share * 16 * num_parameters) + _ROOM_BYTES


def _plainly(name: str, make: Callable[[], nn.Module]) -> Figures:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return _figures(lambda number: _train(model, optimizer, make_batch(name, number)))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def _in_training(
    name: str,
    make: Callable[[], nn.Module],
    share: float,
    disk: Path,
    *,
    follows_plans: bool,
    kept_bytes: int | None = None,
) -> Figures:
    budget_bytes = _budget_bytes(make, share)
    training = offload.training(make, lambda some: torch.optim.AdamW(some, lr=1e-4), budget_bytes, disk=disk)
    training._managed.pages.follows_plans = follows_plans  # nobody but tests and this needs to choose

    if kept_bytes is not None:  # after the training has chosen
        native.keep_freed_blocks(kept_bytes)

    def step(number: int) -> None:
        with training:
            _train(training.model, training.optimizer, make_batch(name, number))

    def settle() -> None:
        planning = training._managed.pages.replay._thread
        if planning is not None:
            planning.join()

    figures = _figures(step, lambda: training.statistics().stall_s, settle)
    statistics = training.statistics()
    figures["in"] = statistics.step_fetched_bytes / statistics.num_parameters
    figures["out"] = statistics.step_parked_bytes / statistics.num_parameters
    assert not follows_plans or statistics.num_planned_steps, "no step was planned"
    training.close(discard=True)
    return figures


class _Timed:
    """Mini-batches that note when they are asked for."""

    def __init__(self, name: str, times: list[float]):
        self._name, self._times = name, times

    def __iter__(self) -> Iterator[Batch]:
        for number in range(_NUM_STEPS):
            self._times.append(time.perf_counter())
            yield make_batch(self._name, number)


def _in_fleet(name: str, make: Callable[[], nn.Module], share: float, disk: Path) -> Figures:
    times: list[float] = []
    job = fleet.Job(
        name="job",
        model=make,
        data=lambda: _Timed(name, times),
        loss=lambda model, batch: model(*batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        epochs=1,
    )
    results = fleet.run([job], ["cpu"], _budget_bytes(make, share), disk=disk, progress=None)
    if results["job"].error is not None:
        raise RuntimeError(results["job"].error)
    return {
        "step": median(after - before for before, after in zip(times[_NUM_WARM:], times[_NUM_WARM + 1 :], strict=False))
    }


def _figures(
    step: Callable[[int], None], stall_s: Callable[[], float] = lambda: 0.0, settle: Callable[[], None] = lambda: None
) -> Figures:
    """Return medians of the steps after the warm-up; ``settle`` is called between them and is not timed."""
    results: list[Figures] = []
    for number in range(_NUM_STEPS):
        settle()
        start_s, before, waited_s = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), stall_s()
        step(number)
        after = resource.getrusage(resource.RUSAGE_SELF)
        results.append(
            {
                "step": time.perf_counter() - start_s,
                "waits": stall_s() - waited_s,
                "user": after.ru_utime - before.ru_utime,
                "system": after.ru_stime - before.ru_stime,
                "page faults": float(after.ru_minflt - before.ru_minflt),
            }
        )
    return {metric: median(parts[metric] for parts in results[_NUM_WARM:]) for metric in results[0]}


if __name__ == "__main__":
    main()
