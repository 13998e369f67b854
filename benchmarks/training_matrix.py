"""Equality and bytes of `offload.training`, for eight architectures and six ways to train them.

Every case takes 20 optimizer steps plainly, and 20 inside of `penstock.offload.training` (through the Trainer: with
`PenstockCallback(method="training")`) within a share of the plain peak, or the next larger share where that is refused.
Equal means: every loss, all parameters and all optimizer states, to the bit. Each case is a process of its own.

Run it with ``python -m benchmarks.training_matrix --disk /nvme``.
"""

import contextlib
import gc
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import common
from penstock import offload, probe
from penstock.errors import BudgetError

_NUM_STEPS = 20
_SHARES = (0.35, 0.5, 0.7, 0.85, 1.0)
_WIDTH, _LAYERS, _HEADS, _VOCABULARY, _LENGTH = 128, 3, 4, 600, 24
_TIMEOUT_S = 1200
_NUM_FIRST = 7
"""Steps that may take more than the budget, since nobody has measured one of their kind."""


class Lion(torch.optim.Optimizer):
    """The optimizer Lion, which PyTorch does not have (Chen and others 2023)."""

    def __init__(self, parameters: Any, lr: float = 1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.add_(momentum.lerp(parameter.grad, 0.1).sign_(), alpha=-group["lr"])
                    momentum.lerp_(parameter.grad, 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train a model."""

    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    micro_batches: int = 1
    clip_norm: float | None = None
    is_half: bool = False
    """Whether autocast computes in bfloat16."""
    has_adapters: bool = False
    """Whether LoRA adapters on a frozen base are trained (PEFT)."""


WAYS = {
    "AdamW, 4 micro-batches, clipped": Way(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), micro_batches=4, clip_norm=1.0
    ),
    "AdamW, bfloat16, 4 micro-batches, clipped": Way(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        micro_batches=4,
        clip_norm=1.0,
        is_half=True,
    ),
    "SGD with momentum": Way(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
    "Adagrad, clipped": Way(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2), clip_norm=1.0),
    "Lion": Way(optimizer=lambda parameters: Lion(parameters, lr=1e-3)),
    "LoRA, AdamW, bfloat16": Way(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), is_half=True, has_adapters=True
    ),
}
LOOPS = ("own loop", "Trainer")


def make_models() -> dict[str, Callable[[], nn.Module]]:
    """Return makers of models by architecture. Tied weights: GPT-2, BERT, T5, Gemma, OPT."""
    import transformers as tf

    llama_like = {
        "hidden_size": _WIDTH, "intermediate_size": 3 * _WIDTH, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "num_key_value_heads": 2, "vocab_size": _VOCABULARY, "pad_token_id": 0,
    }  # fmt: skip
    bert_like = {
        "hidden_size": _WIDTH, "intermediate_size": 4 * _WIDTH, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "vocab_size": _VOCABULARY,
    }  # fmt: skip
    return {
        "GPT-2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS, vocab_size=_VOCABULARY, n_positions=64)
        ),
        "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**llama_like)),
        "Mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**llama_like, sliding_window=16)),
        "Gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**llama_like, head_dim=32)),
        "BERT": lambda: tf.BertForMaskedLM(tf.BertConfig(**bert_like, max_position_embeddings=64)),
        "T5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                d_model=_WIDTH,
                d_ff=4 * _WIDTH,
                d_kv=32,
                num_layers=_LAYERS,
                num_heads=_HEADS,
                vocab_size=_VOCABULARY,
                decoder_start_token_id=0,
            )
        ),
        "OPT": lambda: tf.OPTForCausalLM(
            tf.OPTConfig(
                hidden_size=_WIDTH,
                ffn_dim=4 * _WIDTH,
                num_hidden_layers=_LAYERS,
                num_attention_heads=_HEADS,
                vocab_size=_VOCABULARY,
                max_position_embeddings=64,
                word_embed_proj_dim=_WIDTH,
            )
        ),
        "ViT": lambda: tf.ViTForImageClassification(
            tf.ViTConfig(**{**bert_like, "image_size": 32, "patch_size": 8, "num_labels": 100})
        ),
    }


def make_batches(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    if name == "ViT":
        return [
            {
                "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
                "labels": torch.randint(100, (2,), generator=generator),
            }
            for _ in range(count)
        ]
    tokens = [torch.randint(1, _VOCABULARY, (2, _LENGTH), generator=generator) for _ in range(count)]
    return [{"input_ids": token, "labels": token.clone()} for token in tokens]


def make_model(name: str, way: Way) -> nn.Module:
    torch.manual_seed(0)
    model = make_models()[name]()
    if way.has_adapters:
        import peft

        linear = [key for key, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
        targets = [key for key in linear if key.split(".")[-1] not in ("lm_head", "classifier", "decoder")]
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))  # type: ignore[assignment]
    model.train()
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    options = common.parser(str(__doc__).splitlines()[0])
    options.add_argument("--model", action="append")
    options.add_argument("--way", action="append")
    options.add_argument("--child", nargs=3, help="run this model, way and loop, and print what was found as JSON")
    settings = options.parse_args(arguments)
    if settings.child:
        print(json.dumps(compared(*settings.child)))
        return
    names, ways = settings.model or list(make_models()), settings.way or list(WAYS)
    if settings.quick:
        names, ways = names[:1], ways[:1]
    rows: list[common.Row] = []
    lines = []
    for case in itertools.product(names, ways, LOOPS):
        result = in_a_process(*case)
        keys = ("equal", "share", "kept", "moved", "error")
        lines.append([*case, *(str(result.get(key, "")) for key in keys)])
        print("  ".join(lines[-1]), flush=True)
        label = ", ".join(case)
        if "error" in result:
            rows.append(common.Row(name=label, metric="failed", value=1.0, unit="bool"))
        else:
            rows += [
                common.Row(name=label, metric="equal to plain", value=float(result["equal"]), unit="bool"),
                common.Row(name=label, metric="budget over plain's peak", value=result["share"], unit="ratio"),
                common.Row(name=label, metric="measured over budget", value=result["kept"], unit="ratio"),
                common.Row(name=label, metric="bytes in per parameter and step", value=result["moved"], unit="B"),
            ]
        common.write(settings.json, {"steps": _NUM_STEPS, "shares": list(_SHARES)}, rows)
    common.show(
        "Twenty steps within a budget", ["model", "way", "loop", "equal", "share", "kept", "moved", "error"], lines
    )


def in_a_process(model: str, way: str, loop: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.training_matrix", "--child", model, way, loop]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {_TIMEOUT_S} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"error": f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}"}


def compared(name: str, way_name: str, loop: str) -> dict[str, Any]:
    """Train plainly, then within the smallest share of that peak that is not refused, and compare."""
    train = in_own_loop if loop == "own loop" else through_the_trainer
    torch.set_num_threads(1)
    plain = train(name, WAYS[way_name], None)
    for share in _SHARES:
        budget = int(plain["start"] + share * (plain["peak"] - plain["start"]))
        try:
            ours = train(name, WAYS[way_name], budget)
        except BudgetError as error:
            last = str(error)
            gc.collect()
            continue
        return {
            "equal": ours["losses"] == plain["losses"] and ours["bits"] == plain["bits"],
            "share": share,
            "kept": round(ours["peak"] / budget, 4),
            "moved": round(ours["moved"], 1),
        }
    return {"error": f"refused: {last[:150]}"}


def in_own_loop(name: str, way: Way, budget: int | None) -> dict[str, Any]:
    gc.collect()
    start = probe.held_bytes("cpu")
    model = make_model(name, way)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = way.optimizer(trained)
    batches = iter(make_batches(name, _NUM_STEPS * way.micro_batches))
    losses: list[float] = []

    def step() -> None:
        for _ in range(way.micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=way.is_half):
                loss = model(**next(batches)).loss
            (loss / way.micro_batches).backward()
            losses.append(loss.item())
        if way.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, way.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    peaks: list[int] = []
    moved = 0.0
    if budget is None:
        for number in range(_NUM_STEPS):
            torch.manual_seed(number)
            peaks.append(probe.peak_bytes(step, device="cpu").peak_bytes)
    else:
        with within(budget, model, optimizer) as training:
            for number in range(_NUM_STEPS):
                torch.manual_seed(number)
                if number < _NUM_FIRST:  # measured by the training itself
                    with training:
                        step()
                    continue
                training.park()  # what was there before is not seen to go
                with probe.record_memory("cpu") as recording, training:
                    step()
                peaks.append(recording.report.peak_bytes)
            moved = training.statistics().step_fetched_bytes / training.statistics().num_parameters
    return {
        "start": start, "peak": max(peaks), "moved": moved, "losses": losses, "bits": bits_of(model, optimizer),
    }  # fmt: skip


@contextlib.contextmanager
def within(budget: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[offload.Training]:
    with tempfile.TemporaryDirectory() as directory:
        training = offload.training(model, optimizer, budget, disk=directory)
        try:
            yield training
        finally:
            training.close()


def through_the_trainer(name: str, way: Way, budget: int | None) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    from penstock.integrations import PenstockCallback

    gc.collect()
    start = probe.held_bytes("cpu")
    model = make_model(name, way)
    optimizer = way.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    samples = [
        {key: value[index] for key, value in batch.items()}
        for batch in make_batches(name, _NUM_STEPS * way.micro_batches)
        for index in range(2)
    ]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=_NUM_STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=way.micro_batches,
            max_grad_norm=way.clip_norm or 0.0,
            bf16=way.is_half,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            lr_scheduler_type="linear",
            disable_tqdm=True,
        )
        callback = (
            None if budget is None else PenstockCallback(budget=budget, disk=f"{directory}/disk", method="training")
        )
        if budget is not None:
            Path(directory, "disk").mkdir()
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=samples,  # type: ignore[arg-type]
            optimizers=(optimizer, None),
            callbacks=[] if callback is None else [callback],
        )
        try:
            peak = 0
            if callback is None:
                peak = probe.peak_bytes(trainer.train, device="cpu").peak_bytes
            else:
                trainer.train()
            summary = None if callback is None else callback.summary()
            moved = 0.0
            if isinstance(summary, offload.TrainingStatistics):
                peak = summary.measured_peak_bytes or 0
                moved = summary.step_fetched_bytes / summary.num_parameters
        finally:
            if callback is not None:
                callback.close()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == _NUM_STEPS
    return {"start": start, "peak": peak, "moved": moved, "losses": losses, "bits": bits_of(model, optimizer)}


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Return the bits of all parameters and states."""
    states = [
        tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor)
    ]
    return b"".join(
        parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for parameter in [*model.parameters(), *states]
    )


if __name__ == "__main__":
    main()
