"""Which saved tensors may be parked at all."""

import pytest
import torch

from penstock.offload._policy import Rules, SavedTensor


def tensor(module="blocks.3.mlp", size_bytes=2**20, **fields):
    fields = {"shape": (4, 4), "dtype": torch.float32, "is_checkpoint_input": False} | fields
    return SavedTensor(module=module, size_bytes=size_bytes, **fields)


@pytest.mark.parametrize(("size_bytes", "reason"), [(2**20, ""), (2**20 - 1, "kept: small")])
def test_small_tensors_stay(size_bytes, reason):
    assert Rules().keep_reason(tensor(size_bytes=size_bytes)) == reason


def test_zero_parks_everything():
    assert Rules(min_bytes=0).keep_reason(tensor(size_bytes=1)) == ""


@pytest.mark.parametrize(
    ("patterns", "module", "is_chosen"),
    [
        (["blocks.3"], "blocks.3", True),
        (["blocks.3"], "blocks.3.mlp.up", True),
        (["blocks.3"], "blocks.30", False),
        (["blocks.*"], "blocks.30.mlp", True),
        (["blocks.*"], "blocks", False),
        (["*.mlp"], "blocks.3.mlp.up", True),
        (["*.mlp"], "blocks.3.attention", False),
        (["blocks.[0-2]"], "blocks.2.norm", True),
        (["blocks.[0-2]"], "blocks.3.norm", False),
        (["mlp"], "blocks.3.mlp", False),
        (["head", "blocks.3"], "blocks.3", True),
        (["Blocks.3"], "blocks.3", False),
        (["*"], "", True),
        ([""], "", True),
        ([""], "blocks", False),
        ([], "blocks", False),
    ],
)
def test_a_pattern_covers_what_is_inside(patterns, module, is_chosen):
    """The same patterns choose modules to park from and modules to leave alone."""
    chosen = Rules(modules=patterns).keep_reason(tensor(module))
    kept = Rules(keep_last=patterns).keep_reason(tensor(module))
    assert chosen == ("" if is_chosen else "kept: module not chosen")
    assert kept == ("kept: last modules" if is_chosen else "")


def test_all_modules_by_default():
    assert Rules().keep_reason(tensor("anything.at.all")) == ""


def test_last_modules_stay_though_they_are_chosen():
    rules = Rules(modules=["blocks.*"], keep_last=["blocks.7"])
    assert rules.keep_reason(tensor("blocks.7.mlp")) == "kept: last modules"
    assert rules.keep_reason(tensor("blocks.6.mlp")) == ""


@pytest.mark.parametrize(("is_input", "reason"), [(True, ""), (False, "kept: not a checkpoint's input")])
def test_only_the_inputs_of_checkpoints(is_input, reason):
    rules = Rules(checkpoint_inputs_only=True)
    assert rules.keep_reason(tensor(is_checkpoint_input=is_input)) == reason


@pytest.mark.parametrize(("answer", "reason"), [(True, ""), (False, "kept: policy")])
def test_the_policy_is_asked_last(answer, reason):
    asked = []
    rules = Rules(policy=lambda saved: asked.append(saved) or answer, keep_last=["head"])
    assert rules.keep_reason(tensor()) == reason
    assert asked == [tensor()]
    assert rules.keep_reason(tensor(size_bytes=1)) == "kept: small"
    assert rules.keep_reason(tensor("head")) == "kept: last modules"
    assert asked == [tensor()]


def test_a_policy_sees_shape_and_dtype():
    rules = Rules(policy=lambda saved: saved.dtype is torch.float32 and saved.shape[0] == 4)
    assert rules.keep_reason(tensor()) == ""
    assert rules.keep_reason(tensor(dtype=torch.bfloat16)) == "kept: policy"
    assert rules.keep_reason(tensor(shape=(5, 4))) == "kept: policy"
