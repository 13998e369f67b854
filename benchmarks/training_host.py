"""Host time per operator inside of `penstock.offload.training`, and the operators of a step.

On a GPU the host is ahead of the device as long as it spends less than the device does. Each operator is timed in plain
PyTorch, under a dispatch mode that does nothing, and in a training whose order is known and whose pages are all there.
Then the operators of a step of a checkpointed GPT of 24 layers under autocast are counted. And an update on the host
(AdamW, from a gradient in bfloat16 to a cast in bfloat16) is timed in one pass and with PyTorch's kernels, in turn.

Run it with ``python -m benchmarks.training_host --json host.json``.
"""

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import common
from penstock import offload
from penstock.host_stepping import step_in_one_pass
from penstock.state import _watch
from penstock.testing import GPT

_WARM_STEPS = 4


def main(arguments: Sequence[str] | None = None) -> None:
    settings = common.parser(str(__doc__).splitlines()[0]).parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[common.Row] = []
    with tempfile.TemporaryDirectory(dir=settings.disk) as folder:
        lines = timed(rows, folder, 30 if settings.quick else 300)
        counts = counted(folder, 2 if settings.quick else 24)
    passes = updated(rows, 2**20 if settings.quick else 2**25, 2 if settings.quick else 9)
    rows += [common.Row(name="a step", metric=name, value=count, unit="operators") for name, count in counts.items()]
    common.write(settings.json, {"threads": 1}, rows)
    common.show("Microseconds an operator", ["operator", "plain", "an empty mode", "a training"], lines)
    common.show("An update on the host", ["threads", "PyTorch's kernels", "one pass", "rate"], passes)
    common.show("Operators of a step", ["which", "number"], [[name, str(count)] for name, count in counts.items()])


class _Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # any: PyTorch's
        return func(*args, **(kwargs or {}))


def timed(rows: list[common.Row], folder: str, num_calls: int) -> list[list[str]]:
    """Return the lowest time of a few runs of each operator, in each way."""
    model = nn.Linear(128, 128)
    weight, x, small = model.weight, torch.randn(128), torch.zeros(4)
    operators: dict[str, Callable[[], object]] = {
        "detach": weight.detach,
        "a view of a page": weight.t,
        "on no page": lambda: small + 1,
        "on a page, small result": lambda: torch.mv(weight, x),
        "on a page, result a page": lambda: weight + 1,
    }

    def run() -> dict[str, float]:
        return {name: min(_microseconds(call, num_calls) for _ in range(3)) for name, call in operators.items()}

    with torch.no_grad():
        result = {"plain": run()}
        with _Empty():  # type: ignore[no-untyped-call]
            result["an empty mode"] = run()
        training = offload.training(model, torch.optim.SGD(model.parameters()), "1GiB", disk=folder)
        for _ in range(_WARM_STEPS):
            with training:
                result["a training"] = run()
        training.close()
    rows += [
        common.Row(name=name, metric=way, value=taken, unit="us")
        for way, each in result.items()
        for name, taken in each.items()
    ]
    return [[name, *(f"{each[name]:.1f}" for each in result.values())] for name in operators]


def _microseconds(call: Callable[[], object], num_calls: int) -> float:
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    return 1e6 * (time.perf_counter() - start_s) / num_calls


def updated(rows: list[common.Row], num_elements: int, num_rounds: int) -> list[list[str]]:
    """Return the median seconds of an update on the host in both ways, and the bytes per second of the second."""
    lines = []
    parameter = nn.Parameter(torch.randn(num_elements))
    gradient, cast = (torch.randn(num_elements).bfloat16() for _ in range(2))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.empty(num_elements)

    def plain() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)
        optimizer.step()
        cast.copy_(parameter.detach())

    def in_one_pass() -> None:
        state = optimizer.state[parameter]
        args = optimizer, optimizer.param_groups, parameter, parameter.detach()
        changed = step_in_one_pass(*args, [gradient], state, [cast])
        assert changed is not None, "needs a C compiler"
        state.update(changed)

    plain()
    before, processors = torch.get_num_threads(), os.sched_getaffinity(0)
    for num_threads in sorted({1, len(processors)}):
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, sorted(processors)[:num_threads])  # it takes as many threads as it may use processors
        seconds: dict[Callable[[], None], list[float]] = {way: [] for way in (plain, in_one_pass)}
        for _ in range(num_rounds):
            for way, taken in seconds.items():
                start_s = time.perf_counter()
                way()
                taken.append(time.perf_counter() - start_s)
        theirs_s, ours_s = (statistics.median(taken) for taken in seconds.values())
        rate = 28 * num_elements / ours_s  # weight and moments read and written, gradient read, cast written
        name = f"an update on the host, {num_threads} threads"
        ratio = ours_s / theirs_s
        rows.append(common.Row(name=name, metric="one pass", value=rate, unit="bytes/s", peer="PyTorch", ratio=ratio))
        lines.append([str(num_threads), f"{theirs_s:.4f} s", f"{ours_s:.4f} s", f"{rate / 1e9:.1f} GB/s"])
    os.sched_setaffinity(0, processors)
    torch.set_num_threads(before)
    return lines


def counted(folder: str, num_layers: int) -> dict[str, int]:
    """Count the operators of a step by what a training has to do for them."""
    torch.manual_seed(0)
    model = GPT(num_layers=num_layers, width=128, num_heads=2, context=32, checkpointed=True)
    tokens = torch.randint(256, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    training = offload.training(model, optimizer, "1GiB", disk=folder)
    counts: Counter[str] = Counter()
    touches = _watch.touches

    def counting(*settings: Any) -> Any:
        touched = touches(*settings)
        counts["views of pages" if touched.is_view else "on pages" if touched.pages else "on no page"] += 1
        return touched

    for step in range(_WARM_STEPS):
        with training, mock.patch.object(_watch, "touches", counting if step == _WARM_STEPS - 1 else touches):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    training.close()
    return dict(counts)


if __name__ == "__main__":
    main()
