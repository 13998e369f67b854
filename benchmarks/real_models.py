"""GPT-2 124M, ViT-B/16 and Llamas from their configurations: what fits into which budget, and how long a step takes.

Weights are random and batches are made here: nothing is downloaded. In every round, each way to train runs in a process
of its own, one after the other: a few steps to warm up, the timed steps, and a step whose peak is measured. Losses are
compared with plain PyTorch's. Budgets are shares of the peaks that plain PyTorch and activation checkpointing were
measured to have. Times are wall-clock times; the processor's time, which other work on the machine disturbs less but
which leaves out waiting for the disk, is listed too.

A model that plain PyTorch is not asked to hold (``llama-1b``) is trained alone, in a budget in bytes. Its step time is
compared with the time that its bytes take on the disk, and with the computation of the same model with fewer layers.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks import common
from penstock import offload, probe, remat
from penstock.units import format_bytes, parse_bytes

_IMPORTED = [
    "penstock.offload",
    "penstock.remat",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
]
"""What takes seconds to import, which the processes do once for all."""
_SMALL_LENGTH = 128
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, and the batches on which it trains."""

    make: Callable[..., nn.Module]
    """Called with whether the model should be small; that of a model trained alone also with ``num_layers=``."""
    batch: Callable[[nn.Module, torch.Generator, int, int], Batch]
    """A batch with this many samples, of this length."""
    sizes: dict[str, tuple[int, int]]
    """Per group, the number of samples and their length."""
    budget: str | None = None
    """For a model that plain PyTorch is not asked to train."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train."""

    method: str
    checkpoint: bool = False
    peak: str = ""
    """Whose peak the budget is a share of: "plain", "checkpoint", or "middle" for half way between them."""
    share: float = 1.0
    in_backward: bool = False
    num_layers: int | None = None
    """Layers of the model, if not all."""


_GROUPS: dict[str, dict[str, Way]] = {
    "activations": {
        "plain": Way(method="plain"),
        "checkpoint": Way(method="plain", checkpoint=True),
        "remat, checkpoint's peak": Way(method="remat", peak="checkpoint"),
        "offload, checkpoint's peak": Way(method="offload", peak="checkpoint"),
        "offload, half way to checkpoint's peak": Way(method="offload", peak="middle"),
    },
    "training": {
        "plain": Way(method="plain"),
        "training, 0.7 of plain's peak": Way(method="training", peak="plain", share=0.7),
        "training, 0.5 of plain's peak": Way(method="training", peak="plain", share=0.5),
        "training in backward, 0.5 of plain's peak": Way(method="training", peak="plain", share=0.5, in_backward=True),
    },
}
_ALONE = Way(method="training", in_backward=True)
_WARM_STEPS = {"plain": 1, "remat": 2, "offload": 3, "training": 6}
"""Steps before the timed ones: the optimizer makes its state; offloading is recorded, measured and planned."""


def _gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 2048, "n_positions": _SMALL_LENGTH}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **(sizes if small else {})))
    model.loss_type = "ForCausalLM"  # otherwise it is found by a warning, which breaks graphs
    return model


def _vit(small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    sizes |= {"image_size": 64, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **(sizes if small else {})))


def _llama(small: bool, *, num_layers: int, hidden_size: int, intermediate_size: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_layers}
    sizes |= {"num_attention_heads": hidden_size // 64, "num_key_value_heads": hidden_size // 256}
    if small:
        sizes |= {"hidden_size": 128, "intermediate_size": 344, "vocab_size": 2048}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, max_position_embeddings=512, **sizes))


