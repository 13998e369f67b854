"""Models as they come, through both doors: plain results to the bit, and a budget that is kept or loudly not."""

import copy
import functools
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import probe, remat
from penstock.errors import BudgetError, BudgetNotKeptWarning, CaptureError, GraphBreakWarning, PenstockWarning

MIB = 2**20


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    """Blocks in a loop that Dynamo takes up, or gives up, or leaves."""

    def __init__(self, kind="plain", width=64, num_blocks=4):
        super().__init__()
        self.kind, self.lock = kind, threading.Lock()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1)
        if kind == "disabled":
            self.blocks[1].forward = torch.compiler.disable(self.blocks[1].forward)
        if kind == "lstm":
            self.rnn = nn.LSTM(width, width, batch_first=True)
        if kind == "gru":
            self.rnn = nn.GRU(width, width // 2, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)

    def forward(self, x):
        if self.kind == "top":
            print(end="")
        if self.kind in ("lstm", "gru"):
            x, _ = self.rnn(x)
        if self.kind == "lock":
            with self.lock:
                for block in self.blocks:
                    x = block(x)
            return self.loss(x)
        for block in self.blocks:
            x = block(x)
            if self.kind == "print":
                print(end="")
            if self.kind == "exit" and x.abs().mean() < 1e-6:
                break
        return self.loss(x)

    def loss(self, x):
        return self.head(x).square().mean()


def make(kind, **options):
    torch.manual_seed(0)
    model = Net(kind, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def batch(rows=32, width=64, length=32):
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(rows))


def train(step, model, batches):
    """Per step the loss, the gradients, and the true peak: what stood before it and what it took."""
    seen = []
    for number, x in enumerate(batches):
        for parameter in model.parameters():
            parameter.grad.zero_()
        torch.manual_seed(number)
        gc.collect()

        def whole():
            loss = step(x)  # noqa: B023  # called at once
            loss.backward()
            return loss.detach()

        report = probe.peak_bytes(whole, device="cpu")
        standing = sum(2 * one.nbytes for one in model.parameters()) + x.nbytes
        gradients = [one.grad.clone() for one in model.parameters()]
        seen.append((report.result, gradients, report.activation_bytes + standing))
    return seen


def assert_same(left, right):
    for one, two in zip(left, right, strict=True):
        assert torch.equal(one[0], two[0])
        assert all(map(torch.equal, one[1], two[1]))


def through(door, model, budget, **options):
    if door == "own":
        return remat.compile(model, budget=budget)
    return torch.compile(model, backend="penstock", options={"budget": budget}, **options)


DOORS = pytest.mark.parametrize("door", ["own", "string"])


@DOORS
@pytest.mark.parametrize("kind", ["print", "lock", "exit", "top", "lstm", "disabled"])
def test_what_dynamo_breaks_up_shares_one_budget(kind, door):
    batches = [batch(128, length=8) if kind == "lstm" else batch()] * 4  # short sequences, which are captured unrolled
    options = {} if kind == "disabled" else {"num_blocks": 3}  # else the eager block is too large a part
    expected = train(model := make(kind, **options), model, batches)
    budget = int(0.7 * max(peak for *_, peak in expected))
    model = make(kind, **options)
    step = through(door, model, budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BudgetNotKeptWarning)
        got = train(step, model, batches)
    assert_same(expected, got)
    assert all(peak <= 1.01 * budget for *_, peak in got), [peak / budget for *_, peak in got]
    if kind != "disabled":  # whose memory cannot be measured while all steps are
        assert not caught


@pytest.mark.parametrize(
    ("sizes", "options"), [([32, 24, 16, 32, 1, 7, 24], {}), (range(8, 28, 2), {"dynamic": False})]
)
def test_every_shape_of_a_compiled_model_is_planned(sizes, options):
    batches = [batch(rows) for rows in sizes]
    expected = train(model := make("plain", num_blocks=3), model, batches)
    budget = int(0.75 * max(peak for *_, peak in expected))
    model = make("plain", num_blocks=3)
    got = train(through("string", model, budget, **options), model, batches)
    assert_same(expected, got)
    assert all(peak <= 1.01 * budget for *_, peak in got), [peak / budget for *_, peak in got]


def test_shapes_are_listed():
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    for rows in (32, 24, 32):
        step(batch(rows)).backward()
    assert len(step.plans) == 2
    assert step.explain().count("peak ") == 2
    assert "32x32x64" in step.explain()
    assert "24x32x64" in step.explain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(batch(24)).backward()
    assert len(step.plans) == 3
    assert "24x32x64 float32 under autocast to bfloat16" in step.explain()


def test_a_compiled_module_is_the_module_to_whoever_asks():
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    assert step.head is model.head
    assert [id(one) for one in step.parameters()] == [id(one) for one in model.parameters()]
    assert set(step.state_dict()) == {f"_orig_mod.{name}" for name in model.state_dict()}
    step.eval()
    assert not model.training
    with torch.no_grad():
        assert torch.equal(step(batch()), model(batch()))


def test_a_later_shape_is_planned_from_the_profile_of_the_first(monkeypatch):
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    step(batch(32)).backward()
    step.explain()
    monkeypatch.setattr("penstock.remat._profile._median_s", lambda *_: pytest.fail("times were to be scaled"))
    step(batch(16)).backward()
    large, small = (one.problem for one in step.plans)
    assert small.step_s < large.step_s
    for one, two in zip(large.operators, small.operators, strict=True):
        assert one.target == two.target


def test_times_that_were_scaled_are_corrected_by_a_step():
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    for rows in (32, 16, 16):
        step(batch(rows)).backward()
    session = step._step.door.session
    (scaled,) = [one for piece in session.pieces for one in piece._variants.values() if one.num_calls == 2]
    assert not scaled.is_scaled
    assert scaled.problem.operators[0].workspace_bytes == step.plans[-1].problem.operators[0].workspace_bytes
    assert step.plans[-1].problem.step_s == pytest.approx(scaled.problem.step_s)


def test_a_newer_pytorch_is_warned_of_once_and_named_where_capture_fails(monkeypatch):
    from penstock.remat import _aot, _dynamo

    monkeypatch.setattr(torch, "__version__", "2.16.0")
    _dynamo.warn_if_untested.cache_clear()
    model = make("plain", num_blocks=1)
    with pytest.warns(PenstockWarning, match="and this is 2.16.0") as caught:
        for _ in range(2):
            remat.compile(model, budget="64MiB")(batch(2)).backward()
    assert len(caught) == 1

    def moved(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr(_aot, "compiled", moved)
    with pytest.raises(CaptureError, match=r"by PyTorch 2.16.0, which is newer .* no such thing"):
        remat.compile(model, budget="64MiB")(batch(3))


def test_variants_are_bounded(monkeypatch):
    monkeypatch.setattr("penstock.remat._piece._MAX_VARIANTS", 2)
    model = make("plain", num_blocks=1)
    step = remat.compile(model, budget="64MiB")
    for rows in (2, 3, 4, 5, 2):
        step(batch(rows)).backward()
    assert [len(piece._variants) for piece in step._step.door.session.pieces] == [1, 2]


@pytest.mark.parametrize("kind", ["print", "disabled"])
def test_what_cannot_be_kept_is_said_once_or_raised(kind):
    x = batch()
    model = make(kind, num_blocks=8)  # whose inputs alone take 2 MiB between them

    def run(step):
        for _ in range(3):
            step(x).backward()

    with pytest.warns(BudgetNotKeptWarning) as caught:
        run(remat.compile(model, budget="4700KiB"))
    said = [str(one.message) for one in caught]
    assert len(said) == 2
    assert "the first step of its kind takes" in said[0]
    assert "Give budget=" in said[1]
    assert {one.filename for one in caught} == {__file__}
    with pytest.raises(BudgetError, match="the first step of its kind takes"):
        run(remat.compile(model, budget="4700KiB", strict=True))


def test_a_first_step_that_does_not_fit_is_told_from_later_ones_that_do():
    x = batch(256)
    plain = train(model := make("print"), model, [x])[0][2]
    planned = remat.compile(make("print"), budget=2 * plain)
    for _ in range(2):
        planned(x).backward()
    (made,) = planned.plans
    lowest = remat.pareto(made.problem, [2**10])  # nothing fits
    assert lowest == [None]
    with pytest.raises(BudgetError) as refused:
        remat.plan(made.problem, 2**10)
    budget = int(str(refused.value).split("Give budget=")[1].split()[0])
    with pytest.warns(BudgetNotKeptWarning) as caught:
        seen = train(step := remat.compile(model := make("print"), budget=budget), model, [x] * 4)
    (one,) = caught
    assert "the first step of its kind takes" in str(one.message)
    assert seen[0][2] > budget
    assert max(peak for *_, peak in seen[1:]) <= 1.01 * budget
    assert "graphs" in step.explain()


def test_a_graph_that_does_not_fit_alone_is_refused_before_it_runs():
    model = make("plain", num_blocks=1)
    with pytest.raises(BudgetError, match="cannot be met: this step needs at least"):
        remat.compile(model, budget="1MiB")(batch())
    with pytest.raises(ValueError, match="'budget' is missing: penstock"):
        remat.compile(model)
    with pytest.raises(ValueError, match="unknown options"):
        remat.compile(model, budget="1MiB", bugdet=3)
    with pytest.raises(ValueError, match="`method` must be 'hybrid', 'recompute' or 'swap', got"):
        remat.compile(model, budget="1MiB", method="recomp")


def test_two_forwards_at_once_are_planned_together_from_then_on():
    model, x = make("plain"), batch()
    for _ in range(2):
        (model(x) + model(x + 1)).backward()
    expected = [one.grad.clone() for one in model.parameters()]
    model = make("plain")
    step = remat.compile(model, budget=0.6)
    for _ in range(2):
        (step(x) + step(x + 1)).backward()
    assert all(torch.equal(one.grad, two) for one, two in zip(model.parameters(), expected, strict=True))
    assert len(step.plans[-1].problem.operators) > 1.9 * len(step.plans[0].problem.operators) or len(step.plans) == 1


def test_gradients_of_any_layout_are_taken_as_eager_pytorch_takes_them():
    torch.manual_seed(0)
    plain, ours = (nn.Conv2d(16, 5, 1) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 24, 24, 16).permute(0, 3, 1, 2)
    gradient = torch.randn(2, 5, 24, 24)
    plain(x).backward(gradient)
    remat.optimize(ours, [x], None)(x).backward(gradient)
    assert torch.equal(plain.weight.grad, ours.weight.grad)
    assert torch.equal(plain.bias.grad, ours.bias.grad)


class Asks(nn.Module):
    """Takes another path when it is compiled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return (y * 3 if torch.compiler.is_compiling() else y * 2).sum()


def test_a_model_that_asks_whether_it_is_compiled_is_told_no():
    model, x = Asks(), torch.randn(4, 8)
    assert torch.equal(remat.compile(model, budget="1MiB")(x), model(x))
    assert torch.equal(remat.optimize(model, [x], None)(x), model(x))
    torch._dynamo.reset()
    assert not torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_other_backends_see_none_of_our_settings():
    from torch._dynamo import config

    names = (
        "allow_rnn",
        "recompile_limit",
        "suppress_errors",
        "enable_dynamo_decompositions",
        "use_numpy_random_stream",
    )
    before = {name: getattr(config, name) for name in names}
    seen = []

    def other(module, _):
        seen.append({name: getattr(config, name) for name in names})
        return module.forward

    model = make("plain", num_blocks=1)
    step = through("string", model, "64MiB")
    step(batch()).backward()
    torch.compile(model.head, backend=other)(batch())
    assert seen == [before]
    entered = []

    class Own:
        def __init__(self, function):
            self.function = function

        def __call__(self, *arguments):
            return self.function(*arguments)

    mine = Own(lambda module, _: module.forward)
    mine.backend_ctx_ctor = lambda: entered.append(1)
    torch.compile(nn.Linear(4, 4), backend=mine)(torch.randn(2, 4))
    assert not entered  # PyTorch itself does not look at it there


def test_a_step_that_depends_on_numbers_is_planned_in_pieces():
    model, x = make("plain"), batch()

    def step(x):
        y = model.blocks[0](x)
        if y.mean() > 1e3:
            y = y * 2
        return model.loss(model.blocks[1](y))

    step(x).backward()
    expected = [one.grad.clone() for one in model.parameters()]
    model.zero_grad(set_to_none=False)
    with pytest.warns(GraphBreakWarning, match=r"the step is not one graph \(.*test_doors.py:\d+"):
        planned = remat.optimize(step, [x], "64MiB")
    with pytest.raises(ValueError, match="planned after its first run"):
        _ = planned.plan
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        planned(x).backward()
        assert all(torch.equal(one.grad, two) for one, two in zip(model.parameters(), expected, strict=True))
    assert planned.plan.peak_bytes <= 64 * MIB
    planned.close()


def test_operators_without_a_shape_run_eagerly_in_between():
    layer, x = nn.Linear(16, 16), torch.randn(64, 16)

    def step(x):
        y = layer(x)
        return y[y > 0].square().mean() + layer(y).sum()

    step(x).backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    with pytest.warns(GraphBreakWarning):
        planned = remat.optimize(step, [x], "1MiB")
        planned(x).backward()
    assert torch.equal(layer.weight.grad, expected)


def test_a_tensor_instead_of_a_list_of_inputs_is_refused_with_the_call_that_works():
    with pytest.raises(TypeError, match=r"must be a list, got .*Tensor: penstock.remat.optimize\(step, \[batch\]"):
        remat.optimize(make("plain"), batch(), "64MiB")


def test_a_parameter_that_changes_before_backward_is_noticed():
    model, x = make("plain", num_blocks=1), batch()
    step = remat.compile(model, budget="64MiB")
    loss = step(x)
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_needs_the_graph():
    model, x = make("plain", num_blocks=1), batch()
    loss = remat.compile(model, budget="64MiB")(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_eager_rest_is_offloaded_where_there_is_a_disk(tmp_path):
    x = batch(64)
    expected = train(model := make("disabled", num_blocks=2), model, [x] * 3)
    model = make("disabled", num_blocks=2)
    step = remat.compile(model, budget=None, disk=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the disk may be too slow to be worth it
        for _ in range(5):
            model.zero_grad(set_to_none=False)
            step(x).backward()
    assert all(torch.equal(one.grad, two) for one, two in zip(model.parameters(), expected[0][1], strict=True))
    assert step._step.door._offloading is not None
    step.close()


def test_an_eager_rest_is_measured_until_it_keeps_the_budget():
    x = batch(64)
    model = make("disabled", num_blocks=2)
    step = remat.compile(model, budget="512MiB")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        step(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    session = step._step.door.session
    assert session.beside.rest_bytes > 4 * x.nbytes
    assert set(session.planner.measured._nums.values()) == {4}
    assert not session.wants_to_be_measured
    assert probe.can_record("cpu")


def test_numbers_among_the_arguments_are_part_of_the_kind():
    model, x = make("plain"), batch()
    step = remat.compile(lambda x, scale, times: model.loss(x * scale) * times, budget="64MiB")
    for scale, times in ((1.0, 2), (0.5, 3), (0.25, 4), (0.125, 5)):
        model.zero_grad(set_to_none=False)
        (model.loss(x * scale) * times).backward()
        expected = model.head.weight.grad.clone()
        model.zero_grad(set_to_none=False)
        step(x, scale, times).backward()
        assert torch.equal(model.head.weight.grad, expected)


def test_a_weight_that_graphs_and_an_eager_rest_share_gets_its_sum_at_once():
    torch.manual_seed(0)
    table, layer = nn.Embedding(50, 16), nn.Linear(16, 16)
    tokens = torch.randint(50, (8, 12))

    def run(step):
        for parameter in (*table.parameters(), *layer.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1)
        step(tokens).backward()
        return [one.grad.clone() for one in (*table.parameters(), *layer.parameters())]

    def step(tokens):
        x = layer(table(tokens))
        print(end="")
        x = torch.compiler.disable(lambda x: x + 0.5 * table.weight.mean(0))(x)
        return nn.functional.cross_entropy((x @ table.weight.t()).flatten(0, 1), tokens.flatten())

    expected = run(step)
    compiled = remat.compile(step, budget="16MiB")
    for _ in range(2):
        assert all(map(torch.equal, run(compiled), expected))


def test_a_graph_is_kept_for_a_second_backward_also_after_one_that_was_not():
    model, x = make("plain", num_blocks=1), batch()
    step = remat.compile(model, budget="64MiB")
    for retains in (False, True, False, True):
        model.zero_grad(set_to_none=False)
        loss = step(x)
        loss.backward(retain_graph=retains)
        if retains:
            once = model.head.weight.grad.clone()
            loss.backward()
            assert torch.equal(model.head.weight.grad, 2 * once)


def test_frozen_parts_stay_as_they_are_and_attributes_are_the_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    step = remat.compile(model, budget="1MiB")
    assert step.training
    assert not model[1].training
    step.temperature = 2.0
    assert model.temperature == 2.0
    assert not step.eval().training
    assert not model.training


def test_copies_and_pickles_are_compiled_again():
    model, x = make("print", num_blocks=1), batch()
    model.lock = None
    step = remat.compile(model, budget="64MiB")
    step(x).backward()
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert not other.plans
        assert torch.equal(other(x), model(x))
        assert other.head.weight is not model.head.weight


def test_lightnings_note_of_what_was_compiled_does_not_keep_it_from_being_pickled(monkeypatch):
    def noting(compiled, **keywords):
        made = torch_compile(compiled, **keywords)
        made._compile_kwargs = dict(keywords)  # as lightning.fabric does to torch.compile
        return made

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", noting)
    model = nn.Linear(4, 1)
    before = dict(vars(model))
    step = remat.compile(model, budget="1MiB")
    assert vars(model) == before
    other = pickle.loads(pickle.dumps(step))
    assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_step_that_fails_is_forgotten():
    table = nn.Embedding(8, 16)
    step = remat.compile(lambda tokens: table(tokens).square().mean(), budget="1MiB")
    with pytest.raises(IndexError):
        step(torch.tensor([9]))
    for _ in range(2):
        step(torch.tensor([3])).backward()
    session = step.door.session
    assert not session._waiting
    assert len(session._step.calls) == 1


def test_two_models_of_one_class_have_a_session_each():
    options = {"budget": "64MiB"}
    x, steps = batch(), []
    for _ in range(2):
        model = make("plain", num_blocks=1)
        steps.append(torch.compile(model, backend="penstock", options=options))
        steps[-1](x).backward()
    del steps[0], model
    gc.collect()
    steps[0](x).backward()


def test_what_has_no_gradient_counts_in_the_eager_rest():
    layer, x = nn.Linear(64, 64), torch.randn(1024, 64)
    noisy = torch.compiler.disable(lambda x: nn.functional.dropout(x, 0.5))
    step = remat.compile(lambda x: noisy(layer(x)).sum(), budget="64MiB")
    step(x).backward()
    assert step.door.session.beside.rest_bytes >= x.nbytes


def test_settings_are_put_back_when_calls_of_threads_overlap():
    from torch._dynamo import config
    from torch._dynamo.variables.torch import tracing_state_functions

    from penstock.remat import _dynamo

    before = config.allow_rnn, config.recompile_limit, dict(tracing_state_functions())
    first, second = _dynamo.tracing_a_step(), _dynamo.tracing_a_step(has_rest=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.allow_rnn
    second.__exit__(None, None, None)
    assert (config.allow_rnn, config.recompile_limit, tracing_state_functions()) == before


def test_a_tensor_between_graphs_may_change_where_nobody_wants_its_gradient():
    weights = [nn.Parameter(torch.randn(8)) for _ in range(3)]

    def step(x):
        y = x * weights[0]
        print(end="")
        z = (weights[1] * weights[1].sin()).sum()
        with torch.no_grad():
            y.mul_(0.5)
        return (z + y + weights[2].sin() * weights[2]).sum()

    x = torch.randn(8)
    compiled = remat.compile(step, budget="1MiB")
    for run in (step, compiled, compiled):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        run(x).backward()
        if run is step:
            expected = [weight.grad.clone() for weight in weights]
        assert all(torch.equal(weight.grad, one) for weight, one in zip(weights, expected, strict=True))


def test_threads_that_share_a_step_each_have_their_own():
    model, x = make("plain", num_blocks=1), batch(8)
    step = remat.compile(model, budget="256MiB")
    step(x).backward()
    failed = []

    def run():
        try:
            for _ in range(5):
                torch.autograd.grad(step(x), model.head.weight)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert max(one.num_graphs for one in step.plans) == 1


def test_a_step_that_differentiates_by_itself():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step(x):
        return (layer(x) * torch.func.grad(lambda y: layer(y).sum())(x)).sum()

    step(x).backward()
    expected = layer.weight.grad.clone()
    compiled = remat.compile(step, budget="1MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetNotKeptWarning)
        for _ in range(2):
            layer.zero_grad()
            compiled(x).backward()
            assert torch.equal(layer.weight.grad, expected)
    with torch.autograd.graph.save_on_cpu():  # hooks are allowed as before
        layer(x).sum().backward()


def test_a_number_that_changes_with_every_call_is_warned_of_once():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PenstockWarning)
        step = remat.compile(lambda x, scale: (layer(x) * scale).sum(), budget="1MiB")
        for at in range(10):
            step(x, 1.0 + at / 8).backward()
    (one,) = caught
    assert "in each of 9 calls, the last 2" in str(one.message)
    assert one.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        step = remat.compile(lambda x, scale: (layer(x) * scale).sum(), budget="1MiB")
        for at in range(10):
            step(x, torch.tensor(1.0 + at / 8)).backward()
    assert len(step.plans) == 1


@DOORS
def test_a_step_of_which_nothing_is_compiled_is_warned_of(door):
    model = make("plain")
    model.forward = torch.compiler.disable(model.forward)
    peak = max(peak for *_, peak in train(model, model, [batch()] * 2))
    for budget, is_kept in ((int(0.7 * peak), False), (int(1.1 * peak), True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BudgetNotKeptWarning)
            step = through(door, model, budget)
            for _ in range(6):
                step(batch()).backward()
        said = [str(one.message) for one in caught if one.category is BudgetNotKeptWarning]
        assert len(said) == (0 if is_kept else 1)
        assert is_kept or "cannot compile any part of this step" in said[0]


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
        static[is_view] = max(one.problem.static_bytes for one in compiled.plans)
    assert static[False] - static[True] == sum(one.nbytes for one in model.parameters())


def test_a_step_above_its_budget_takes_as_little_as_it_can():
    x = batch()
    plain = train(model := make("print", num_blocks=8), model, [x])[0][2]
    with pytest.warns(BudgetNotKeptWarning) as caught:
        seen = train(remat.compile(model := make("print", num_blocks=8), budget="4700KiB"), model, [x] * 3)
    lowest = int(str(caught[-1].message).split("Give budget=")[1].split()[0])
    assert lowest < 0.5 * plain
    assert max(peak for *_, peak in seen) <= 1.1 * lowest
    assert seen[-1][2] <= 1.01 * lowest


def test_the_first_step_of_a_smaller_batch_keeps_what_larger_ones_keep():
    sizes = [32, 24, 16, 32]  # the last in graphs with symbols for sizes, anew
    model = make("print", num_blocks=6)
    with pytest.warns(BudgetNotKeptWarning) as caught:
        train(remat.compile(model, budget=4_800_000), model, [batch(32)] * 2)
    budget = int(str(caught[-1].message).split("Give budget=")[1].split()[0])
    model = make("print", num_blocks=6)
    with pytest.warns(BudgetNotKeptWarning, match="first step"):
        seen = train(remat.compile(model, budget=budget), model, [batch(size) for size in sizes])
    peaks = [peak for *_, peak in seen]
    assert peaks[0] > 1.02 * budget, "the first step of all keeps it, so what follows shows nothing"
    assert max(peaks[1:]) <= budget


@DOORS
def test_a_loss_outside_of_the_model_counts(door):
    x, labels = torch.randn(512, 64), torch.randint(0, 1000, (512,))
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    standing = sum(2 * one.nbytes for one in model.parameters()) + x.nbytes

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


def test_what_nothing_compiles_of_is_warned_of_whenever_it_grows():
    model = make("plain")
    model.forward = torch.compiler.disable(model.forward)
    step = remat.compile(model, budget="16MiB")
    for _ in range(20):
        step(batch(2)).backward()
    with pytest.warns(BudgetNotKeptWarning, match="cannot compile any part"):
        step(batch(256)).backward()


class Counting(nn.Module):
    """A forward that depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.num_calls += 1
        return self.layer(x) * (1 + self.num_calls)


def test_a_counter_that_makes_every_call_anew_is_warned_of_once():
    step = remat.compile(Counting(), budget="8MiB")
    with pytest.warns(PenstockWarning, match="planned again for the same shapes") as caught:
        for _ in range(11):
            step(torch.ones(4, 8)).sum().backward()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        step = remat.compile(make("print", num_blocks=9), budget="64MiB")  # many graphs alike, of one call
        for _ in range(3):
            step(batch(2)).backward()


def test_hooks_that_come_later_run():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.ones(4, 8)
    step = remat.compile(model, budget="8MiB")
    step(x).sum().backward()
    model[1].register_forward_hook(lambda module, given, result: result * 100)
    assert torch.equal(step(x), model(x))
    seen = []
    step.register_full_backward_hook(lambda module, given, made: seen.append(made[0].shape))
    step(x.requires_grad_()).sum().backward()
    assert seen == [(4, 8)]
    assert model._is_full_backward_hook is None


def test_torch_func_around_a_compiled_model():
    model = nn.Linear(8, 1)
    step, x = remat.compile(model, budget="8MiB"), torch.randn(5, 8)
    with pytest.warns(BudgetNotKeptWarning, match=r"torch\.func"):
        found = torch.func.grad(lambda x: step(x).sum())(x)
    assert torch.equal(found, torch.func.grad(lambda x: model(x).sum())(x))
    assert torch.equal(torch.vmap(step)(x), torch.vmap(model)(x))


def test_a_number_of_another_sign_and_another_kernel_are_kinds_of_their_own():
    step = remat.compile(lambda x, number: x / number, budget="8MiB")
    x = torch.ones(3, requires_grad=True)
    assert step(x, 2.0)[0] == 0.5
    assert step(x, 4.0)[0] == 0.25
    assert step(x, 0.0)[0] == float("inf")
    assert step(x, -0.0)[0] == float("-inf")
    attention = nn.functional.scaled_dot_product_attention
    step = remat.compile(attention, budget="8MiB")
    given = [torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3)]
    assert torch.equal(step(*given), attention(*given))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.equal(step(*given), attention(*given))


def test_settings_of_threads_that_overlap_are_put_back_in_each():
    from penstock.remat import _dynamo

    def read():
        return dynamo_config.suppress_errors, dynamo_config.recompile_limit

    import torch._dynamo.config as dynamo_config

    before, after = read(), []
    both, first_left = threading.Barrier(2), threading.Event()

    def run(is_first):
        with _dynamo.tracing_a_step(has_rest=True):
            both.wait()
            if not is_first:
                first_left.wait()
        after.append(read())
        first_left.set()

    threads = [threading.Thread(target=run, args=(is_first,)) for is_first in (True, False)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert after[1] == before
    if _dynamo._has_settings_per_thread():
        assert after == [before, before]


def test_dynamo_compiles_nothing_in_other_threads_while_a_graph_is_captured(monkeypatch):
    from torch._dynamo import convert_frame

    from penstock.remat import _piece

    acquired, capture = [], _piece.GraphPiece._capture

    def captured(*arguments):
        thread = threading.Thread(target=lambda: acquired.append(convert_frame.compile_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        capture(*arguments)

    monkeypatch.setattr(_piece.GraphPiece, "_capture", captured)
    remat.compile(make("plain", num_blocks=1), budget="64MiB")(batch(2)).backward()
    assert acquired == [False]


def test_a_step_is_measured_in_its_thread():
    model, x = make("disabled", num_blocks=2), batch(64)
    step = remat.compile(model, budget="64MiB")
    for _ in range(2):
        step(x).backward()  # the second one is measured, and no optimizer ends it
    other = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert step._step.door._meter._open is not None
    with torch.no_grad():
        step(x)  # ends it, and is none
    assert step._step.door._meter._open is None
    assert not torch.autograd._profiler_enabled()


def test_a_step_that_is_being_measured_goes_with_its_model():
    model, x = make("disabled", num_blocks=2), batch(64)
    step = remat.compile(model, budget="64MiB")
    for _ in range(2):
        step(x).backward()
    assert torch.autograd._profiler_enabled()
    held = weakref.ref(model)
    del step, model
    gc.collect()
    assert held() is None
    assert not torch.autograd._profiler_enabled()


def test_a_backend_shows_its_plans():
    backend = remat.Backend(budget="64MiB")
    step = torch.compile(make("plain", num_blocks=1), backend=backend)
    for rows in (2, 3):
        step(batch(rows)).backward()
    assert len(backend.plans) == 2
    assert "2x32x64" in backend.explain()
    assert "3x32x64" in backend.explain()
    assert copy.deepcopy(backend) is backend
    backend.close()
