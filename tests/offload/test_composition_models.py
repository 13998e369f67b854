"""Offloading inside models that others wrote: tiny configurations of Hugging Face's, trained with their defaults."""

import pytest
import torch
from _helpers import assert_trains_equal, forward_backward
from torch import nn

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = 64
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tokens():
    return torch.randint(3, VOCABULARY, (4, 24))


def gpt2(**options):
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **TEXT, **options)
    return transformers.GPT2LMHeadModel(config)


def bert(**options):
    config = transformers.BertConfig(
        **SMALL,
        max_position_embeddings=32,
        **TEXT,
        **options,
    )
    return transformers.BertForMaskedLM(config)


def vit(**options):
    config = transformers.ViTConfig(
        **SMALL,
        image_size=16,
        patch_size=4,
        num_labels=5,
        **options,
    )
    return transformers.ViTForImageClassification(config)


def t5(**options):
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        **options,
    )
    return transformers.T5ForConditionalGeneration(config)


def llama(**options):
    config = transformers.LlamaConfig(
        **SMALL | {"num_attention_heads": 4},
        num_key_value_heads=2,
        max_position_embeddings=32,
        **TEXT,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def text_loss(model):
    batch = tokens()
    return model(input_ids=batch, labels=batch).loss


def masked_text_loss(model):
    batch, mask = tokens(), torch.ones(4, 24, dtype=torch.long)
    mask[1, 12:] = 0
    return model(input_ids=batch, attention_mask=mask, labels=batch).loss


def image_loss(model):
    return model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.randint(5, (4,))).loss


MODELS = {
    "gpt2": (gpt2, text_loss),
    "bert": (bert, masked_text_loss),
    "vit": (vit, image_loss),
    "t5": (t5, masked_text_loss),
    "llama": (llama, masked_text_loss),
}


def training(build, **options):
    """A builder of the model in training mode, from the generator's state at the time of the call."""
    return lambda: build(**options).train()


@pytest.mark.parametrize("name", MODELS)
def test_models_train_equal(tmp_path, name):
    build, loss = MODELS[name]
    run = assert_trains_equal(training(build), forward_backward(loss), tmp_path)
    assert run.statistics[0].fetched_bytes > run.statistics[0].saved_bytes // 2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_kinds_of_attention(tmp_path, name, attention):
    build, loss = MODELS[name]
    assert_trains_equal(
        training(build, attn_implementation=attention), forward_backward(loss), tmp_path, num_steps=3, min_size="4KiB"
    )


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("inputs_only", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing(tmp_path, name, is_reentrant, inputs_only):
    build, loss = MODELS[name]

    def checkpointed():
        model = build().train()
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        return model

    run = assert_trains_equal(
        checkpointed, forward_backward(loss), tmp_path, num_steps=3, checkpoint_inputs_only=inputs_only
    )
    if inputs_only:
        assert run.statistics[0].kept_bytes["kept: not a checkpoint's input"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_autocast(tmp_path, name):
    build, loss = MODELS[name]
    seen = []

    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model)

    assert_trains_equal(
        training(build), forward_backward(forward), tmp_path, num_steps=3, policy=lambda tensor: not seen.append(tensor)
    )
    linear = [module for module in build().modules() if isinstance(module, nn.Linear)]
    weights = {shape for layer in linear for shape in (tuple(layer.weight.shape), tuple(layer.weight.shape)[::-1])}
    assert not {tensor.shape for tensor in seen if tensor.dtype == torch.bfloat16} & weights


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_blocks_chosen_by_name(tmp_path, name):
    build, loss = MODELS[name]
    patterns = {"gpt2": "transformer.h.*", "llama": "model.layers.*"}
    run = assert_trains_equal(training(build), forward_backward(loss), tmp_path, num_steps=3, modules=[patterns[name]])
    assert run.statistics[-1].kept_bytes["kept: module not chosen"] > 0
