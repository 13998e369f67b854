"""PenstockCallback: the Trainer trains as without it, within its budget, and nothing stays behind."""

import contextlib
import gc
import logging
import sys

import pytest
import torch

from loops import EVERYTHING, TIGHT, assert_same_parameters, everything_parked, gpt2, nothing_left, texts
from penstock import probe, tiers
from penstock.errors import BudgetError, OffloadDeclinedWarning
from penstock.integrations import PenstockArguments, PenstockCallback

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def arguments(folder, **changes):
    options = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    return transformers.TrainingArguments(**options | changes)


def trainer_of(folder, *callbacks, model=None, kind=None, beside=None, **changes):
    model = gpt2() if model is None else model
    trainer = (kind or transformers.Trainer)(
        model,
        arguments(folder, **changes),
        train_dataset=texts(),
        eval_dataset=texts(8),
        callbacks=list(callbacks),
        **(beside or {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def losses(trainer):
    return [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss", "grad_norm") if key in row]


class Check(transformers.TrainerCallback):
    """Looks at the offloader while it lives."""

    def __init__(self, callback):
        self.callback, self.parked = callback, []

    def on_substep_end(self, *_, **__):
        self.on_step_end()

    def on_step_end(self, *_, **__):
        if self.callback._loop is not None:
            self.parked.append(self.callback.summary().parked_bytes)

    def on_pre_optimizer_step(self, *_, **__):
        if self.callback._loop is not None:
            offloader = self.callback._loop.offloader
            for waterfall in offloader._waterfalls.values():
                waterfall.drain()
            statistics = offloader.tier_statistics()
            assert statistics.num_live_handles == statistics.held_bytes["disk"] == 0


def assert_trains_equal(tmp_path, disk, *, build=gpt2, **changes):
    plain = trainer_of(tmp_path, model=build(), **changes)
    plain.train()
    callback = PenstockCallback(disk=disk, **EVERYTHING)
    trainer = trainer_of(tmp_path, callback, check := Check(callback), model=build(), **changes)
    with nothing_left(trainer.model, disk, like=plain.model), everything_parked():
        trainer.train()
    assert losses(plain) == losses(trainer) != []
    assert_same_parameters(plain.model, trainer.model)
    assert check.parked == sorted({0, *check.parked})[1:]  # more with every micro-batch
    return callback, trainer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
        {"num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 24},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_trains_as_without_it(tmp_path, disk, changes):
    callback, trainer = assert_trains_equal(tmp_path, disk, **changes)
    summary = callback.summary()
    accumulated = changes.get("gradient_accumulation_steps", 1)
    assert summary.num_cycles == trainer.state.global_step * accumulated
    assert summary.written_to_disk_bytes == summary.parked_bytes > 0


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


class Images(transformers.Trainer):
    """Its loss is computed outside of the model, and is not a Trainer's own."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        images = torch.nn.functional.one_hot(inputs["input_ids"] % 12, 12).float().reshape(-1, 3, 16, 16)
        logits = model(pixel_values=images).logits
        loss = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 0] % 2)
        return (loss, logits) if return_outputs else loss


def test_a_trainer_with_a_loss_of_its_own(tmp_path, disk):
    assert_trains_equal(tmp_path, disk, build=vit, kind=Images, remove_unused_columns=False)


def test_adapters_train_equal_and_are_saved_alone(tmp_path, disk):
    peft = pytest.importorskip("peft")

    def lora():
        base = gpt2()
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))

    _, trainer = assert_trains_equal(tmp_path, disk, build=lora, save_strategy="steps", save_steps=4)
    assert (tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "out" / "checkpoint-4")
    assert_same_parameters(trainer.model, again)


class Measured(transformers.TrainerCallback):
    """The true peak of forward and backward of the last steps; earlier ones are the offloader's to measure."""

    def __init__(self, first=7):
        self.first, self.reports = first, []
        self._open = contextlib.ExitStack()

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 >= self.first:
            self.recording = self._open.enter_context(probe.record_memory("cpu"))

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step + 1 >= self.first:
            self._open.close()
            self.reports.append(self.recording.report)


def measured_plain(tmp_path, **changes):
    trainer = trainer_of(tmp_path, measured := Measured(), max_steps=8, **changes)
    trainer.train()
    return losses(trainer), max(measured.reports, key=lambda report: report.peak_bytes)


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}], ids=["one", "accumulated"])
def test_a_shared_budget_is_kept_with_the_optimizer_state_in_it(tmp_path, disk, collected, changes):
    expected, report = measured_plain(tmp_path, **changes)
    gc.collect()
    account = tiers.Budget(device=report.start_bytes + int(0.7 * report.activation_bytes), disk=disk)
    callback = PenstockCallback(budget=account, **TIGHT)
    trainer = trainer_of(tmp_path, callback, measured := Measured(), max_steps=8, **changes)
    with nothing_left(trainer.model, disk):
        trainer.train()
    assert losses(trainer) == expected
    assert len(measured.reports) == 2
    assert all(measurement.peak_bytes <= account.device_bytes < report.peak_bytes for measurement in measured.reports)
    summary = callback.summary()
    assert summary.parked_bytes > 0
    assert account.peak_bytes(str(disk)) > 0
    assert account.held_bytes(str(disk)) == 0
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["penstock_peak_gib"] > 0 for row in rows)
    assert rows[-1]["penstock_parked_gib"] > 0


@pytest.mark.parametrize(("optimizer", "num_offloaders"), [("sgd", 1), ("adamw_torch", 2)])
def test_what_was_learned_is_forgotten_once_the_optimizer_has_state(tmp_path, disk, optimizer, num_offloaders):
    callback, seen = PenstockCallback(budget=2**40, disk=disk, **TIGHT), []

    class Look(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            seen.append(callback._loop.offloader)

    trainer = trainer_of(tmp_path, callback, Look(), optim=optimizer)
    trainer.train()
    assert len(set(map(id, seen))) == num_offloaders
    assert seen[0] is not seen[1] or num_offloaders == 1
    assert callback.summary().parked_bytes == sum(offloader.tier_statistics().parked_bytes for offloader in {*seen})


def test_a_budget_that_cannot_be_met_ends_training_with_the_smallest_that_can(tmp_path, disk):
    model = gpt2()
    static_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    trainer = trainer_of(tmp_path, PenstockCallback(budget=static_bytes + 2**18, disk=disk, **TIGHT), model=model)
    with nothing_left(model, disk), pytest.raises(BudgetError, match="needs at least"):
        trainer.train()
    with pytest.raises(BudgetError, match="parameters and gradients alone"):
        trainer_of(tmp_path, PenstockCallback(budget="64KiB", disk=disk), model=model).train()


def test_the_log_has_figures_where_trackers_see_them(tmp_path, disk):
    seen = []

    class Tracker(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            seen.append(dict(logs))

    callback = PenstockCallback(disk=disk, **EVERYTHING)
    trainer = trainer_of(tmp_path, Tracker(), callback, eval_strategy="steps", eval_steps=2)
    with everything_parked():
        output = trainer.train()
    for row in trainer.state.log_history:
        assert ("penstock_parked_gib" in row) == ("loss" in row)
        assert ("penstock_total_parked_gib" in row) == ("train_runtime" in row)
        assert 0 <= row.get("penstock_stall_share", 0) <= 1
    assert [row.keys() - {"step"} for row in trainer.state.log_history] == [row.keys() for row in seen]
    closing = [row for row in seen if "penstock_total_parked_gib" in row]
    assert len(closing) == 1
    summary = callback.summary()
    assert closing[0]["penstock_total_parked_gib"] * 2**30 == summary.parked_bytes
    assert output.metrics["penstock_total_written_gib"] * 2**30 == summary.written_to_disk_bytes
    assert "micro-batches" in str(summary)


class Fault(transformers.TrainerCallback):
    def __init__(self, moment, kind):
        self.moment, self.kind, self.is_armed = moment, kind, True

    def _raise(self, moment, state):
        if moment == self.moment and self.is_armed and state.global_step == 2:
            raise self.kind(moment)

    def on_step_begin(self, args, state, control, **_):
        self._raise("begin", state)

    def on_substep_end(self, args, state, control, **_):
        self._raise("substep", state)

    def on_evaluate(self, args, state, control, **_):
        self._raise("evaluate", state)


EVALUATED = {"max_steps": 3, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(scope="module")
def plain_evaluated(tmp_path_factory, one_thread_for_the_module):
    trainer = trainer_of(tmp_path_factory.mktemp("plain"), **EVALUATED)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        ("begin", RuntimeError),
        ("substep", RuntimeError),
        ("evaluate", KeyboardInterrupt),
        ("forward", RuntimeError),
        ("forward", KeyboardInterrupt),
        ("backward", RuntimeError),
        ("backward", KeyboardInterrupt),
        ("save", RuntimeError),
    ],
)
def test_after_a_fault_nothing_is_left_and_training_goes_again(
    tmp_path, disk, moment, kind, monkeypatch, plain_evaluated
):
    plain, changes = plain_evaluated, EVALUATED
    model, fault = gpt2(), Fault(moment, kind)
    callback = PenstockCallback(disk=disk, budget=2**40, **EVERYTHING)
    trainer = trainer_of(tmp_path, fault, callback, model=model, **changes)

    def hook(*_):
        if trainer.state.global_step == 2 and model.training:
            raise kind(moment)

    if moment == "forward":
        handle = model.transformer.h[1].register_forward_hook(hook)
    elif moment == "backward":
        handle = model.transformer.h[1].ln_1.weight.register_hook(hook)
    elif moment == "save":
        trainer.args.save_strategy, trainer.args.save_steps = "steps", 2
        trainer.state.save_steps = 2
        monkeypatch.setattr(trainer, "_save_checkpoint", lambda *_: model.train() and hook())
    before = {name: value.clone() for name, value in gpt2().state_dict().items()}
    with nothing_left(model, disk), pytest.raises(kind, match=moment):
        trainer.train()
    assert callback.summary().parked_bytes > 0
    gc.collect()

    fault.is_armed = False
    if moment in ("forward", "backward"):
        handle.remove()
    if moment == "save":
        return
    model.load_state_dict(before)
    again = trainer_of(tmp_path, callback, model=model, **changes)
    with nothing_left(model, disk):
        again.train()
    assert losses(again) == losses(plain)
    assert_same_parameters(plain.model, model)


def test_training_twice_and_a_callback_added_later(tmp_path, disk):
    plain = trainer_of(tmp_path)
    plain.train()
    plain.train()
    trainer = trainer_of(tmp_path)
    trainer.add_callback(callback := PenstockCallback(disk=disk, **EVERYTHING))
    with nothing_left(trainer.model, disk), everything_parked():
        trainer.train()
        first = callback.summary()
        trainer.train()
    assert callback.summary().parked_bytes > 0
    assert callback.summary().num_cycles == first.num_cycles == 4
    assert losses(plain) == losses(trainer)
    assert_same_parameters(plain.model, trainer.model)


def test_a_smaller_batch_after_running_out_of_memory(tmp_path, disk):
    class Small(transformers.Trainer):
        def compute_loss(self, model, inputs, **others):
            if len(inputs["input_ids"]) > 4:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, **others)

    plain = trainer_of(tmp_path, kind=Small, auto_find_batch_size=True)
    plain.train()
    callback = PenstockCallback(disk=disk, **EVERYTHING)
    trainer = trainer_of(tmp_path, callback, kind=Small, auto_find_batch_size=True)
    with nothing_left(trainer.model, disk), everything_parked():
        trainer.train()
    assert losses(plain) == losses(trainer)
    assert callback.summary().num_cycles == 4
    assert callback.summary().parked_bytes > 0


def test_a_search_of_hyperparameters_makes_models_anew(tmp_path, disk):
    pytest.importorskip("optuna")
    callback, models = PenstockCallback(disk=disk, **EVERYTHING), []

    def init():
        models.append(gpt2())
        return models[-1]

    trainer = transformers.Trainer(
        None,
        arguments(tmp_path, max_steps=2),
        train_dataset=texts(),
        eval_dataset=texts(8),
        model_init=init,
        callbacks=[callback],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    with everything_parked():
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)},
            backend="optuna",
            n_trials=2,
        )
    assert callback.summary().num_cycles == 2
    assert callback.summary().parked_bytes > 0
    assert list(disk.iterdir()) == []
    assert len(models) == 3  # the first shows the Trainer what kind of model there will be
    assert not any(module._forward_hooks for model in models for module in model.modules())


