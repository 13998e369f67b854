"""The parts of the time of a step within a share of its state: waits, processor time, page faults.

Plain steps come first, then those of `penstock.offload.training`, in one process. Variables of the environment
(``OMP_WAIT_POLICY=passive``, ``MALLOC_TRIM_THRESHOLD_``, ``OMP_NUM_THREADS``) show what each part costs.
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
    given = options.parse_args(arguments)
    if given.quick:
        given.layers, given.width, given.batch, given.share = 2, 128, 1, 2.0

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT(num_layers=given.layers, width=given.width, num_heads=8, context=512)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    rows = torch.randint(256, (given.batch, 513), generator=torch.Generator().manual_seed(0))

    def plainly() -> tuple[Figures, int]:
        plain = model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        return _figures(lambda: train(plain, optimizer, rows)), 16 * sum(one.numel() for one in plain.parameters())

    figures, state_bytes = plainly()
    found = {"plain": figures}
    gc.collect()
    budget = probe.held_bytes("cpu") + int(given.share * state_bytes)
    training = offload.training(model, lambda some: torch.optim.AdamW(some, lr=1e-4), budget, disk=given.disk)

    def step() -> None:
        with training:
            train(training.model, training.optimizer, rows)

    found["training"] = _figures(step, lambda: training.statistics().stall_s)
    training.close(discard=True)
    rows_found = [
        common.Row(name=name, metric=metric, value=value, unit="count" if metric == "page faults" else "s")
        for name, figures in found.items()
        for metric, value in figures.items()
    ]
    common.write(given.json, {"share": given.share, "batch": given.batch, "width": given.width}, rows_found)
    lines = [[name, *(f"{value:.3g}" for value in figures.values())] for name, figures in found.items()]
    common.show("Where a step's time goes", ["", *found["plain"]], lines)


def _figures(step: Callable[[], None], stall_s: Callable[[], float] = lambda: 0.0) -> Figures:
    """Medians of the steps that are not warming up."""
    found: list[Figures] = []
    for _ in range(_NUM_STEPS):
        start_s, before, waited_s = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), stall_s()
        step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        found.append(
            {
                "step": time.perf_counter() - start_s,
                "waits": stall_s() - waited_s,
                "user": after.ru_utime - before.ru_utime,
                "system": after.ru_stime - before.ru_stime,
                "page faults": float(after.ru_minflt - before.ru_minflt),
            }
        )
    return {metric: median(one[metric] for one in found[_NUM_WARM:]) for metric in found[0]}


if __name__ == "__main__":
    main()
