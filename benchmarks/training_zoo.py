"""Equality and bytes of `offload.training` for models of other libraries, in a plain training loop.

Each model of `benchmarks.zoo` that is installed takes five AdamW steps with clipping plainly, and five inside of
`penstock.offload.training` within a share of what the plain steps took, or the next larger share where that is refused.
Equal means: losses, parameters and optimizer states, to the bit. Each model runs in a process of its own.

Run it with ``python -m benchmarks.training_zoo --disk /nvme``.
"""

import gc
import json
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import common, zoo
from penstock import offload, probe
from penstock.errors import BudgetError

_NUM_STEPS = 5
_SHARES = (0.4, 0.6, 0.8, 1.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--model", action="append")
    options.add_argument("--child", help="run this model and print what was found as JSON")
    settings = options.parse_args(arguments)
    if settings.child:
        print(json.dumps(compared(settings.child)))
        return
    installed = [name for name, architecture in zoo.all_architectures().items() if architecture.is_installed]
    names = settings.model or (installed[:3] if settings.quick else installed)
    rows: list[common.Row] = []
    lines = []
    for name in names:
        result = in_a_process(name)
        lines.append(
            [name, *(str(result.get(key, "")) for key in ("equal", "repeats", "share", "kept", "moved", "error"))]
        )
        print("  ".join(lines[-1]), flush=True)
        if "error" in result:
            rows.append(common.Row(name=name, metric="failed", value=1.0, unit="bool"))
            continue
        rows += [
            common.Row(name=name, metric="equal to plain", value=float(result["equal"]), unit="bool"),
            common.Row(name=name, metric="plain repeats itself", value=float(result["repeats"]), unit="bool"),
            common.Row(name=name, metric="budget over plain's peak", value=result["share"], unit="ratio"),
            common.Row(name=name, metric="measured over budget", value=result["kept"], unit="ratio"),
            common.Row(name=name, metric="bytes in per parameter and step", value=result["moved"], unit="B"),
        ]
        common.write(settings.json, {"shares": list(_SHARES)}, rows)
    common.show(
        "Training in a loop of one's own", ["model", "equal", "repeats", "share", "kept", "moved", "error"], lines
    )


def in_a_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.training_zoo", "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired:
        return {"error": "no end within 900 s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"error": f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"}


def compared(name: str) -> dict[str, Any]:
    plain = trained(name, None)
    if "error" in plain:
        return plain
    again = trained(name, None)
    for share in _SHARES:
        try:
            ours = trained(name, int(plain["start"] + share * (plain["peak"] - plain["start"])))
        except BudgetError as error:
            last = str(error)
            continue
        if "error" in ours:
            return ours
        return {
            "equal": ours["bits"] == plain["bits"],
            "repeats": again["bits"] == plain["bits"],
            "share": share,
            "kept": round(ours["peak"] / ours["budget"], 4),
            "moved": round(ours["moved"], 1),
        }
    return {"error": f"refused: {last[:150]}"}


def trained(name: str, budget: int | None) -> dict[str, Any]:
    """Train some steps, plainly or within the budget; return the bits of all results, and their peak."""
    gc.collect()
    start = probe.held_bytes("cpu")
    torch.manual_seed(0)
    architecture = zoo.all_architectures()[name]
    model, batch = architecture.make(), architecture.make_batch(2)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        loss = zoo.loss_of(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, peaks = [], []
    with tempfile.TemporaryDirectory() as directory:
        training = None if budget is None else offload.training(model, optimizer, budget, disk=directory)
        try:
            for number in range(_NUM_STEPS):
                for seed in (torch.manual_seed, np.random.seed, random.seed):
                    seed(number)
                if training is None:
                    report = probe.peak_bytes(step, device="cpu")
                    losses.append(report.result.item())
                    peaks.append(report.peak_bytes)
                    continue
                training.park()
                if number < 3:  # measured by the training itself
                    with training:
                        losses.append(step().item())
                    continue
                with probe.record_memory("cpu") as recording, training:
                    losses.append(step().item())
                peaks.append(recording.report.peak_bytes)
            moved = 0.0
            if training is not None:
                statistics = training.statistics()
                moved = statistics.step_fetched_bytes / max(1, statistics.num_parameters)
                training.close()
                training = None
        except BudgetError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return {"error": f"{type(error).__name__}: {str(error)[:150]} ({where.filename[-40:]}:{where.lineno})"}
        finally:
            if training is not None:
                training.close()
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    tensors = [torch.tensor(losses), *model.parameters(), *states]
    bits = b"".join(
        tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()
        for tensor in tensors
    )
    return {"bits": bits, "peak": max(peaks), "start": start, "budget": budget, "moved": moved}


if __name__ == "__main__":
    main()
