"""The demo's second part: parameters, gradients and Adam's state exceed what the process may hold."""

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from penstock.cli._demo_process import Child, child
from penstock.cli._progress import Steps
from penstock.errors import InternalError
from penstock.units import format_bytes

_WIDTH, _BATCH = 512, 2
_STATE_BYTES = 16
"""Bytes per parameter: itself, its gradient and two moments of AdamW, in float32."""
_CAP_SHARE = 1 / 3
"""Share of the state that the capped processes may hold in total."""
_BUDGET_SHARE = 0.7
"""Share of the cap that Penstock gets as its budget: the cap also counts stacks, libraries and malloc's gaps."""
_MAY_FAIL = {"plain": "plain", "checkpoint": "checkpoint per block"}


def run(
    disk: Path, num_steps: int, steps: Steps, console: Console, num_layers: int
) -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    """Train the model plainly without a cap and, in alternation, by `offload.training` under it; print the outcome.

    Returns the measurements, and the memory of the last step of each.
    """
    size = ["--layers", str(num_layers), "--width", str(_WIDTH), "--batch", str(_BATCH)]
    steps.phase("a model that is too large: the plain run")
    with ExitStack() as stack:
        plain = stack.enter_context(child(*size, "--whole"))
        num_parameters = plain.hello["num_parameters"]
        state_bytes = _STATE_BYTES * num_parameters
        cap_bytes = int(_CAP_SHARE * state_bytes)
        console.print(
            f"\nA GPT of {num_parameters / 1e6:.1f}M parameters ({num_layers} layers, width {_WIDTH}), "
            f"{_BATCH} x 512 bytes a step: parameters, gradients and AdamW's state are "
            f"{format_bytes(state_bytes)}. From here on a process may take {format_bytes(cap_bytes)} for all of them "
            "and the activations."
        )
        limits = [*size, "--whole", "--cap", str(cap_bytes)]
        failures = {}
        for method, label in _MAY_FAIL.items():
            with child(*limits, "--method", method) as capped:
                failures[label] = str(capped.ask("step", may_fail=True).get("error", ""))
            outcome = f"[red]fails[/]\n  [dim]{escape(failures[label])}[/]" if failures[label] else "[green]trains[/]"
            console.print(f"{label} under the cap: {outcome}", highlight=False)
        budget = ("--budget", str(int(_BUDGET_SHARE * cap_bytes)), "--disk", str(disk), "--method", "training")
        trained = stack.enter_context(child(*limits, *budget))
        steps.phase("training it in turn, plainly and under the cap", num_steps)
        plainly, ours = _in_turn(plain, trained, num_steps, steps)
    pairs = list(zip(plainly, ours, strict=True))
    differences = [abs(float.fromhex(plain["loss"]) - float.fromhex(own["loss"])) for plain, own in pairs]
    results = {
        "state_bytes": state_bytes,
        "cap_bytes": cap_bytes,
        "budget_bytes": int(_BUDGET_SHARE * cap_bytes),
        "failures": failures,
        "losses": [float.fromhex(step["loss"]) for step in plainly],
        "largest_loss_difference": max(differences),
        "step_time_ratio": median(own["step_s"] / plain["step_s"] for plain, own in pairs[2:]),
        "statistics": ours[-1]["training"],
    }
    moved = sum(sum(ours[-1]["training"][name].values()) for name in ("step_fetched", "step_parked"))
    console.print(
        f"[bold]Penstock: training[/] under the cap: [green]trains[/], {results['step_time_ratio']:.2f} of the plain "
        f"step's time, {format_bytes(moved)} moved a step, loss off by {results['largest_loss_difference']:g}.\n",
        highlight=False,
    )
    if results["largest_loss_difference"]:
        raise InternalError("the losses of the model that is too large differ from plain training's")
    return results, {"plain": plainly[-1]["timeline"], "Penstock": ours[-1]["timeline"]}


def _in_turn(
    plain: Child, trained: Child, num_steps: int, steps: Steps
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    plainly, ours = [], []
    for number in range(1, num_steps + 1):
        plainly.append(plain.ask("step"))
        ours.append(trained.ask("step"))
        steps.advance(number, num_steps)
    return plainly, ours
