"""TRL's SFTTrainer trains with the callback as without it, with and without adapters; and the page's code runs."""

import gc
import logging
import re
import tempfile
from pathlib import Path

import pytest
import torch

from loops import EVERYTHING, everything_parked
from penstock import probe
from penstock.integrations import PenstockCallback

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "fine-tuning.md"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # those of other libraries
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def tokenizer():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<end>": 0, **{f"w{number}": number for number in range(1, 128)}}, "<end>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def trainer_of(*callbacks, has_adapters, length=64, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes))
    tokens = torch.randint(3, 128, (32, length), generator=torch.Generator().manual_seed(1))
    options = {
        "output_dir": tempfile.mkdtemp(), "max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1,
        "learning_rate": 1e-3, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    adapters = None
    if has_adapters:
        adapters = pytest.importorskip("peft").LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    return trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**options | changes),
        train_dataset=datasets.Dataset.from_dict({"input_ids": tokens.tolist()}),
        processing_class=tokenizer(),
        peft_config=adapters,
        callbacks=list(callbacks),
    )


def trained(*callbacks, **options):
    """Returns losses and copies of the trained parameters."""
    trainer = trainer_of(*callbacks, **options)
    trainer.train()
    for callback in callbacks:
        callback.close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {name: one.detach().clone() for name, one in trainer.model.named_parameters()}


def assert_same(left, right):
    assert left[0] == right[0] != []
    assert left[1].keys() == right[1].keys()
    assert all(torch.equal(value, right[1][name]) for name, value in left[1].items())


@pytest.mark.parametrize("has_adapters", [False, True], ids=["all", "adapters"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"packing": True}, {"bf16": True}],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_activations_are_offloaded_and_nothing_differs(disk, has_adapters, changes):
    expected = trained(has_adapters=has_adapters, **changes)
    callback = PenstockCallback(disk=disk, **EVERYTHING)
    with everything_parked():
        actual = trained(callback, has_adapters=has_adapters, **changes)
    assert_same(expected, actual)
    assert callback.summary().parked_bytes > 0
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("has_adapters", [False, True], ids=["all", "adapters"])
def test_a_model_larger_than_its_budget_trains_as_without_it(disk, has_adapters):
    """TRL's head works on a tile of 32,768 columns per token, so that few tokens leave room for a small budget."""
    options = {"has_adapters": has_adapters, "length": 16, "per_device_train_batch_size": 1}
    expected = trained(**options)
    gc.collect()
    budget = probe.held_bytes("cpu") + 6 * 2**20
    callback = PenstockCallback(budget=budget, disk=disk, method="training")
    assert_same(expected, trained(callback, **options))
    assert callback.summary().fetched_bytes > 0


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = [code for code in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL) if "SFTTrainer" in code]
    exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
