"""The GPT of demo, tests and benchmarks."""

import pytest
import torch

from penstock.testing import GPT, assert_gradients_equal


@pytest.mark.parametrize("length", [1, 8])
def test_the_gpt_learns_the_same_with_and_without_checkpoints(length):
    def make(checkpointed):
        torch.manual_seed(0)
        return GPT(num_layers=2, width=16, num_heads=2, context=8, vocabulary=11, checkpointed=checkpointed)

    plain, checkpointed = make(False), make(True)
    tokens, targets = torch.randint(0, 11, (2, 3, length))
    losses = [network(tokens, targets) for network in (plain, checkpointed)]
    assert losses[0].shape == ()
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert_gradients_equal(plain, checkpointed)
