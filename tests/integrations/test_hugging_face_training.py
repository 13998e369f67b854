"""PenstockCallback(method="training"): a Trainer trains a model whose state exceeds its budget, as without it."""

import gc
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_hugging_face import losses, trainer_of

from loops import assert_same_parameters, gpt2
from penstock import probe
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


def callback_within(tmp_path, model, size_kib=2300):
    gc.collect()
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget = probe.held_bytes("cpu") - own_bytes + size_kib * 1024
    (tmp_path / "disk").mkdir(exist_ok=True)
    CALLBACKS.append(PenstockCallback(budget=budget, disk=tmp_path / "disk", method="training"))
    return CALLBACKS[-1]


@pytest.mark.filterwarnings("ignore:Adafactor is not PyTorch's own")  # it is transformers'
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_steps": 2,
            "load_best_model_at_end": True,
        },
        {"optim": "adafactor"},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_trains_as_without_it(tmp_path, changes):
    plain = trainer_of(tmp_path / "plain", model=gpt2(), **changes)
    plain.train()
    expected, after = losses(plain), {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    model = gpt2()
    del plain
    callback = callback_within(tmp_path, model, 8000 if changes.get("optim") else 2300)
    trainer = trainer_of(tmp_path / "ours", callback, model=model, **changes)
    trainer.train()
    assert losses(trainer) == expected != []
    callback.close()
    assert all(torch.equal(tensor, after[name]) for name, tensor in trainer.model.state_dict().items())
    summary = callback.summary()
    assert summary.num_steps >= trainer.state.global_step
    assert summary.fetched_bytes > 0 or changes.get("optim")
    assert "tolist" not in torch.Tensor.__dict__
    logged = [row for row in trainer.state.log_history if "penstock_in_bytes_per_parameter" in row]
    assert len(logged) == 5


def test_resumes_from_a_checkpoint_with_the_losses_of_the_undisturbed_run(tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    plain = trainer_of(tmp_path / "plain", model=gpt2(), **options)
    plain.train()
    model = gpt2()
    first = trainer_of(tmp_path / "ours", callback_within(tmp_path, model), model=model, **options | {"max_steps": 3})
    first.train()
    model = gpt2()
    callback = callback_within(tmp_path, model, 4000)  # the Trainer holds on to what it loaded
    second = trainer_of(tmp_path / "ours", callback, model=model, **options)
    second.train(resume_from_checkpoint=True)
    assert losses(second)[-3:] == losses(plain)[-3:]
    assert_same_parameters(plain.model, second.model)


def test_an_error_in_a_step_leaves_a_plain_model(tmp_path):
    class Failing(transformers.Trainer):
        def compute_loss(self, *arguments, **options):
            if self.state.global_step == 2:
                raise KeyError("a bug of the user's")
            return super().compute_loss(*arguments, **options)

    model = gpt2()
    callback = callback_within(tmp_path, model)
    trainer = trainer_of(tmp_path, callback, model=model, kind=Failing)
    with pytest.raises(KeyError, match="a bug"):
        trainer.train()
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.long)).logits).all()
    callback.close()
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert "tolist" not in torch.Tensor.__dict__


def test_options(tmp_path):
    with pytest.raises(ValueError, match="requires a budget"):
        PenstockCallback(disk=tmp_path, method="training")
    with pytest.raises(TypeError, match="min_size"):
        PenstockCallback(disk=tmp_path, budget="1GiB", method="training", min_size=0)
    with pytest.raises(ValueError, match="`method` must be 'offload', 'remat' or 'training'"):
        PenstockCallback(disk=tmp_path, method="other")
    callback_arguments = PenstockArguments(
        penstock_budget="1GiB", penstock_disk=[str(tmp_path)], penstock_method="training"
    )
    assert PenstockCallback(callback_arguments).summary() is None


@pytest.mark.filterwarnings("ignore::penstock.errors.BudgetNotKeptWarning")  # failed once, in a process of many tests
@pytest.mark.parametrize("kind", ["gpt2", "tied", "lora", "two adapters", "adapted embedding"])
def test_models_are_saved_within_the_budget(tmp_path, kind):
    def made():
        torch.manual_seed(0)
        model = gpt2(tie_word_embeddings=kind == "tied")
        return (
            get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))
            if kind == "lora"
            else model
        )

    class Saving(transformers.TrainerCallback):
        peak_bytes = 0

        def on_step_end(self, _args, state, *_, **__):
            if state.global_step == 3:
                path = tmp_path / ("plain" if self.trainer.model is plain_model else "ours") / "saved"
                self.peak_bytes = probe.peak_bytes(lambda: self.trainer.save_model(path)).peak_bytes

    saving, plain_model = Saving(), made()
    saving.trainer = trainer_of(tmp_path / "plain", saving, model=plain_model)
    saving.trainer.train()
    model, saving.trainer = made(), None
    callback = callback_within(tmp_path, model)
    saving.trainer = trainer_of(tmp_path / "ours", callback, saving, model=model)
    saving.trainer.train()
    assert saving.peak_bytes <= callback._options["budget"]
    expected, saved = (tensors_in(tmp_path / which / "saved") for which in ("plain", "ours"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())


def test_a_model_that_does_not_fit_stays_where_it_is(tmp_path):
    plain = trainer_of(tmp_path / "plain", model=gpt2())
    plain.train()
    expected = plain.evaluate()["eval_loss"]
    model = gpt2()
    del plain
    callback = callback_within(tmp_path, model)
    trainer = trainer_of(tmp_path / "ours", callback, model=model)
    trainer.train()
    budget = callback._options["budget"]
    losses = []
    peak = probe.peak_bytes(lambda: losses.append(trainer.evaluate()["eval_loss"]))
    assert losses == [expected]
    assert peak.peak_bytes <= 1.02 * budget
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").is_file()
    callback.close(discard=True)
    assert "tolist" not in torch.Tensor.__dict__


@pytest.fixture(autouse=True)
def _closed():
    """Whatever a test has left open."""
    yield
    for callback in CALLBACKS:
        callback.close(discard=True)
    CALLBACKS.clear()


CALLBACKS = []
TARGETS = {"target_modules": ["c_attn"], "fan_in_fan_out": True}


def tensors_in(path):
    return {name: tensor for file in sorted(path.rglob("*.safetensors")) for name, tensor in load_file(file).items()}
