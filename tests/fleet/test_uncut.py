"""Jobs that run uncut: as the plain loop, or refused by name."""

import ctypes
import re

import pytest
import torch
from fleet_jobs import batches, gpt_job, layered_job, make_job, on_pairs, train, train_plainly
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock import fleet
from penstock.errors import BudgetNotKeptWarning, PenstockError, PenstockWarning
from penstock.fleet import JobState


class Foreign(torch.optim.Optimizer):
    """Looks at all gradients, counts its steps, draws random numbers."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        all_of_them = [parameter for group in self.param_groups for parameter in group["params"]]
        total = sum(float(parameter.grad.norm()) for parameter in all_of_them)
        for parameter in all_of_them:
            state = self.state[parameter]
            state.setdefault("mean", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad, alpha=0.1)
            noise = torch.randn_like(parameter) * 0.01
            parameter.add_(state["mean"].sign() + noise, alpha=-self.param_groups[0]["lr"] / (1 + total))


class Counting(Foreign):
    """Its rate depends on an attribute."""

    def __init__(self, params):
        super().__init__(params)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        self.param_groups[0]["lr"] = 1e-3 / self.count
        super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """A wrapper that does something new at every third step, and never calls the constructor of Optimizer."""

    def __init__(self, base):
        self.base, self.num_steps, self.defaults = base, 0, base.defaults
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [parameter.detach().clone() for group in base.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step(closure)
        self.num_steps += 1
        fast = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, slow in zip(fast, self.slow, strict=True):
            if self.num_steps % 3 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Sam(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class ElementWise(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def hooked(parameters):
    """Clamps all parameters after each step, whatever was stepped: a hook that reads the others' bytes."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    count = []

    def clamp(optimizer, args, kwargs):
        count.append(1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.1 * len(count), 0.1 * len(count))

    optimizer.register_step_post_hook(clamp)
    return optimizer


def assert_as_plain(job, result):
    assert result.error is None, result.error
    losses, model = train_plainly(job)
    assert list(result.losses) == losses
    trained = result.model().state_dict()
    for name, tensor in model.state_dict().items():
        own = trained[name]
        if tensor.layout is not torch.strided:
            own, tensor = own.to_dense(), tensor.to_dense()
        assert torch.equal(tensor, own), name


@pytest.mark.parametrize(
    "optimizer",
    [Foreign, Counting, lambda parameters: Lookahead(torch.optim.AdamW(parameters, lr=1e-2)), hooked],
    ids=["foreign", "attributes", "wrapper", "hooks"],
)
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "clip_norm": 0.5}, {"precision": "float16"}], ids=str)
def test_optimizers_that_step_whole_train_as_plainly(optimizer, changes):
    job = gpt_job(optimizer=optimizer, **changes)
    assert_as_plain(job, train([job], budget="64MB")["job"])


def test_hooks_for_all_optimizers_run_once_per_step():
    steps = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        job = gpt_job()
        result = train([job], budget="64MB")["job"]
    finally:
        handle.remove()
    assert len(steps) == job.steps
    assert_as_plain(job, result)


def test_a_hook_that_comes_when_a_job_is_cut_is_refused_by_name():
    made = []

    def make(parameters):
        made.append(torch.optim.AdamW(parameters, lr=1e-2))
        return made[0]

    def data():
        yield from batches(1)
        made[0].register_step_post_hook(lambda *_: None)
        yield from batches()

    result = train([gpt_job(optimizer=make, data=data, steps=3)])["job"]
    assert result.state is JobState.FAILED and "AdamW has hooks" in result.error


def test_a_job_that_is_not_cut_shares_a_fleet_with_others():
    jobs = [
        gpt_job("a", optimizer=Foreign),
        layered_job("b"),
        gpt_job("c", optimizer=Counting, seed=3),
        gpt_job("d", optimizer=Foreign, seed=4, validation=lambda: batches(1, seed=8), evaluate_every=2),
        gpt_job("e"),
    ]
    results = train(jobs, budget="8MB")
    for job in jobs:
        assert_as_plain(job, results[job.name])
    assert [validation["step"] for validation in results["d"].validations] == [2, 4, 6, 8]


