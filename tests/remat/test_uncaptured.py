"""What PyTorch cannot trace runs eagerly inside a compiled model, with the same results, or is refused by name."""

import copy
import warnings

import pytest
import torch
from breaking import DOORS, through
from torch import nn

from penstock import remat
from penstock.errors import BudgetNotKeptWarning, CaptureError

BATCH = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(24, 24)


class Renormed(Layer):
    """Its weight gets new data in every forward."""

    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data / self.linear.weight.data.norm(dim=1, keepdim=True)
        return self.linear(x)


class Halved(Layer):
    """Its weight gets new data between two uses."""

    def forward(self, x):
        y = self.linear(x)
        self.linear.weight.data = 0.5 * self.linear.weight.data
        return y + self.linear(x)


class Jagged(Layer):
    """It makes a jagged batch of rows."""

    def forward(self, x):
        rows = torch.nested.as_nested_tensor(list(x.split([3, 5, 8])), layout=torch.jagged)
        return self.linear(rows).values()


class WithGradient(Layer):
    """It uses a gradient of its own output."""

    def forward(self, x):
        return self.linear(x) + torch.func.grad(lambda x: self.linear(x).tanh().sum())(x)


class WithTangent(Layer):
    def forward(self, x):
        value, tangent = torch.func.jvp(lambda x: self.linear(x).tanh(), (x,), (torch.ones_like(x),))
        return value + tangent


class ByRow(Layer):
    def forward(self, x):
        return torch.func.vmap(lambda row: self.linear(row).tanh())(x)


class Scripted(Layer):
    """A part of it is scripted."""

    def __init__(self):
        super().__init__()
        self.linear = torch.jit.script(self.linear)

    def forward(self, x):
        return self.linear(x).tanh()


def trained(model, step):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(3):
        loss = step(BATCH + number).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


@DOORS
@pytest.mark.parametrize("kind", [Renormed, Halved, Jagged, WithGradient, WithTangent, ByRow, Scripted])
def test_what_cannot_be_traced_trains_as_in_pytorch(kind, door):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(model := kind(), model)
        model = kind()
        step = through(door, model, "16MiB")
        if door == "string" and kind is WithGradient:
            with pytest.raises(RuntimeError, match="saved tensor hooks") as refused:
                step(BATCH)
            assert "call it once more" in refused.value.__notes__[0]
        got = trained(model, step)
    assert all(map(torch.equal, got, expected))


def test_a_scripted_model_and_jagged_arguments_train_as_in_pytorch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(24, 24), nn.GELU()))
        before = copy.deepcopy(scripted.state_dict())
        expected = trained(scripted, scripted)
        scripted.load_state_dict(before)
        assert all(map(torch.equal, trained(scripted, remat.compile(scripted, budget="16MiB")), expected))

        def of_rows(call):
            def step(x):
                rows = list(x.split([4, 2, 10]))
                return call(torch.nested.as_nested_tensor(rows, layout=torch.jagged)).values()

            return step

        model = Layer().linear
        expected = trained(model, of_rows(model))
        model = Layer().linear
        assert all(map(torch.equal, trained(model, of_rows(remat.compile(model, budget="16MiB"))), expected))


def test_a_step_that_has_to_be_one_graph_is_refused_by_name():
    model = Renormed()
    with pytest.raises(CaptureError, match=r"could not be captured by PyTorch .* Train it with"):
        remat.optimize(lambda x: model(x).sum(), [BATCH], "16MiB", fullgraph=True)


@pytest.mark.parametrize("door", ["own", "string", "optimize"])
def test_hooks_that_change_what_is_saved_are_refused(door):
    """A plan saves other tensors than the model alone, so halves of them would round other values."""
    model = nn.Sequential(Layer().linear, nn.Tanh())
    step = {
        "own": lambda: remat.compile(model, budget="16MiB"),
        "string": lambda: torch.compile(model, backend="penstock", options={"budget": "16MiB"}, dynamic=False),
        "optimize": lambda: remat.optimize(model, [BATCH], "16MiB"),
    }[door]()
    halves = torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.dtype, x.bfloat16()), lambda pair: pair[1].to(pair[0])
    )
    with halves, pytest.raises(ValueError, match=r"is open around a planned step"):
        step(BATCH)
    with halves, torch.no_grad():
        assert torch.equal(step(BATCH), model(BATCH))
    assert torch._dynamo.config.automatic_dynamic_shapes  # torch.compile has taken back what it set
    with torch.autograd.graph.save_on_cpu():
        step(BATCH).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(BATCH).square().mean().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), expected, strict=True))


@DOORS
def test_a_compiled_model_is_called_inside_of_transforms(door):
    """There PyTorch refuses hooks, so nothing is counted by them, and that is said."""
    model = nn.Sequential(Layer().linear, nn.Tanh(), nn.Linear(24, 1))
    step = through(door, model, "16MiB")

    def slopes(net):
        return torch.func.vmap(torch.func.grad(lambda row: net(row[None])[0, 0]))(BATCH)

    with pytest.warns(BudgetNotKeptWarning, match="which allows no hooks on saved tensors"):
        got = slopes(step)
    assert torch.equal(got, slopes(model))