def test_checkpoints_have_plain_names_and_resume_either_way(tmp_path, disk):
    plain = trainer_of(tmp_path / "plain", max_steps=6, save_strategy="steps", save_steps=3)
    plain.train()
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    trainer = trainer_of(tmp_path / "less", PenstockCallback(disk=disk, **EVERYTHING), **options)
    trainer.train()
    for kind, folder in ((plain, "less"), (trainer, "plain")):
        checkpoint = tmp_path / folder / "out" / "checkpoint-3"
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(checkpoint, output_loading_info=True)
        assert not any(info.values())
        assert loaded.state_dict().keys() == kind.model.state_dict().keys()
    resumed = trainer_of(tmp_path / "again", callback := PenstockCallback(disk=disk, **EVERYTHING), **options)
    with nothing_left(resumed.model, disk):
        resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "out" / "checkpoint-3"))
    assert callback.summary().num_cycles == 3
    assert losses(resumed) == losses(plain)
    assert_same_parameters(plain.model, resumed.model)


def test_the_model_is_unwrapped_as_ever_while_it_trains(tmp_path, disk):
    seen = []

    class Unwrap(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            for options in ({}, {"keep_fp32_wrapper": False}, {"keep_torch_compile": False}):
                seen.append(trainer.accelerator.unwrap_model(trainer.model_wrapped, **options) is model)

    trainer = trainer_of(tmp_path, Unwrap(), PenstockCallback(disk=disk, **EVERYTHING), bf16=True, max_steps=2)
    trainer.train()
    assert seen == [True] * 6
    assert type(trainer.model) is transformers.GPT2LMHeadModel


def test_evaluation_holds_nothing(tmp_path, disk):
    """As many tensors are alive after ten evaluations as after one."""
    alive = []

    class Count(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, **_):
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    callback = PenstockCallback(disk=disk, **EVERYTHING)
    trainer = trainer_of(tmp_path, Count(), callback, max_steps=10, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert len(alive) == 10
    assert alive[-1] <= alive[2]


def test_the_command_line(disk, tmp_path):
    parser = transformers.HfArgumentParser((PenstockArguments, transformers.TrainingArguments))
    line = [
        "--penstock_budget",
        "1GiB",
        "--penstock_disk",
        str(disk),
        "--penstock_min_size",
        "8KiB",
        "--max_steps",
        "3",
    ]
    ours, theirs = parser.parse_args_into_dataclasses([*line, "--penstock_modules", "transformer.h.*", "lm_head"])
    assert ours == PenstockArguments(
        penstock_budget="1GiB",
        penstock_disk=[str(disk)],
        penstock_min_size="8KiB",
        penstock_modules=["transformer.h.*", "lm_head"],
    )
    assert theirs.max_steps == 3
    trainer = trainer_of(tmp_path, callback := PenstockCallback(ours))
    trainer.train()
    assert callback.summary().num_cycles == 4
    assert callback.summary().parked_bytes > 0


def test_without_options_on_the_command_line_nothing_happens(tmp_path):
    trainer = trainer_of(tmp_path, callback := PenstockCallback(PenstockArguments()))
    trainer.train()
    assert callback.summary() is None
    assert not any("penstock" in key for row in trainer.state.log_history for key in row)


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes, **ends))


