"""Steps that are dropped, closed or refused hold nothing, although PyTorch keeps backends."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from penstock import remat
from penstock.errors import BudgetError
from penstock.tiers import Budget


def mlp():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())])


def train_and_drop(account):
    """What may be alive of a model and an optimizer for which a step was planned."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = remat.optimize(lambda x: model(x).square().mean(), [torch.randn(8, 32)], account, optimizer=optimizer)
    step(torch.randn(8, 32)).backward()
    assert account.held_bytes("device") > 0
    return [weakref.ref(target) for target in (model, optimizer)]


def test_a_step_that_is_dropped_gives_back_its_share_and_frees_its_model():
    account = Budget(device="64MiB")
    alive = train_and_drop(account)
    for _ in range(3):  # what the first finds holds more, by finalisers
        gc.collect()
    assert account.held_bytes("device") == 0
    assert [reference() for reference in alive] == [None, None]


def test_a_shape_that_is_refused_is_planned_again_when_it_comes_again():
    model, account = mlp(), Budget(device="64MiB")
    account.charge("device", 2**26 - 2**20)
    step = remat.optimize(lambda x: model(x).square().mean(), [torch.randn(8, 32)], account)
    for _ in range(2):
        with pytest.raises(BudgetError, match="cannot be met"):
            step(torch.randn(8192, 32))
    step(torch.randn(8, 32)).backward()
    account.credit("device", 2**26 - 2**20)
    step(torch.randn(8192, 32)).backward()
    assert len(step.plans) == 2
    step.close()


def test_shapes_of_a_compiled_model_share_their_place_in_an_account():
    model, account = mlp(), Budget(device="64MiB")
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"budget": account, "optimizer": optimizer}
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="penstock", dynamic=False, options=options)
    held = []
    for rows in (8, 16):
        compiled(torch.randn(rows, 32)).backward()
        held.append(account.held_bytes("device"))
    more = held[1] - held[0]
    assert 0 < more < remat.optimizer_state_bytes(optimizer)
    torch.compiler.reset()
    del compiled
    gc.collect()
    assert account.held_bytes("device") == 0


def test_a_backend_that_is_closed_gives_back_its_share_and_says_so():
    model, account = mlp(), Budget(device="64MiB")
    backend = remat.Backend(budget=account)
    compiled = torch.compile(lambda x: model(x).square().mean(), backend=backend, dynamic=False)
    compiled(torch.randn(8, 32)).backward()
    assert account.held_bytes("device") > 0
    backend.close()
    assert account.held_bytes("device") == 0
    with pytest.raises(Exception, match="this backend is closed"):
        compiled(torch.randn(16, 32))
    with pytest.raises(ValueError, match="was closed"):
        compiled(torch.randn(8, 32))
    assert torch._dynamo.config.automatic_dynamic_shapes  # what dynamic=False had changed for the call
    with pytest.raises(ValueError, match=r"'budget' is missing \(got only"):
        remat.Backend(disk="/nvme")


LOGGER = logging.getLogger("logs")


class Logs(nn.Module):
    """Says something in its forward, another thing while it is evaluated."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            LOGGER.info("trained")
        else:
            LOGGER.info("evaluated")
        return self.layer(x).square().mean()


def test_a_step_that_logs_is_traced_again_when_a_mode_changes():
    model, x = Logs(), torch.randn(4, 8)
    step = remat.optimize(model, [x], None)
    step(x).backward()
    model.eval()
    step(x).backward()
    assert len(step.plans) == 2
    step.close()
