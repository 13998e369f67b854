"""Parts of the time of a step within a share of its state: waits, processor time, page faults.

Plain steps come first, then those of `penstock.offload.training`, in one process. Variables of the environment
(``OMP_WAIT_POLICY=passive``, ``MALLOC_TRIM_THRESHOLD_``, ``OMP_NUM_THREADS``) show what each part costs.

Run it with ``python -m benchmarks.training_parts --disk /nvme``.
"""

import gc
import resource
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks import common
from penstock import offload, probe
from penstock.testing import GPT

_NUM_STEPS, _NUM_WARM = 8, 3
Figures = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--share", type=float, default=0.25, help="of the state, for everything")
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.layers, settings.width, settings.batch, settings.share = 2, 128, 1, 2.0

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(num_layers=settings.layers, width=settings.width, num_heads=8, context=512)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    rows = torch.randint(256, (settings.batch, 513), generator=torch.Generator().manual_seed(0))

    def plainly() -> tuple[Figures, int]:
        plain = model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        return _figures(lambda: train(plain, optimizer, rows)), 16 * sum(
            parameter.numel() for parameter in plain.parameters()
        )

    figures, state_bytes = plainly()
    statistics = {"plain": figures}
    gc.collect()
    budget = probe.held_bytes("cpu") + int(settings.share * state_bytes)
    training = offload.training(model, lambda some: torch.optim.AdamW(some, lr=1e-4), budget, disk=settings.disk)

    def step() -> None:
        with training:
            train(training.model, training.optimizer, rows)

    statistics["training"] = _figures(step, lambda: training.statistics().stall_s)
    training.close(discard=True)
    rows_found = [
        common.Row(name=name, metric=metric, value=value, unit="count" if metric == "page faults" else "s")
        for name, figures in statistics.items()
        for metric, value in figures.items()
    ]
    common.write(settings.json, {"share": settings.share, "batch": settings.batch, "width": settings.width}, rows_found)
    lines = [[name, *(f"{value:.3g}" for value in figures.values())] for name, figures in statistics.items()]
    common.show("Where a step's time goes", ["", *statistics["plain"]], lines)


def _figures(step: Callable[[], None], stall_s: Callable[[], float] = lambda: 0.0) -> Figures:
    """Return medians of the steps after the warm-up."""
    results: list[Figures] = []
    for _ in range(_NUM_STEPS):
        start_s, before, waited_s = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), stall_s()
        step()
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