@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_planned_step_trains_equal(tmp_path, disk, build):
    changes = {"max_steps": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    plain = trainer_of(tmp_path, model=build(), **changes)
    plain.train()
    callback = PenstockCallback(budget=0.9, method="remat")
    trainer = trainer_of(tmp_path, callback, model=build(), **changes)
    planned = []

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            planned.append(model._compiled_call_impl is not None)

    trainer.add_callback(Look())
    with nothing_left(trainer.model, disk):
        trainer.train()
    assert planned == [True, True]
    assert losses(plain) == losses(trainer)
    assert_same_parameters(plain.model, trainer.model)


@pytest.mark.filterwarnings("ignore::penstock.errors.BudgetNotKeptWarning")  # other tests leave models
def test_a_planned_step_that_swaps_leaves_nothing_in_its_account(tmp_path, disk, monkeypatch):
    monkeypatch.setattr("penstock.remat._describe.lane_rates", lambda *_: (1e12, 1e12))
    model, account = llama(), tiers.Budget(device="1GiB", disk=disk)
    callback = PenstockCallback(budget=account, method="remat")
    for budget_bytes in (None, 1.0):
        trainer = trainer_of(tmp_path, callback, model=model, max_steps=2, per_device_train_batch_size=16)
        with nothing_left(model, disk):
            trainer.train()
        assert not any(use.held_bytes for use in account.uses())
        assert account.peak_bytes("device") > 0
        if budget_bytes is None:  # the second time it has to swap
            static_bytes = 4 * sum(parameter.nbytes for parameter in model.parameters())
            account.device_bytes = static_bytes + (account.peak_bytes("device") - static_bytes) // 2
    assert account.peak_bytes(str(disk)) > 0


def test_a_planned_step_counts_the_optimizer_and_refuses_a_hopeless_budget(tmp_path, disk):
    model = llama()
    static_bytes = 4 * sum(parameter.nbytes for parameter in model.parameters())  # gradients and AdamW's two moments
    trainer = trainer_of(tmp_path, PenstockCallback(budget=static_bytes, method="remat"), model=model)
    with nothing_left(model, disk), pytest.raises(Exception, match="cannot be met"):
        trainer.train()


def test_a_model_that_the_trainer_compiles_is_declined(tmp_path, disk):
    callback = PenstockCallback(disk=disk)
    trainer = trainer_of(tmp_path, callback, torch_compile=True, torch_compile_backend="eager", max_steps=1)
    with nothing_left(trainer.model, disk), pytest.warns(OffloadDeclinedWarning, match="one compiled region"):
        trainer.train()
    assert callback.summary().declined
    assert callback.summary().parked_bytes == 0
    assert "offloaded nothing" in str(callback.summary())


def test_misuse_is_told_at_once(tmp_path, disk, monkeypatch):
    with pytest.raises(TypeError, match="budgte.*the options are disk, host, budget"):
        PenstockCallback(budgte="6GiB", disk=disk)
    with pytest.raises(TypeError, match="modules"):
        PenstockCallback(budget="6GiB", method="remat", modules=["*"])
    with pytest.raises(ValueError, match="requires a budget"):
        PenstockCallback(disk=disk, method="remat")
    with pytest.raises(ValueError, match="'offload', 'remat' or 'training'"):
        PenstockCallback(disk=disk, method="swap")
    with pytest.raises(ValueError, match="not both"):
        PenstockCallback(PenstockArguments(), disk=disk)
    with pytest.raises(ValueError, match="works inside of transformers.Trainer"):
        PenstockCallback(disk=disk).on_train_begin(arguments(tmp_path), None, None)
    with pytest.raises(ValueError, match="no place to offload to"):
        trainer_of(tmp_path, PenstockCallback()).train()
    several = trainer_of(tmp_path, PenstockCallback(disk=disk))
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    monkeypatch.setattr(several, "_wrap_model", lambda model: model)  # there are no two GPUs to replicate it to
    with pytest.raises(ValueError, match="torchrun"):
        several.train()


def test_without_transformers_the_extra_is_named(monkeypatch, disk):
    monkeypatch.setitem(sys.modules, "transformers", None)
    from penstock.integrations import _hugging_face

    _hugging_face._with_base.cache_clear()
    with pytest.raises(ImportError, match=r"penstock\[hf\]"):
        PenstockCallback(disk=disk)