def _tokens(model: nn.Module, generator: torch.Generator, num_samples: int, length: int) -> Batch:
    ids = torch.randint(model.config.vocab_size, (num_samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _images(model: nn.Module, generator: torch.Generator, num_samples: int, _: int) -> Batch:
    size = model.config.image_size
    images = torch.randn(num_samples, 3, size, size, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(1000, (num_samples,), generator=generator)}


MODELS = {
    "gpt2": Model(make=_gpt2, batch=_tokens, sizes={"activations": (1, 512), "training": (1, 128)}),
    "vit": Model(make=_vit, batch=_images, sizes={"activations": (4, 0), "training": (2, 0)}),
    "llama": Model(
        make=partial(_llama, num_layers=12, hidden_size=1024, intermediate_size=2816),
        batch=_tokens,
        sizes={"training": (1, 128)},
    ),
    "llama-1b": Model(
        make=partial(_llama, num_layers=22, hidden_size=2048, intermediate_size=5632),
        batch=_tokens,
        sizes={"alone": (1, 128)},
        budget="3GiB",
    ),
}
_NUM_FEWER = (2, 6)
"""Numbers of layers of the plain models from which the computation of ``llama-1b`` is extrapolated."""
_FEWEST_STEPS = 9
"""Timed steps of each of these. They are short, and the difference of the two is multiplied."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--model", action="append", choices=list(MODELS), help="default: all but llama-1b")
    options.add_argument("--group", action="append", choices=list(_GROUPS), help="default: all of the model")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=2, help="timed steps of each process")
    options.add_argument("--budget", help="for llama-1b; default 3GiB")
    given = options.parse_args(arguments)
    if given.quick:
        given.rounds, given.steps = 2, 1
    rows: list[common.Row] = []
    for name in given.model or [name for name, model in MODELS.items() if model.budget is None or given.quick]:
        configuration = {"models": given.model, "rounds": given.rounds, "steps": given.steps, "optimizer": "AdamW"}
        rows += _counted(name)
        for group in MODELS[name].sizes:
            if given.group is None or group in given.group or group == "alone":
                rows += alone(given, name) if group == "alone" else compared(given, name, group)
                common.write(given.json, configuration, rows)


def _counted(name: str) -> list[common.Row]:
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in MODELS[name].make(False).parameters())
    print(f"{name}: {num_parameters:,} parameters")
    return [common.Row(name=name, metric="parameters", value=num_parameters, unit="1")]


def compared(given: argparse.Namespace, name: str, group: str) -> list[common.Row]:
    """Compare the ways of a group, which run one after the other in every round."""
    ways = _GROUPS[group]
    peaks: dict[str, int] = {}
    budgets: dict[str, int | None] = {}
    answers: dict[str, list[dict[str, Any]]] = {key: [] for key in ways}
    for number in range(given.rounds):
        for key, way in ways.items():
            budgets.setdefault(key, round(way.share * peaks[way.peak]) if way.peak else None)
            if not any("error" in answer for answer in answers[key]):
                answer = _trained(given, name, group, way, budgets[key])
                answers[key].append(answer)
                peaks.setdefault(key, answer.get("peak", 0))
                peaks["middle"] = (peaks["plain"] + peaks.get("checkpoint", 0)) // 2
                print(f"round {number + 1} of {given.rounds}: {key}", flush=True)
    rows: list[common.Row] = []
    lines: list[list[str]] = []
    for key, found in answers.items():
        row = partial(common.Row, name=f"{name}, {group}: {key}")
        budget = budgets[key]
        shown = "" if budget is None else format_bytes(budget)
        if budget is not None:
            rows.append(row(metric="budget", value=budget, unit="B", peer="plain", ratio=budget / peaks["plain"]))
        errors = [answer["error"] for answer in found if "error" in answer]
        if errors:
            rows.append(row(metric="failed", value=1.0, unit="bool", peer=errors[0]))
            lines.append([key, shown, "", "", "", "", "", errors[0]])
            continue
        peak = max(answer["peak"] for answer in found)
        rows.append(row(metric="peak", value=peak, unit="B", peer="plain", ratio=peak / peaks["plain"]))
        is_equal = all(_same(one["losses"], two["losses"]) for one, two in zip(found, answers["plain"], strict=True))
        rows.append(row(metric="losses equal to plain's", value=float(is_equal), unit="bool"))
        ratios = []
        for metric, what in (("step", "seconds"), ("processor time", "processor")):
            ours = [median(answer[what]) for answer in found]
            ratio = common.paired_ratio(ours, [median(answer[what]) for answer in answers["plain"]])
            value = None if key == "plain" else ratio.median
            rows.append(row(metric=metric, value=median(ours), unit="s", peer="plain", ratio=value))
            if key != "plain":
                for end, bound in (("low", ratio.low), ("high", ratio.high)):
                    rows.append(row(metric=f"{metric} ratio, {end}", value=bound, unit="1", peer="plain"))
            ratios.append("" if key == "plain" else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")
        for metric, unit in (("resident", "B"), ("in", "B"), ("out", "B"), ("stall", "s")):
            if metric in found[-1]:
                rows.append(row(metric=metric, value=found[-1][metric], unit=unit))
        moved = " in, ".join(format_bytes(found[-1][metric]) for metric in ("in", "out") if metric in found[-1])
        lines.append([key, shown, format_bytes(peak), *ratios, str(is_equal), moved and f"{moved} out", ""])
    header = ["way", "budget", "peak", "step / plain's", "processor time", "equal", "moved a step", "error"]
    common.show(f"{name}, {group}: {given.rounds} rounds", header, lines)
    return rows


def _same(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether the losses are equal as far as both go: some ways have more steps to warm up."""
    return all(one == two for one, two in zip(ours, theirs, strict=False))


def alone(given: argparse.Namespace, name: str) -> list[common.Row]:
    """Train a model that plain PyTorch is not asked to hold."""
    budget = parse_bytes(given.budget or ("16MiB" if given.quick else MODELS[name].budget))
    row = partial(common.Row, name=name)
    rows = [row(metric="budget", value=budget, unit="B")]
    fewer: dict[int, float] = {}
    longer = argparse.Namespace(**{**vars(given), "steps": max(given.steps, 1 if given.quick else _FEWEST_STEPS)})
    for number in _NUM_FEWER:
        answer = _trained(longer, name, "alone", Way(method="plain", num_layers=number), None)
        fewer[number] = median(answer["seconds"])
    (few, few_s), (more, more_s) = fewer.items()
    with torch.device("meta"):
        num_layers = MODELS[name].make(given.quick).config.num_hidden_layers
    computed_s = few_s + (num_layers - few) * (more_s - few_s) / (more - few)
    rates = {lane.lane: lane.bandwidth_bytes_per_s for lane in probe.bandwidths(given.disk, refresh=not given.quick)}
    found = _trained(given, name, "alone", _ALONE, budget)
    if "error" in found:
        print(found["error"])
        return [*rows, row(metric="failed", value=1.0, unit="bool", peer=found["error"])]
    step_s = median(found["seconds"])
    in_s, out_s = found["in"] / rates["disk->device"], found["out"] / rates["device->disk"]
    rows += [
        row(metric="step", value=step_s, unit="s"),
        row(metric="computation, extrapolated", value=computed_s, unit="s"),
        row(metric="step over the computation", value=step_s / computed_s, unit="1"),
        row(metric="step over the bytes, both directions at once", value=step_s / max(in_s, out_s), unit="1"),
        row(metric="step over the bytes, one direction at a time", value=step_s / (in_s + out_s), unit="1"),
    ]
    units = {"peak": "B", "resident": "B", "in": "B", "out": "B", "state": "B", "stall": "s"}
    rows += [row(metric=metric, value=found[metric], unit=unit) for metric, unit in units.items()]
    rows += [row(metric=f"rate of {lane}", value=rate, unit="B/s") for lane, rate in rates.items()]
    common.show(name, ["metric", "value"], [[one.metric, f"{one.value:.4g} {one.unit}"] for one in rows])
    return rows


def _trained(given: argparse.Namespace, name: str, group: str, way: Way, budget: int | None) -> dict[str, Any]:
    """Train in a process that is forked from one that has imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    ours, theirs = context.Pipe()
    num_samples, length = MODELS[name].sizes[group]
    if given.quick:
        num_samples, length = 4, _SMALL_LENGTH
    setting = _Setting(name, way, budget, num_samples, length, given.quick, str(given.disk))
    process = context.Process(target=_serve, args=(theirs, setting, given.steps), daemon=True)
    process.start()
    theirs.close()
    try:
        answer: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        answer = {"error": f"the process ended with {process.exitcode}"}
    process.join()
    return answer


@dataclass(frozen=True)
class _Setting:
    """How to train."""

    name: str
    way: Way
    budget: int | None
    num_samples: int
    length: int
    is_small: bool
    disk: str

    def made_model(self) -> nn.Module:
        torch.manual_seed(0)
        fewer = {} if self.way.num_layers is None else {"num_layers": self.way.num_layers}
        model = MODELS[self.name].make(self.is_small, **fewer)
        if self.way.checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def batch(self, model: nn.Module, generator: torch.Generator) -> Batch:
        return MODELS[self.name].batch(model, generator, self.num_samples, self.length)


def _serve(pipe: Connection, setting: _Setting, num_timed: int) -> None:
    """Train, and send what was measured."""
    warnings.simplefilter("ignore")
    resident = _most_resident_bytes()
    found: dict[str, Any] = {"losses": [], "seconds": [], "processor": []}
    generator = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory(dir=setting.disk) as directory:
        try:
            trainer = _TRAINERS[setting.way.method](setting, directory)
            for number in range(_WARM_STEPS[setting.way.method] + num_timed):
                batch = setting.batch(trainer.model, generator)
                start_s, start_processor_s = time.perf_counter(), time.process_time()
                loss = trainer.step(batch)
                elapsed_s, worked_s = time.perf_counter() - start_s, time.process_time() - start_processor_s
                found["losses"].append(loss.hex())
                print(f"step {number + 1}: loss {loss:.4f}, {elapsed_s:.1f} s, processor {worked_s:.1f} s", flush=True)
                if number >= _WARM_STEPS[setting.way.method]:
                    found["seconds"].append(elapsed_s)
                    found["processor"].append(worked_s)
            if setting.way.method != "training":  # its pages that leave would count as held; it measures itself
                batch = setting.batch(trainer.model, generator)
                found["peak"] = probe.peak_bytes(lambda: trainer.step(batch), device="cpu").peak_bytes
            found |= {"resident": _most_resident_bytes() - resident, **trainer.finish()}
        except (ValueError, RuntimeError) as error:  # a budget that is too small, for example
            found = {"error": str(error)}
    pipe.send(found)


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class _Trainer:
    """A model that trains."""

    model: nn.Module
    step: Callable[[Batch], float]
    finish: Callable[[], dict[str, Any]] = dict


def _make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _plain(setting: _Setting, _: str) -> _Trainer:
    model = setting.made_model()
    optimizer = _make_optimizer(model.parameters())

    def step(batch: Batch) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return _Trainer(model, step)


def _offloaded(setting: _Setting, disk: str) -> _Trainer:
    model = setting.made_model()
    optimizer = _make_optimizer(model.parameters())
    offloader = offload.activations(
        model, disk=disk, budget=setting.budget, min_size="64KiB" if setting.is_small else "1MiB"
    )

    def step(batch: Batch) -> float:
        with offloader:
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    def finish() -> dict[str, Any]:
        found = offloader.statistics()
        offloader.close()
        return {"in": found.fetched_bytes, "out": found.parked_bytes, "stall": found.stall_s}

    return _Trainer(model, step, finish)


def _planned(setting: _Setting, _: str) -> _Trainer:
    model = setting.made_model()
    optimizer = _make_optimizer(model.parameters())
    example = setting.batch(model, torch.Generator())

    def loss_of(*tensors: torch.Tensor) -> torch.Tensor:
        return model(**dict(zip(example, tensors, strict=True))).loss

    planned = remat.optimize(
        loss_of, list(example.values()), setting.budget, optimizer=optimizer, accumulates=False, method="recompute"
    )

    def step(batch: Batch) -> float:
        loss = planned(*batch.values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return _Trainer(model, step)


def _managed(setting: _Setting, disk: str) -> _Trainer:
    training = offload.training(
        setting.made_model,
        _make_optimizer,
        setting.budget,
        disk=disk,
        update_in_backward=setting.way.in_backward,
    )

    def step(batch: Batch) -> float:
        with training:
            loss = training.model(**batch).loss
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            return float(loss.item())

    def finish() -> dict[str, Any]:
        found = training.statistics()
        training.close(discard=True)
        return {
            "in": found.step_fetched_bytes, "out": found.step_parked_bytes, "state": found.state_bytes,
            "stall": found.stall_s / found.num_steps, "peak": found.measured_peak_bytes,
        }  # fmt: skip

    return _Trainer(training.model, step, finish)


_TRAINERS: dict[str, Callable[[_Setting, str], _Trainer]] = {
    "plain": _plain, "offload": _offloaded, "remat": _planned, "training": _managed,
}  # fmt: skip


if __name__ == "__main__":
    main()
