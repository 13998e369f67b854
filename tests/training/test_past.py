"""Access past the dispatcher: torch.save, NumPy and others that read memory by address."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import save_file
from training_loops import OPTIMIZERS, Transformer, batches, beside, run_plain, simple_step

from penstock import probe


@pytest.mark.parametrize("how", ["whole", "in parts", "into memory"])
def test_torch_save_finds_what_is_elsewhere(make_training, tmp_path, how):
    torch.manual_seed(0)
    model = Transformer()
    twin = copy.deepcopy(model)
    plain = OPTIMIZERS["adamw"](twin)
    expected = run_plain(twin, plain, simple_step, batches())
    optimizer = OPTIMIZERS["adamw"](model)
    budget = beside(model, 6)
    ours = make_training(model, optimizer, budget)
    saved, losses = io.BytesIO() if how == "into memory" else tmp_path / "saved.pt", []
    for number, tokens in enumerate(batches()):
        if number == 2:
            with ours.whole() if how == "whole" else contextlib.nullcontext():
                peak = probe.peak_bytes(lambda: torch.save((model.state_dict(), optimizer.state_dict()), saved))
            if how == "in parts":
                assert peak.peak_bytes <= budget
        with ours:
            losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected
    if how == "into memory":
        saved.seek(0)
    parameters, states = torch.load(saved, mmap=how == "in parts")
    with ours.whole() if how == "whole" else contextlib.nullcontext():
        model.load_state_dict(parameters)
        optimizer.load_state_dict(states)
    del parameters, states
    losses = losses[:2]
    for tokens in batches()[2:]:
        with ours:
            losses.append(simple_step(model, optimizer, tokens))
    assert losses == expected


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of the old format
def test_what_takes_all_memory_at_once_is_refused(make_training, tmp_path):
    model = Transformer()
    ours = make_training(model, OPTIMIZERS["adamw"](model), beside(model, 6))
    for refused in (
        lambda: pickle.dumps(model.head.weight),
        lambda: torch.save(model.head.weight, tmp_path / "old.pt", _use_new_zipfile_serialization=False),
        lambda: save_file({"weight": model.head.weight.detach()}, tmp_path / "model.safetensors"),
    ):
        with pytest.raises(ValueError, match=r"with training\.whole\(\)"):
            refused()
        with ours.whole():
            refused()


def test_a_part_is_whole_and_the_rest_stays_away(make_training):
    model = Transformer()
    ours = make_training(model, OPTIMIZERS["adamw"](model), "64MiB")
    assert ours.statistics().held_bytes == 0
    with ours.whole(model.blocks[1]):
        held = ours.statistics().held_bytes
        assert model.blocks[1].layers[0].weight.untyped_storage().nbytes() > 0
        assert model.blocks[2].layers[0].weight.untyped_storage().nbytes() == 0
    large = [parameter.nbytes for parameter in model.blocks[1].parameters() if parameter.nbytes >= 16 * 1024]
    assert held == sum(large)


def test_what_numpy_shares_stays_shared(make_training):
    model = Transformer(num_blocks=1)
    ours = make_training(model, OPTIMIZERS["adamw"](model), "1GiB")
    array = model.blocks[0].layers[0].weight.detach().numpy()
    for tokens in batches(2):
        with ours:
            simple_step(model, ours.optimizer, tokens)
    ours.park()
    with torch.no_grad():
        assert array.sum() == pytest.approx(model.blocks[0].layers[0].weight.sum().item(), rel=1e-3)
    assert model.blocks[0].layers[0].weight.data_ptr() == array.ctypes.data
