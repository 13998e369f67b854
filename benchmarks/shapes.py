"""Plans for a batch from the profile of another batch, against plans from a profile of their own.

For each model the step is planned at its batch, and then at three quarters of it, from the first profile. The predicted
peak is compared with the measured one of the planned step, the predicted time of operators with a profile of that
batch, measured alone; and the seconds are those from the call to the plan: tracing, measuring what must be, planning.

Run it with ``python -m benchmarks.shapes --json shapes.json``.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from benchmarks import common, models
from penstock import probe, remat

_SHARE = 0.7
"""Of what the step takes without a plan beside its static bytes: the budget leaves so much."""


def t5() -> nn.Module:
    """Make Hugging Face's T5, from texts to texts."""
    import transformers

    config = transformers.T5Config(
        d_model=192, d_kv=48, d_ff=512, num_layers=3, num_heads=4, vocab_size=models.VOCABULARY,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return models.HuggingFace(transformers.T5ForConditionalGeneration(config))


_MODELS = models.WORKLOADS | {
    "T5": models.Workload(
        name="T5",
        make=t5,
        make_batch=models.texts,
        batch=8,
        blocks=models.children("model.encoder.block", "model.decoder.block"),
        block="a transformer block",
    )
}


def made(name: str, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the module and a batch."""
    torch.manual_seed(0)
    module = _MODELS[name].make()
    return module, _MODELS[name].make_batch(batch)


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--model", action="append", choices=list(_MODELS))
    settings = options.parse_args(arguments)
    names = settings.model or (["GPT-2"] if settings.quick else list(_MODELS))
    rows: list[common.Row] = []
    lines = []
    for name in names:
        result = measured(name, settings)
        lines.append([name, *(f"{result[column]:.3f}" for column in _COLUMNS)])
        rows += [
            common.Row(name=name, metric=column, value=result[column], unit=_COLUMNS[column]) for column in _COLUMNS
        ]
        common.write(settings.json, {"share": _SHARE, "batch": "three quarters"}, rows, device=settings.device)
    for column, unit in _COLUMNS.items():
        values = [row.value for row in rows if row.metric == column]
        rows.append(common.Row(name="median", metric=column, value=median(values), unit=unit))
    lines.append(["median", *(f"{row.value:.3f}" for row in rows[-len(_COLUMNS) :])])
    common.write(settings.json, {"share": _SHARE, "batch": "three quarters"}, rows, device=settings.device)
    common.show("A batch of three quarters, planned from the profile of the first", ["model", *_COLUMNS], lines)


_COLUMNS = {
    "peak": "measured over predicted",
    "time": "predicted over measured",
    "first_s": "s",
    "later_s": "s",
    "plan_s": "s",
    "operators": "count",
}


def measured(name: str, settings: argparse.Namespace) -> dict[str, float]:
    batch = _MODELS[name].batch
    large = max(4, batch // 4) if settings.quick else batch
    small = max(1, large * 3 // 4)
    model, inputs = made(name, large)
    _, other = made(name, small)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch._dynamo.reset()
    free = remat.optimize(model, inputs, None).plan
    static_bytes = free.problem.static_bytes
    torch._dynamo.reset()
    start_s = time.perf_counter()
    step = remat.optimize(model, inputs, static_bytes + int(_SHARE * (free.peak_bytes - static_bytes)))
    first_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    with step.rehearsal():
        step(*other)
    later_s = time.perf_counter() - start_s
    planned = step.plans[-1]
    start_s = time.perf_counter()
    remat.plan(planned.problem, planned.budget_bytes, like=step.plans[0].plan.decisions)
    plan_s = time.perf_counter() - start_s
    step(*other).backward()
    gc.collect()
    report = probe.peak_bytes(lambda: step(*other).backward(), device=settings.device)
    states = planned.problem.static_bytes - sum(2 * parameter.nbytes for parameter in model.parameters())
    states -= sum(
        tensor.nbytes for tensor in (*other, *model.buffers())
    )  # copies and generators' states, made in the step
    predicted = planned.peak_bytes - planned.problem.static_bytes + states
    torch._dynamo.reset()
    alone = remat.optimize(model, other, None).plan.problem
    step.close()
    return {
        "peak": report.activation_bytes / predicted,
        "time": planned.problem.step_s / alone.step_s,
        "first_s": first_s,
        "later_s": later_s,
        "plan_s": plan_s,
        "operators": len(planned.problem.operators),
    }


if __name__ == "__main__":
    main()
