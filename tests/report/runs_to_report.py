"""Runs to report on, made of numbers alone."""

import json

from penstock.advisor import Advice, Option
from penstock.fleet import FleetState, JobRow
from penstock.probe import PeakReport
from penstock.remat import Operator, Planned, RematProblem, Storage, plan
from penstock.tiers import Budget, Holder, PlaceUse

EVIL = "<script>alert('1')</script>"
MIB = 2**20
UNITS = [("a", 0, 10.0, 11.0, 0.0), (EVIL, 1, 10.5, 12.5, 0.5), ("a", 0, 11.0, 14.0, 1.0)]
JOBS = [("a", "done", None), (EVIL, "failed", f"it broke: {EVIL}")]


def problem(num_layers=6, size_bytes=MIB):
    """A chain of operators, forward and backward, each of 1 ms."""
    operators, storages = [], []
    for layer in range(num_layers):
        storages.append(Storage(name=f"{EVIL}{layer}", size_bytes=size_bytes, producer=layer))
        operators.append(
            Operator(
                name=f"f{layer}",
                target="aten.mm.default",
                inputs=(layer - 1,) if layer else (),
                outputs=(layer,),
                duration_s=1e-3,
            )
        )
    for layer in reversed(range(num_layers)):
        storages.append(Storage(name=f"g{layer}", size_bytes=size_bytes, producer=len(operators)))
        inputs = (layer,) if layer == num_layers - 1 else (layer, len(storages) - 2)
        operators.append(
            Operator(
                name=f"b{layer}", target="aten.mm.default", inputs=inputs, outputs=(len(storages) - 1,), duration_s=1e-3
            )
        )
    return RematProblem(
        operators=tuple(operators), num_forward=num_layers, storages=tuple(storages), static_bytes=3 * MIB
    )


def planned(budget_bytes=7 * MIB, **options):
    made = problem(**options)
    return Planned(problem=made, plan=plan(made, budget_bytes), budget_bytes=budget_bytes)


def peak_report(timeline=((100.0, 5 * MIB), (101.0, 9 * MIB), (102.0, 6 * MIB))):
    return PeakReport(
        peak_bytes=9 * MIB, start_bytes=5 * MIB, activation_bytes=4 * MIB, released_bytes=0, rss_bytes=50 * MIB,
        requested_bytes=9 * MIB, reserved_bytes=9 * MIB, timeline=tuple(timeline), result=None,
    )  # fmt: skip


class Account(Budget):
    """With bytes that others share, and a name to escape."""

    def uses(self):
        def holder(name, held, peak):
            return Holder(name=name, held_bytes=held, peak_bytes=peak)

        return (
            PlaceUse(
                place="device", limit_bytes=100 * MIB, held_bytes=30 * MIB, peak_bytes=80 * MIB,
                holders=(holder("offload", 40 * MIB, 60 * MIB), holder(EVIL, 20 * MIB, 20 * MIB)),
            ),
            PlaceUse(
                place="/nvme", limit_bytes=None, held_bytes=0, peak_bytes=2 * MIB,
                holders=(holder("unified", 0, 2 * MIB),),
            ),
        )  # fmt: skip


def advice(best="offload"):
    def option(name, *, is_refused=False, reason="", ratio=None, code="", is_measured=False):
        return Option(
            name=name, rooms=(name,), is_refused=is_refused, reason=reason, peak_bytes=5 * MIB, ratio=ratio, code=code,
            is_measured=is_measured,
        )  # fmt: skip

    options = (
        option("plain", is_refused=True, reason=f"needs 9 MiB {EVIL}"),
        option("remat", code="remat.optimize(...)", ratio=1.3),
        option("offload", code="with activations(model): ...  # <b>", ratio=1.1, is_measured=True),
    )
    return Advice(
        options=options if best else options[:1], budget_bytes=8 * MIB, plain_peak_bytes=9 * MIB,
        plain_is_measured=True, smallest_bytes=4 * MIB, notes=("The loss is the model's own.",), best_name=best,
    )  # fmt: skip


def write_run(folder, units=(), jobs=(), losses=None):
    """A fleet's folder, as a run leaves it. ``units``: job, device, begin, end, stall."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({
            "job": job, "kind": "forward", "shard": 0, "device": device, "start_s": start_s, "end_s": end_s,
            "stall_s": stall_s, "recompute_s": 0.0,
        })
        for job, device, start_s, end_s, stall_s in units
    ]  # fmt: skip
    (folder / "units.jsonl").write_text("\n".join(lines) + '\n{"job": "cut')
    for name, values in (losses or {}).items():
        (folder / "jobs" / name).mkdir(parents=True)
        text = "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(values, start=1))
        (folder / "jobs" / name / "metrics.jsonl").write_text(text)
    state = FleetState(folder)
    state.create()
    state.write([
        JobRow(
            name=name, place=number, state=kind, step=4, num_steps=8, epoch=0, loss=0.5,
            validation={"step": 4, "loss": 0.25}, device="cpu", seconds_per_step=0.5,
            error=error, tags={}, source=None, updated_s=0.0,
        )
        for number, (name, kind, error) in enumerate(jobs)
    ])  # fmt: skip
    state.say_ended()
    return folder
