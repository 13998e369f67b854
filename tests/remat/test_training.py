"""Steps planned for a budget train as plain PyTorch does, to the bit, within the bytes that were promised."""

import copy
import functools
import gc
import os
import threading

import pytest
import torch
from torch import nn

from penstock import probe, remat, units
from penstock.errors import BudgetError, BudgetNotKeptWarning, GraphBreakWarning, InternalError
from penstock.testing import GPT, assert_gradients_equal

MIB = 2**20


class ConvNet(nn.Module):
    """Batch norm, pooling and dropout."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *[
                layer
                for before, after in [(3, 16), (16, 16), (16, 32), (32, 32)]
                for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.Dropout(0.2))
            ]
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images, labels):
        features = nn.functional.max_pool2d(self.body(images), 2).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), labels)


class Dropouts(nn.Module):
    """Random masks between wide layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.dropout(nn.functional.gelu(layer(x)), 0.3)
        return x.square().mean()


class Unrolled(nn.Module):
    """An LSTM cell, step by step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(32, 64)

    def forward(self, x):
        hidden = cell = x.new_zeros(x.shape[1], 64)
        total = 0
        for step in x:
            hidden, cell = self.cell(step, (hidden, cell))
            total = total + hidden.square().mean()
        return total


def gpt():
    return GPT(num_layers=2, width=64, num_heads=4, context=64)


def tokens():
    return torch.randint(256, (8, 64)), torch.randint(256, (8, 64))


CASES = {
    "gpt": (gpt, tokens),
    "convnet": (ConvNet, lambda: (torch.randn(8, 3, 24, 24), torch.randint(10, (8,)))),
    "dropouts": (Dropouts, lambda: (torch.randn(256, 64),)),
    "lstm": (Unrolled, lambda: (torch.randn(5, 64, 32),)),
}


def make(name):
    torch.manual_seed(0)
    model, batch = CASES[name][0](), CASES[name][1]()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, batch


def run(step, model, num_steps=3):
    """Losses, gradients and buffers of a few steps with plain gradient descent."""
    losses = []
    for index in range(num_steps):
        torch.manual_seed(100 + index)
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss = step()
        loss.backward()
        losses.append(loss.detach().clone())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        after = torch.rand(1)
    return losses, [parameter.grad.clone() for parameter in model.parameters()], dict(model.state_dict()), after


def assert_same(left, right):
    for mine, expected in zip(left[0] + left[1], right[0] + right[1], strict=True):
        assert torch.equal(mine, expected)
    for name in left[2]:
        assert torch.equal(left[2][name], right[2][name]), name
    assert torch.equal(left[3], right[3]), "the generator is where it would have been"


def peak_of(step, model):
    def whole():
        for parameter in model.parameters():
            parameter.grad.zero_()
        step().backward()

    whole()
    gc.collect()
    return probe.peak_bytes(whole, device="cpu")


def smallest(problem, method):
    return remat.smallest_budget_bytes(problem, method=method)


@pytest.fixture(scope="module")
def problem_of(tmp_path_factory):
    """What a case's step is, captured once and measured once for all tests; with a disk, of which recomputation makes
    nothing.
    """
    disk = tmp_path_factory.mktemp("disk")
    return functools.cache(lambda name: remat.optimize(*make(name), None, disk=disk).plan.problem)


@pytest.mark.parametrize(("method", "shares"), [("recompute", (1.0, 0.5, 0.0)), ("hybrid", (0.5, 0.0))])
@pytest.mark.parametrize("name", CASES)
def test_trains_as_plain_within_every_budget(tmp_path, problem_of, name, method, shares):
    model, batch = make(name)
    expected = run(lambda: model(*batch), model)
    options = {"method": method, "disk": tmp_path if method == "hybrid" else None}
    problem = problem_of(name)
    keep_all = remat.plan(problem, 2**62).keep_all_peak_bytes
    low = smallest(problem, method)
    assert low < 0.8 * keep_all
    most = remat.plan(problem, keep_all + 1024, method=method)  # what is run for one method is the other's step too
    assert set(most.decisions) == {remat.Decision.KEEP}
    for share in shares:
        budget = int(low + share * (keep_all - low)) + 1024
        model, batch = make(name)
        step = remat.optimize(model, batch, budget, profile=problem, **options)
        assert step.plan.peak_bytes <= budget
        assert_same(expected, run(lambda: step(*batch), model))  # noqa: B023  # called at once
        report = peak_of(lambda: step(*batch), model)  # noqa: B023
        measured = report.activation_bytes
        predicted = step.plan.peak_bytes - step.plan.problem.static_bytes
        states = torch.get_rng_state().nbytes * sum(
            "dropout" in operator.target for operator in problem.operators
        )  # static
        edges = 3 * step.plan.problem.swap_page_bytes * len(step.plan.plan.gone_slots)  # the most they may take
        assert measured <= predicted + states + 4096
        assert measured >= 0.9 * predicted - edges


def test_a_budget_below_the_smallest_is_refused_before_training_with_what_holds_it_up():
    model, batch = make("gpt")
    before = [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(BudgetError, match=r"needs at least \d+ bytes .* the largest storages are"):
        remat.optimize(model, batch, "1MiB")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, parameter) for value, parameter in zip(before, model.parameters(), strict=True))


def activation_bytes(step):
    """The peak of what this thread takes: to the byte, whatever tiers of earlier tests give back meanwhile."""
    with probe.record_memory("cpu", this_thread_only=True) as recording:
        step()
    return recording.report.activation_bytes


@pytest.mark.parametrize("verify", [False, True])
def test_the_smallest_budget_holds_to_the_byte(verify, one_thread):
    model, batch = (
        nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]),
        torch.randn(256, 64),
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = lambda batch: model(batch).square().mean()  # noqa: E731
    low = smallest(remat.optimize(step, [batch], None).plan.problem, "recompute")
    planned = remat.optimize(step, [batch], low, verify=verify)
    planned(batch).backward()
    gc.collect()
    standing_bytes = batch.nbytes + sum(2 * parameter.nbytes for parameter in model.parameters())
    assert standing_bytes + activation_bytes(lambda: planned(batch).backward()) == low


def test_gradients_that_stand_and_get_nothing_count(one_thread):
    """As those of an encoder whose codes are quantized."""
    encoder, decoder = (
        nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]) for _ in "ab"
    )
    batch = torch.randn(256, 64)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    step = lambda batch: decoder(encoder(batch).round().detach()).square().mean()  # noqa: E731
    low = smallest(remat.optimize(step, [batch], None).plan.problem, "recompute")
    planned = remat.optimize(step, [batch], low)
    planned(batch).backward()
    gc.collect()
    standing_bytes = batch.nbytes + sum(2 * parameter.nbytes for parameter in parameters)
    assert standing_bytes + activation_bytes(lambda: planned(batch).backward()) == low


def test_a_group_norm_whose_input_needs_no_gradient():
    model, batch = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)), torch.randn(8, 4, 16)
    plain = copy.deepcopy(model)
    plain(batch).square().mean().backward()
    remat.optimize(lambda batch: model(batch).square().mean(), [batch], None)(batch).backward()
    assert all(
        torch.equal(mine.grad, expected.grad)
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_a_size_that_is_drawn_breaks_the_step_up():
    sizes = [1.0, 2.0]

    def step(batch):
        return model(batch).square().mean() * sizes[int(torch.empty(1).uniform_(0.0, 2.0).item())]

    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    torch.manual_seed(1)
    expected = [step(batch) for _ in range(4)]
    with pytest.warns(GraphBreakWarning):
        planned = remat.optimize(step, [batch], None)
    torch.manual_seed(1)
    assert [planned(batch) for _ in range(4)] == expected


def test_planning_does_not_train_batch_norm():
    model, batch = make("convnet")
    remat.optimize(model, batch, None)
    assert all(int(value) == 0 for name, value in model.state_dict().items() if "num_batches" in name)


def test_a_share_is_of_the_peak_without_a_plan():
    model, batch = make("gpt")
    step = remat.optimize(model, batch, 0.7)
    assert step.plan.peak_bytes <= 0.7 * step.plan.plan.keep_all_peak_bytes
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        remat.optimize(model, batch, 1.5)


def test_another_shape_is_planned_when_it_comes():
    model, batch = make("dropouts")
    step = remat.optimize(model, batch, 0.8)
    assert len(step.plans) == 1
    step(torch.randn(128, 64)).backward()
    assert len(step.plans) == 2
    assert step.plans[1].problem.storages[0].size_bytes < step.plans[0].problem.storages[0].size_bytes
    step(*batch).backward()
    assert len(step.plans) == 2


@pytest.mark.parametrize("method", ["recompute", "swap"])
def test_two_forwards_before_two_backwards_and_one_that_never_comes(tmp_path, problem_of, method):
    model, _ = make("dropouts")
    batches = [torch.randn(256, 64) for _ in range(3)]
    torch.manual_seed(7)
    expected = []
    losses = [model(batch) for batch in batches]
    for loss in losses[:2]:
        loss.backward()
        expected.append([parameter.grad.clone() for parameter in model.parameters()])
    model, _ = make("dropouts")
    problem = problem_of("dropouts")
    step = remat.optimize(
        model,
        batches[:1],
        smallest(problem, method) + 4096,
        method=method,
        disk=tmp_path if method == "swap" else None,
        profile=problem,
    )
    torch.manual_seed(7)
    with pytest.warns(
        BudgetNotKeptWarning, match="first step of its kind takes"
    ):  # three forwards hold three steps' activations
        losses = [step(batch) for batch in batches]
    for loss, gradients in zip(losses[:2], expected, strict=True):
        loss.backward()
        assert all(
            torch.equal(parameter.grad, gradient)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True)
        )
    del losses, loss
    gc.collect()


def test_retain_graph(tmp_path, problem_of):
    model, batch = make("gpt")
    problem = problem_of("gpt")
    step = remat.optimize(model, batch, smallest(problem, "swap") + 4096, method="swap", disk=tmp_path, profile=problem)
    assert step.plan.plan.gone_slots
    loss = step(*batch)
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(
        torch.equal(parameter.grad, gradient + gradient)
        for parameter, gradient in zip(model.parameters(), once, strict=True)
    )


def test_without_gradients_it_behaves_as_plain():
    model, batch = make("gpt")
    step = remat.optimize(model, batch, None)
    with torch.no_grad():
        assert torch.equal(step(*batch), model(*batch))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = remat.optimize(model, batch, "1MiB")
    assert torch.equal(frozen(*batch), model(*batch))
    with pytest.raises(ValueError, match="nothing is planned"):
        _ = frozen.plan


def test_a_module_whose_loss_is_outside():
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    batch = torch.randn(512, 64)
    model(batch).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    step = remat.optimize(model, [batch], 0.8)
    step(batch).square().mean().backward()
    assert all(
        torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected, strict=True)
    )


def test_as_a_backend_of_torch_compile():
    model, batch = make("gpt")
    expected = run(lambda: model(*batch), model)
    model, batch = make("gpt")
    compiled = torch.compile(model, backend="penstock", options={"budget": 0.7})
    assert_same(expected, run(lambda: compiled(*batch), model))
    with pytest.raises(Exception, match="options=.'budget': '6GiB'"):
        torch.compile(model, backend="penstock")(*batch)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"unknown options \['bugdet'\]"):
        torch.compile(model, backend="penstock", options={"budget": 0.7, "bugdet": 1})(*batch)


@pytest.mark.parametrize(
    ("make_optimizer", "per_element"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 4),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1), 8),
        (lambda parameters: torch.optim.RMSprop(parameters, lr=0.1), 4),
    ],
)
def test_the_optimizers_state_counts_before_its_first_step(problem_of, make_optimizer, per_element):
    model, batch = make("dropouts")
    plain = problem_of("dropouts").static_bytes
    optimizer = make_optimizer(model.parameters())
    with_optimizer = remat.optimize(model, batch, None, optimizer=optimizer).plan.problem.static_bytes
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert with_optimizer - plain == per_element * elements
    optimizer.step()
    assert remat.optimize(model, batch, None, optimizer=optimizer).plan.problem.static_bytes == with_optimizer


def test_reserve_and_gradients_count(problem_of):
    model, batch = make("dropouts")
    plain = problem_of("dropouts").static_bytes
    assert remat.optimize(model, batch, None, reserve="1MiB").plan.problem.static_bytes == plain + MIB
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert remat.optimize(model, batch, None, accumulates=False).plan.problem.static_bytes == plain - gradients


def test_explain_names_decisions_and_reasons(tmp_path):
    model, batch = make("gpt")
    planned = remat.optimize(model, batch, 0.5, disk=tmp_path).plan
    text = planned.explain(most=None)
    assert f"in a budget of {units.format_bytes(planned.budget_bytes)} (without a plan" in text
    assert "swapped: " in text
    assert "kept: " in text
    text = remat.optimize(model, batch, 0.6).plan.explain()
    assert "recomputed: " in text
    assert "in a budget of" not in remat.optimize(model, batch, None).plan.explain()
    assert "smaller ones" in text


def test_the_largest_batch_for_a_budget():
    def make_of(batch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        return model, [torch.randn(batch, 32)]

    peaks = {}
    for batch in (64, 65):
        step, inputs = make_of(batch)
        peaks[batch] = remat.smallest_budget_bytes(remat.optimize(step, inputs, None).plan.problem, method="recompute")
    assert peaks[64] < peaks[65]
    assert remat.max_batch(make_of, peaks[64], method="recompute") == 64
    assert remat.max_batch(make_of, 1000) == 0


def test_a_profile_is_used_instead_of_measuring(monkeypatch, tmp_path):
    model, batch = make("dropouts")
    problem = remat.optimize(model, batch, None).plan.problem
    problem.save(tmp_path / "step.json")
    with monkeypatch.context() as patched:
        measure = "penstock.remat._profile.Costs.measure"
        patched.setattr(measure, lambda *_: pytest.fail("it was to be taken from the profile"))
        again = remat.optimize(model, batch, 0.8, profile=remat.RematProblem.load(tmp_path / "step.json"))
    assert again.plan.problem == problem
    gpt, batch = make("gpt")
    assert remat.optimize(gpt, batch, None, profile=problem).plan.problem != problem


@pytest.mark.parametrize("method", ["recompute", "hybrid"])
@pytest.mark.parametrize("name", CASES)
def test_after_every_operator_the_planned_bytes_are_held(tmp_path, problem_of, name, method):
    model, batch = make(name)
    options = {"method": method, "disk": tmp_path if method == "hybrid" else None}
    problem = problem_of(name)
    low, high = smallest(problem, method), remat.plan(problem, 2**62).keep_all_peak_bytes
    for budget in ((low + high) // 2, low + 4096):
        step = remat.optimize(model, batch, budget, profile=problem, verify=True, **options)
        for has_gradients in (True, False):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if has_gradients else None
            step(*batch).backward()


def test_debug_mode_finds_a_storage_too_many(monkeypatch, problem_of):
    model, batch = make("gpt")
    problem = problem_of("gpt")
    step = remat.optimize(model, batch, smallest(problem, "recompute") + 4096, profile=problem, verify=True)
    step(*batch).backward()
    lives = remat._debug.live_bytes
    monkeypatch.setattr(
        "penstock.remat._debug.live_bytes", lambda *plan: [size_bytes - 4096 for size_bytes in lives(*plan)]
    )
    torch._dynamo.reset()
    step = remat.optimize(model, batch, smallest(problem, "recompute") + 4096, profile=problem, verify=True)
    with pytest.raises(InternalError, match="bytes are held, but"):
        step(*batch).backward()


def test_a_step_that_is_only_planned_opens_nothing(tmp_path, problem_of):
    model, batch = make("dropouts")
    problem = problem_of("dropouts")
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        step = remat.optimize(
            model, batch, smallest(problem, "swap") + 4096, method="swap", disk=tmp_path, profile=problem
        )
        assert step.plan.plan.gone_slots
    assert threading.active_count() <= before[0]  # threads of earlier tests may have ended meanwhile
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_each_step_swaps_to_its_own_disk(tmp_path, problem_of):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        model, batch = make("dropouts")
        problem = problem_of("dropouts")
        low = smallest(problem, "swap") + 4096
        step = remat.optimize(model, batch, low, method="swap", disk=tmp_path / name, profile=problem)
        step(*batch).backward()
        (tier,) = step._session.emitter.tiers.waterfall.tiers
        assert tier._files[0].spill.directory == tmp_path / name
        assert step._session.emitter.tiers.waterfall.statistics().parked_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_dropout_of_half_precision_rounds_as_eager_pytorch_does(dtype, p):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, 64), nn.Dropout(p), nn.Linear(64, 8)]
    plain = nn.Sequential(*layers)
    ours, x = copy.deepcopy(plain), torch.randn(1024, 64)

    def loss(model):
        with torch.autocast("cpu", dtype=dtype):
            return model(x).float().square().mean()

    step = remat.optimize(lambda: loss(ours), [], 0.8)
    losses = []
    for run in (lambda: loss(plain), step):
        torch.manual_seed(1)
        losses.append(run())
        losses[-1].backward()
    assert torch.equal(*losses)
    assert_gradients_equal(plain, ours)


class Scaled(torch.autograd.Function):
    """A function with a backward of its own, which reads what it saved."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_functions_with_a_backward_of_their_own(share):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
    scale = nn.Parameter(torch.rand(32))
    leaves = [*layers.parameters(), scale]

    def step(x):
        for layer in layers:
            x = Scaled.apply(torch.tanh(layer(x)), scale)
        return x.square().mean()

    x = torch.randn(64, 32)
    step(x).backward()
    expected = [leaf.grad.clone() for leaf in leaves]
    problem = remat.optimize(step, (x,), None).plan.problem
    low = smallest(problem, "recompute")
    budget = int(low + share * (remat.plan(problem, 2**62).keep_all_peak_bytes - low)) + 1024
    planned = remat.optimize(step, (x,), budget, method="recompute", verify=True)
    for leaf in leaves:
        leaf.grad.zero_()
    planned(x).backward()
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_has_eager_pytorchs_bits_for_every_share_and_layout(dtype):
    x = torch.randn(4, 64, 33, dtype=dtype)
    percents = range(4, 100, 5)
    leaves = [[torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((64,), (64, 32))] for _ in percents]

    def run():
        losses = []
        for percent, (places, weight) in zip(percents, leaves, strict=True):
            dropped = nn.functional.dropout(x.mT + places, percent / 100)  # its gradient comes in another layout
            losses.append((dropped @ weight).float().square().mean())
        return torch.stack(losses)

    step = remat.optimize(run, [], None)
    results = []
    for function in (run, step):
        torch.manual_seed(5)
        for pair in leaves:
            pair[0].grad = pair[1].grad = None
        function().sum().backward()
        with torch.no_grad():
            losses = function()
        results.append([(*(leaf.grad for leaf in pair), loss) for pair, loss in zip(leaves, losses, strict=True)])
    different = [percent for percent, *both in zip(percents, *results, strict=True) if not all(map(torch.equal, *both))]
    assert not different
