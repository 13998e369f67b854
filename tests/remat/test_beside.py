"""Bytes of a step that are in no graph: buckets, parameters and losses elsewhere."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from breaking import DOORS, batch, make, through
from torch import nn

from penstock import probe, remat
from penstock.errors import BudgetNotKeptWarning


@pytest.fixture
def alone_in_a_group():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_buckets_of_ddp_count(alone_in_a_group, is_inside):
    x, static = batch(), {}
    for is_view in (True, False):
        model = make("plain", num_blocks=1)
        ddp = functools.partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=is_view)
        outer = compiled = remat.compile(model if is_inside else ddp(model), budget="64MiB")
        if is_inside:
            outer = ddp(compiled)
        for _ in range(2):
            outer(x).backward()
        static[is_view] = max(plan.problem.static_bytes for plan in compiled.plans)
    assert static[False] - static[True] == sum(parameter.nbytes for parameter in model.parameters())


@DOORS
def test_parameters_that_only_the_eager_rest_uses_count_also_in_a_trainers_method(door):
    class Trainer:
        def __init__(self, width):
            self.model, self.rest = make("plain", num_blocks=1), nn.Linear(64, width)

        @torch.compiler.disable
        def aside(self, x):
            return self.rest(x[:, :1]).square().mean()

        def loss(self, x):
            return self.model(x) + self.aside(x)

    for width, is_kept in ((64, True), (2**15, False)):  # 32 KiB with its gradient, and 16 MiB
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BudgetNotKeptWarning)
            step = through(door, Trainer(width).loss, "12MiB")
            for _ in range(4):
                step(batch(1)).backward()
        assert (not caught) == is_kept


@DOORS
def test_a_loss_outside_of_the_model_counts(door):
    x, labels = torch.randn(512, 64), torch.randint(0, 1000, (512,))
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    standing = sum(2 * parameter.nbytes for parameter in model.parameters()) + x.nbytes

    def peak_of(step):
        def whole():
            nn.functional.cross_entropy(step(x), labels).backward()

        for _ in range(5):
            whole()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return probe.peak_bytes(whole, device="cpu").activation_bytes + standing

    budget = int(0.95 * peak_of(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetNotKeptWarning)
        assert peak_of(through(door, model, budget)) <= 1.01 * budget
