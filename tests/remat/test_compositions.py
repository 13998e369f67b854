"""Plans together with what training code does around them: autocast, frozen and converted models, DDP, checkpoints."""

import copy

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from penstock import relational, remat
from penstock.testing import GPT


def make():
    torch.manual_seed(0)
    model = GPT(num_layers=2, width=64, num_heads=4, context=32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(256, (4, 32))
    return model, (tokens, tokens.roll(-1, 1))


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(ours, plain):
    for mine, expected in zip(ours, plain, strict=True):
        assert (mine is None) == (expected is None)
        assert mine is None or torch.equal(mine, expected)


def tight(step, batch, **options):
    """The step planned half-way between what it takes at least and at most."""
    problem = remat.optimize(step, batch, None, **options).plan.problem
    low = remat.smallest_budget_bytes(problem, method="recompute")
    high = remat.plan(problem, 2**62).keep_all_peak_bytes
    return remat.optimize(step, batch, (low + high) // 2, profile=problem, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    def step_of(model):
        def step(*batch):
            with torch.autocast("cpu", dtype=dtype):
                return model(*batch)

        return step

    plain, batch = make()
    model, _ = make()
    step = tight(step_of(model), batch)
    assert any("_to_copy" in operator.target for operator in step.plan.problem.operators)
    for _ in range(2):
        expected, loss = step_of(plain)(*batch), step(*batch)
        assert torch.equal(loss, expected)
        expected.backward()
        loss.backward()
    assert_equal(gradients_of(model), gradients_of(plain))


def test_gradient_scaling():
    plain, batch = make()
    model, _ = make()
    step = tight(model, batch)
    for each, run in ((plain, plain), (model, step)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(run(*batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_equal(model.parameters(), plain.parameters())


def test_ten_steps_of_adam():
    plain, batch = make()
    model, _ = make()
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3) for module in (plain, model)]
    step = tight(model, batch, optimizer=optimizers[1])
    for _ in range(10):
        losses = []
        for run, optimizer in zip((plain, step), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(run(*batch))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
    assert_equal(model.parameters(), plain.parameters())


def test_parameters_frozen_after_planning():
    plain, batch = make()
    model, _ = make()
    step = tight(model, batch)
    for each, run in ((plain, plain), (model, step)):
        run(*batch).backward()
        for parameter in each.blocks[0].parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        run(*batch).backward()
    assert_equal(gradients_of(model), gradients_of(plain))
    assert len(step.plans) == 2


def test_a_model_converted_after_planning_is_planned_again():
    model, batch = make()
    step = remat.optimize(model, batch, None)
    before = step.plan.peak_bytes
    model.double()
    plain, _ = make()
    plain.double()
    step(*batch).backward()
    plain(*batch).backward()
    assert_equal(gradients_of(model), gradients_of(plain))
    assert len(step.plans) == 2
    assert step.plan.peak_bytes > 1.5 * before


@pytest.fixture
def process_group(tmp_path):
    """One process that is a group by itself."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_data_parallel_sees_every_gradient(process_group):
    plain, batch = make()
    model, _ = make()
    wrapped = DistributedDataParallel(torch.compile(model, backend="penstock", dynamic=False, options={"budget": 1.0}))
    seen = []

    def count(_, bucket):
        seen.extend(bucket.parameters())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, count)
    wrapped(*batch).backward()
    plain(*batch).backward()
    assert_equal(gradients_of(model), gradients_of(plain))
    assert {id(parameter) for parameter in seen} == {id(parameter) for parameter in model.parameters()}


class Checkpointed(nn.Module):
    """Blocks under PyTorch's own checkpointing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def test_a_model_with_checkpoints_of_its_own():
    torch.manual_seed(0)
    plain = Checkpointed()
    torch.manual_seed(0)
    model = Checkpointed()
    batch = (torch.randn(64, 64),)
    step = tight(model, batch)
    plain(*batch).backward()
    step(*batch).backward()
    assert_equal(gradients_of(model), gradients_of(plain))


def test_results_that_nobody_takes_are_workspace():
    """Attention of RGAT is a result of the layer's operator, and dropped at once where it is not asked for."""
    torch.manual_seed(0)
    edges, types = torch.randint(20, (2, 500)), torch.randint(3, (500,))
    graph = relational.RelationalGraph(edges, types, num_nodes=20, num_edge_types=3)
    layer, x = relational.RGATConv(8, 8, num_relations=3), torch.randn(20, 8)
    step = remat.optimize(lambda x: layer(x, graph).square().mean(), [x], None, verify=True)
    step(x).backward()
    operators = [operator for operator in step.plan.problem.operators if "relational_layer" in operator.name]
    assert operators[0].workspace_bytes >= 500 * 4


NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch without weights": lambda: nn.BatchNorm2d(8, affine=False),
    "batch without statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "layer": lambda: nn.LayerNorm((8, 10, 10)),
}


@pytest.mark.parametrize("is_weight_float", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_half(dtype, is_weight_float):
    """Fake tensors have other dtypes than kernels give, with weights in float under autocast and with all in half."""
    torch.manual_seed(0)
    plain = nn.ModuleList(
        nn.Sequential(nn.Conv2d(3, 8, 3), make_norm(), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), make_norm())
        for make_norm in NORMS.values()
    )
    x = torch.randn(8, 3, 12, 12)
    if not is_weight_float:
        plain, x = plain.to(dtype), x.to(dtype)
    ours = copy.deepcopy(plain)

    def loss(models, x):
        with torch.autocast("cpu", dtype=dtype, enabled=is_weight_float):
            return sum(model(x).float().square().mean() for model in models)

    loss(plain, x).backward()
    remat.optimize(lambda x: loss(ours, x), [x], 0.95, verify=True)(x).backward()
    for norm, layer, planned in zip(NORMS, plain, ours, strict=True):
        for (name, left), right in zip(layer.named_parameters(), planned.parameters(), strict=True):
            assert torch.equal(left.grad, right.grad), (norm, name)
        assert all(torch.equal(*buffers) for buffers in zip(layer.buffers(), planned.buffers(), strict=True)), norm