@pytest.mark.parametrize("optimizer", [Foreign, hooked, torch.optim.SparseAdam])
def test_the_budget_that_a_refusal_names_works(optimizer):
    job = gpt_job(optimizer=optimizer) if optimizer in (Foreign, hooked) else sparse_job(optimizer=optimizer)
    refused = train([job], budget="50KB")["job"]
    assert refused.state is JobState.FAILED
    assert "it cannot be cut, because" in refused.error and "Job(separable=True, ...)" in refused.error
    named = int(re.search(r"at least (\d+)", refused.error)[1])
    assert_as_plain(job, train([job], budget=named)["job"])
    assert train([job], budget=named * 9 // 10)["job"].state is JobState.FAILED


def test_a_mini_batch_above_the_budget_is_told():
    def data():
        return [*batches(3), *batches(3, batch=64)]

    job = gpt_job(optimizer=Foreign, data=data, steps=6)
    with pytest.warns(BudgetNotKeptWarning, match="above the budget"):
        assert_as_plain(job, train([job], budget="4MB")["job"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": lambda model: [model]}, "Foreign is not PyTorch's own"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS needs a closure"),
        ({"optimizer": Sam}, "Sam needs a closure"),
        ({"optimizer": lambda parameters: [torch.optim.SGD(parameters, lr=0.1)] * 2}, "must return a torch.optim"),
        ({"separable": True}, "separable=True does not hold for Foreign"),
    ],
    ids=["cut", "L-BFGS", "SAM", "two", "not separable"],
)
def test_what_cannot_be_right_is_refused_by_name(changes, said):
    result = train([gpt_job(**{"optimizer": Foreign, **changes})], budget="64MB")["job"]
    assert result.state is JobState.FAILED and said in result.error
    assert not result.losses


def test_a_separable_optimizer_is_cut():
    job = gpt_job(optimizer=ElementWise, separable=True)
    results = train([job], num_devices=1, budget="1MB")
    assert_as_plain(job, results["job"])
    assert results.devices[0].num_units > 3 * job.steps


def test_costs_of_a_job_that_is_not_cut_are_refused_by_name():
    with pytest.raises(PenstockError, match="Foreign is not PyTorch's own"):
        fleet.measure([gpt_job(optimizer=Foreign)], "cpu", "64MB")


def stop_after(monkeypatch, running, num_steps):
    log = running._engine.upkeep.stepped

    def stepped(run):
        log(run)
        if run.training.position.step == num_steps:
            with running._engine.condition:
                running._engine.is_stopping = True

    monkeypatch.setattr(running._engine.upkeep, "stepped", stepped)


@pytest.mark.parametrize("optimizer", [Foreign, hooked])
def test_a_job_goes_on_where_it_was_stopped(tmp_path, monkeypatch, optimizer):
    if optimizer is hooked:  # a hook that keeps nothing itself
        optimizer = _hooked_plainly
    job = gpt_job(optimizer=optimizer, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    options = {"host": "64MiB", "run_dir": tmp_path, "progress": None}
    with fleet.Fleet([fleet.Device(name="cpu", threads=1)], "64MB", **options) as running:
        stop_after(monkeypatch, running, 3)
        running.add(job)
        assert len(running.wait()["job"].losses) < job.steps
    assert_as_plain(job, train([job], budget="64MB", run_dir=tmp_path, resume=True)["job"])


def _hooked_plainly(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.register_step_pre_hook(lambda optimizer, *_: None)
    return optimizer


def test_a_job_whose_optimizer_keeps_more_than_its_state_is_not_continued(tmp_path, monkeypatch):
    job = gpt_job(optimizer=Counting)
    options = {"host": "64MiB", "run_dir": tmp_path, "progress": None}
    with fleet.Fleet([fleet.Device(name="cpu", threads=1)], "64MB", **options) as running:
        stop_after(monkeypatch, running, 3)
        running.add(job)
        with pytest.warns(PenstockWarning, match="keeps count = "):
            early = running.wait()["job"]
    assert early.model() is not None
    again = train([job], budget="64MB", run_dir=tmp_path, resume=True)["job"]
    assert again.state is JobState.FAILED and "keeps count = " in again.error


class Words(nn.Module):
    def __init__(self, form="functional"):
        super().__init__()
        self.table = nn.Embedding(256, 16, sparse=form == "module")
        self.head = nn.Linear(16, 256)
        self.form = form

    def forward(self, tokens, targets):
        if self.form == "functional":
            x = functional.embedding(tokens, self.table.weight, sparse=True)
        else:
            x = self.table(tokens)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def sparse_job(form="module", optimizer=None, **changes):
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def on_table(parameters):
        return make([parameter for parameter in parameters if parameter.shape == (256, 16)][:1])

    return make_job(
        model=lambda: Words(form), loss=on_pairs, optimizer=make if optimizer is None else on_table, **changes
    )


@pytest.mark.parametrize("form", ["module", "functional"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.SparseAdam, torch.optim.Adagrad], ids=str)
def test_sparse_gradients_train(form, optimizer):
    job = sparse_job(form, optimizer)
    assert_as_plain(job, train([job], budget="64MB")["job"])


class Graph(nn.Module):
    def __init__(self, layout, is_buffer):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        matrix = torch.eye(5).to_sparse(layout=layout)
        if is_buffer:
            self.register_buffer("matrix", matrix)
        else:
            self.kept = [matrix]

    def forward(self, x):
        matrix = self.matrix if hasattr(self, "matrix") else self.kept[0]
        return torch.sparse.mm(matrix, self.layer(x)).square().mean()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_sparse_matrices_in_a_model_train(layout, is_buffer):
    job = make_job(
        model=lambda: Graph(layout, is_buffer),
        data=lambda: [torch.ones(5, 8) * number for number in range(3)],
        loss=lambda model, batch: model(batch),
    )
    assert_as_plain(job, train([job], budget="64MB")["job"])


def test_sparse_matrices_in_batches_train():
    job = make_job(
        model=lambda: nn.Linear(8, 4),
        data=lambda: [(torch.eye(5).to_sparse(), torch.ones(5, 8) * number) for number in range(3)],
        loss=lambda model, batch: torch.sparse.mm(batch[0], model(batch[1])).square().mean(),
    )
    assert_as_plain(job, train([job], budget="64MB")["job"])


class ByAddress(torch.autograd.Function):
    """Reads a weight as a kernel in C++ does."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x)
        return x * sum((ctypes.c_float * weight.numel()).from_address(weight.data_ptr()))

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient, torch.full((3,), float((gradient * x).sum()))


class Unseen(nn.Module):
    def __init__(self, has_more):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if has_more:
            self.more = nn.Linear(4, 4)

    def forward(self, x):
        x = self.more(x) if hasattr(self, "more") else x
        return ByAddress.apply(x, self.weight).square().mean()


@pytest.mark.parametrize(
    "model",
    [
        lambda: Unseen(False),
        lambda: Unseen(True),
        lambda: torch.jit.script(nn.Linear(4, 1)),
        lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1))),
    ],
    ids=["only", "one of many", "TorchScript", "a part in TorchScript"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_weights_that_only_other_code_touches_train(model, tmp_path):
    job = make_job(
        model=model,
        data=lambda: [torch.ones(2, 4) * number for number in range(3)],
        loss=lambda model, batch: model(batch).square().mean(),
    )
    assert_as_plain(job, train([job], budget="64MB")["job"])


@pytest.mark.filterwarnings("ignore:.torch.jit.(script|load|save). is deprecated")
def test_a_loaded_script_module_trains(tmp_path):
    torch.manual_seed(1)
    torch.jit.script(nn.Linear(4, 1)).save(tmp_path / "model.pt")
    job = make_job(
        model=lambda: torch.jit.load(tmp_path / "model.pt"),
        data=lambda: [torch.ones(2, 4) * number for number in range(3)],
        loss=lambda model, batch: model(batch).square().mean(),
    )
    assert_as_plain(job, train([job], budget="64MB")["job"])


def test_a_loss_that_does_not_call_the_model_is_said_truly():
    job = make_job(data=lambda: [torch.ones(2)], loss=lambda model, batch: batch.sum())
    error = train([job], budget="64MB")["job"].error
    assert "requires_grad=False" in error and "without a fleet" not in error


def test_what_fails_only_under_the_watch_runs_uncut():
    def loss(model, batch):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("I am watched")
        return model(*batch)

    job = gpt_job(loss=loss)
    assert_as_plain(job, train([job], budget="64MB")["job"])


@pytest.mark.parametrize("metric", [None, lambda model, batch: {"accuracy": model(*batch)}])
def test_a_scheduler_that_waits_for_a_metric_is_stepped_after_validations(metric):
    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)

    job = gpt_job(steps=None, epochs=4, lr_scheduler=plateau, validation=lambda: batches(1, seed=8), metric=metric)
    result = train([job])["job"]
    torch.manual_seed(0)
    model, losses = job.model(), []
    optimizer = job.optimizer(model.parameters())
    scheduler = plateau(optimizer)
    for _ in range(4):
        for batch in batches():
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            scheduler.step(float(job.loss(model, batches(1, seed=8)[0])))
    assert list(result.losses) == losses
    assert optimizer.param_groups[0]["lr"] < 1e-2


def test_a_scheduler_that_waits_for_a_metric_needs_validation():
    job = gpt_job(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert "ReduceLROnPlateau takes a metric" in train([job])["job"].error
