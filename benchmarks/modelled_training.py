"""One model of 7.6 billion parameters within 22 GiB on machines by data sheets: tokens a second by tokens a step.

    python -m benchmarks.modelled_training --json benchmarks/results/modelled-training.json

Nothing here is measured. A step takes as long as the longest of what goes on at once: the computation, the copies in,
the copies out, the updates on the host. Bytes are the bounds of docs/design/pages.md, which counting on the simulated
device meets within a tenth, less the share that stays on the device. Blocks are checkpointed, so that forward is
computed twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks import common
from penstock.machines import MACHINES, Machine

_PARAMETERS, _LAYERS, _HIDDEN = 7.6e9, 28, 3584
"""Qwen2.5-7B."""
_BUDGET_BYTES = 22 * 2**30
_MICRO_BATCH = 16_384
"""Tokens of a micro-batch at most."""
_TOKENS = (1_024, 4_096, 16_384, 65_536, 262_144, 524_288)
_HOST_BYTES_PER_S = {"rtx4090": 60e9, "h200": 250e9}
"""Bandwidth of host memory during an update, our assumption: two channels of DDR5, and eight."""
_UPDATE_BYTES = 4 * 4 + 3 * 4 + 2 * 2
"""Bytes per parameter of AdamW in host memory: reads of weight, gradient and moments, three writes, and casts."""
_PUBLISHED = {
    "rtx4090": "2,800 tokens/s, bfloat16, 0.5 million tokens a step (LLMQ, Qwen2.5-7B)",
    "h200": "",
}


@dataclass(frozen=True, slots=True)
class Way:
    """Bytes over the link for each parameter of a step of ``k`` micro-batches, with nothing resident."""

    name: str
    into: tuple[float, float]
    """Bytes in per micro-batch, and once per step."""
    out: tuple[float, float]
    updates_on_host: bool
    resident_bytes: float
    """Bytes per parameter of what every micro-batch reads: a larger budget keeps these first."""


WAYS = (
    Way("float32 pages, update on the device", (8 + 4, 20 - 8 - 4), (4, 12), False, 8),
    Way("casts, update on the host", (4, 0), (2, 0), True, 2),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    settings = options.parse_args(arguments)
    rows: list[common.Row] = []
    for name in _HOST_BYTES_PER_S:
        lines = []
        for tokens in _TOKENS:
            plain_s = computing_s(MACHINES[name], tokens)
            line = [f"{tokens:,}", f"{tokens / plain_s:,.0f}"]
            for way in WAYS:
                step_s, what = step(MACHINES[name], way, tokens)
                line.append(f"{tokens / step_s:,.0f} ({plain_s / step_s:.2f}, {what})")
                rows.append(
                    common.Row(
                        name=f"{way.name}, {name}, {tokens} tokens a step",
                        metric="modelled",
                        value=tokens / step_s,
                        unit="tokens/s",
                        peer="the computation alone",
                        ratio=plain_s / step_s,
                    )
                )
            lines.append(line)
        title = f"Modelled, {MACHINES[name].title}, 22 GiB: tokens/s (of the computation's, bound by)"
        common.show(title, ["tokens a step", "computation", *(way.name for way in WAYS)], lines)
        if _PUBLISHED[name]:
            print(f"published: {_PUBLISHED[name]}")
    common.write(settings.json, {"parameters": _PARAMETERS, "budget": _BUDGET_BYTES, "micro_batch": _MICRO_BATCH}, rows)


def computing_s(machine: Machine, tokens: int) -> float:
    """Return the seconds of two forwards and a backward: 8 operations per parameter and token."""
    return machine.operator_s(flops=8 * _PARAMETERS * tokens, size_bytes=0, dtype=torch.bfloat16)


def step(machine: Machine, way: Way, tokens: int) -> tuple[float, str]:
    """Return the seconds of a step, and the part that takes longest."""
    result = dict(_parts(machine, way, tokens))
    what = max(result, key=lambda part: result[part])
    return result[what], what


def _parts(machine: Machine, way: Way, tokens: int) -> Iterator[tuple[str, float]]:
    micro_batches = -(-tokens // _MICRO_BATCH)
    out_rate, in_rate = machine.lane_rates(to_disk=False)
    boundaries = 2 * _HIDDEN * _LAYERS * min(tokens, _MICRO_BATCH)
    working = 4 * 2**30 + boundaries
    kept = min(1.0, (_BUDGET_BYTES - working) / (way.resident_bytes * _PARAMETERS))
    fresh = 2 * kept if way.updates_on_host else 0  # a cast that stays is written anew once a step
    into = micro_batches * way.into[0] * (1 - kept) + way.into[1] + fresh
    out = micro_batches * way.out[0] + way.out[1]
    yield "computing", computing_s(machine, tokens)
    yield "copies in", into * _PARAMETERS / in_rate
    yield "copies out", out * _PARAMETERS / out_rate
    if way.updates_on_host:
        yield "host", _UPDATE_BYTES * _PARAMETERS / _HOST_BYTES_PER_S[machine.name]


if __name__ == "__main__":
    main()
