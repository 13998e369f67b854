"""Training loops as people write them: graphs that live on, optimizers without state, memory that grows, tools."""

import contextlib
import copy
import gc

import pytest
import torch
from _helpers import OPTIONS, Mlp, assert_nothing_leaked, assert_same, everything_parked, mlp_loss, note, settle
from _helpers import Run as Outcome
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from penstock import offload, probe
from penstock.errors import BudgetError, BudgetNotKeptWarning

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 2**20


@pytest.fixture
def open_offloader(tmp_path):
    """Makes offloaders and closes them."""
    with contextlib.ExitStack() as made:

        def make(model, **options):
            offloader = offload.activations(model, disk=tmp_path, **{"min_size": "16KiB", **options})
            made.callback(offloader.close)
            return offloader

        yield make


def blocks(width=96, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())])


def loss_of(model, rows=256):
    return model(torch.randn(rows, 96)).square().mean()


def update(model, optimizer, offloader, num_batches=1):
    """One update, with a context around its micro-batches; returns the loss."""
    with offloader:
        for _ in range(num_batches):
            loss = loss_of(model)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ---------------------------------------------------------------------------------------------- graphs that live on


def forgotten_result(model, offloader, kept):
    with offloader:
        kept["aux"] = model(torch.randn(96, 16))
        loss = mlp_loss(model)
        loss.backward()
    return loss


def forgotten_result_of_a_context(model, offloader, kept):
    with offloader:
        kept["aux"] = model(torch.randn(96, 16))
    with offloader:
        loss = mlp_loss(model)
        loss.backward()
    return loss


def backward_outside(model, offloader, kept):
    with offloader:
        kept["aux"] = model(torch.randn(96, 16))
        loss = mlp_loss(model)
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [forgotten_result, forgotten_result_of_a_context, backward_outside])
def test_a_graph_that_lives_on_does_not_keep_steps_from_being_planned(tmp_path, step):
    def train(offloader_of):
        run, kept = Outcome(), {}
        torch.manual_seed(1)
        model = Mlp()
        offloader = offloader_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            loss = step(model, offloader, kept)
            note(run, model, loss)
            optimizer.step()
            optimizer.zero_grad()
        return run, offloader, kept

    expected, *_ = train(lambda _: contextlib.nullcontext())
    with everything_parked():
        actual, offloader, kept = train(lambda model: offload.activations(model, disk=tmp_path, **OPTIONS))
    assert_same(expected, actual)
    with offloader:
        pass
    assert offloader.statistics().num_steps == 6
    assert offloader.statistics().is_planned
    kept.clear()
    assert_nothing_leaked(offloader)
    offloader.close()


def test_one_context_around_all_steps_with_a_graph_that_lives_on(open_offloader):
    model = Mlp()
    offloader, optimizer = open_offloader(model, **OPTIONS), torch.optim.SGD(model.parameters(), lr=0.1)
    with offloader:
        for _ in range(5):
            aux = model(torch.randn(96, 16))
            mlp_loss(model).backward()
            optimizer.step()
        assert offloader.statistics().num_steps == 4  # the last one may go on
    assert offloader.statistics().num_steps == 5
    assert aux.requires_grad


def test_a_late_backward_gets_its_bytes_from_a_cycle_that_has_ended(open_offloader):
    model = Mlp()
    with everything_parked():
        offloader = open_offloader(model, **OPTIONS)
        for _ in range(3):
            with offloader:
                batch = torch.randn(96, 16)
                late = model(batch).square().mean()
                mlp_loss(model).backward()
                settle(offloader)
            assert offloader.statistics().num_steps > 0
            expected = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
            actual = torch.autograd.grad(late, list(model.parameters()))
            assert all(map(torch.equal, expected, actual))
        del late
        assert_nothing_leaked(offloader)


def test_both_halves_of_a_gans_step_are_planned_and_keep_the_budget(open_offloader, collected):
    def train(offloader_of, steps=12):
        generator, critic = blocks(), nn.Sequential(blocks(), nn.Linear(96, 1))
        both = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (generator, critic)]
        offloader, losses = offloader_of(nn.ModuleList([generator, critic])), []
        torch.manual_seed(1)
        for _ in range(steps):
            with offloader:
                both[1].zero_grad()
                fake = generator(torch.randn(256, 96))  # its graph lives until the next step
                loss = critic(torch.randn(256, 96)).mean() - critic(fake.detach()).mean()
                loss.backward()
            both[1].step()
            both[0].zero_grad()
            with offloader:
                critic(generator(torch.randn(256, 96))).mean().neg().backward()
            both[0].step()
            losses.append(loss.item())
            if steps > 1 and not isinstance(offloader, contextlib.nullcontext):
                planned.append(offloader.statistics().is_planned)
        return losses

    planned = []
    plain = probe.peak_bytes(lambda: train(lambda _: contextlib.nullcontext()), device="cpu")
    budget = plain.start_bytes + int(0.7 * plain.activation_bytes)
    ours = probe.peak_bytes(lambda: train(lambda model: open_offloader(model, budget=budget)), device="cpu")
    assert ours.result == plain.result
    assert all(planned[6:])
    assert ours.peak_bytes <= budget


# ---------------------------------------------------------------------------------------- state that is to come


class Momenta(torch.optim.Optimizer):
    """A class of somebody else's, with three times the parameters as state."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    for name in "abc":
                        state.setdefault(name, torch.zeros_like(parameter))
                    parameter.data.add_(state["a"].mul_(0.9).add_(parameter.grad), alpha=-0.05)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Momenta, torch.optim.SGD])
def test_no_update_exceeds_the_budget_whatever_state_the_optimizer_makes(open_offloader, collected, kind):
    """With accumulation, so that plans are made before there is any."""

    def train(offloader_of):
        model = blocks(depth=6)
        optimizer, offloader, losses = kind(model.parameters()), offloader_of(model), []
        for _ in range(4):
            losses.append(update(model, optimizer, offloader, num_batches=4))
        return losses, offloader

    plain = probe.peak_bytes(lambda: train(lambda _: contextlib.nullcontext())[0], device="cpu")
    budget = plain.start_bytes + int(0.8 * plain.activation_bytes)
    ours = probe.peak_bytes(lambda: train(lambda model: open_offloader(model, budget=budget)), device="cpu")
    losses, offloader = ours.result
    assert losses == plain.result
    assert ours.peak_bytes <= budget
    assert offloader.statistics().is_planned


def test_layers_that_are_unfrozen_later_make_state_too(open_offloader, collected):
    def train(offloader_of):
        model = blocks(depth=6)
        model[:8].requires_grad_(False)
        optimizer, offloader = torch.optim.AdamW(model.parameters()), offloader_of(model)
        for number in range(8):
            if number == 4:
                model.requires_grad_(True)
            update(model, optimizer, offloader)

    plain = probe.peak_bytes(lambda: train(lambda _: contextlib.nullcontext()), device="cpu")
    budget = plain.start_bytes + int(0.8 * plain.activation_bytes)
    ours = probe.peak_bytes(lambda: train(lambda model: open_offloader(model, budget=budget)), device="cpu")
    assert ours.peak_bytes <= budget


# --------------------------------------------------------------------------------------------- memory that grows


def grows(offloader, model, held, num_steps, size_bytes):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        held.append(torch.ones(size_bytes, dtype=torch.uint8))
        update(model, optimizer, offloader)


def budget_of(model, share):
    def step():
        loss_of(model).backward()

    step()
    report = probe.peak_bytes(step, device="cpu")
    return report.start_bytes + int(share * report.activation_bytes)


def test_more_moves_when_other_memory_grows(open_offloader, collected):
    model, held = blocks(), []
    budget = budget_of(model, 0.9)
    offloader = open_offloader(model, budget=budget)
    grows(offloader, model, held, 5, 0)
    before = offloader.statistics()
    held.append(torch.ones(256 * 1024, dtype=torch.uint8))  # as a copy of the model that is made at some time
    report = probe.peak_bytes(lambda: grows(offloader, model, held, 16, 0), device="cpu")
    after = offloader.statistics()
    assert after.is_planned
    assert sum(after.kept_bytes.values()) < sum(before.kept_bytes.values())
    assert report.peak_bytes <= budget


@pytest.mark.parametrize("strict", [False, True])
def test_a_budget_that_was_kept_and_no_longer_can_be_is_told_once(open_offloader, collected, strict):
    model, held = blocks(), []
    offloader = open_offloader(model, budget=budget_of(model, 0.9), strict=strict)
    grows(offloader, model, held, 4, 0)
    told = pytest.raises(BudgetError) if strict else pytest.warns(BudgetNotKeptWarning, match="strict=True")
    with told as caught:
        grows(offloader, model, held, 8, MIB)
    if not strict:
        assert len([warning for warning in caught if warning.category is BudgetNotKeptWarning]) == 1
        held.clear()
        grows(offloader, model, held, 20, 0)


def test_planned_cycles_are_measured_again_at_powers_of_two(open_offloader, collected):
    model = blocks()
    offloader = open_offloader(model, budget=budget_of(model, 0.9))
    optimizer, measured = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(1, 20):
        update(model, optimizer, offloader)
        if offloader.statistics().peak_bytes is not None:
            measured.append(number)
    (first, *later) = measured
    assert first == 1
    assert later in ([2, 3, 5, 9, 17], [2, 3, 4, 6, 10, 18])  # the count begins when the plan is made, or made anew


# ------------------------------------------------------------------------------------------- parts and other tools


class Jagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(96, 96) for _ in range(4))

    def forward(self, rows):
        heads = [layer(rows).unflatten(-1, [4, 24]).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*heads)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Graphs(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.layer = nn.Linear(96, 96)
        edges = (torch.rand(256, 256) < 0.05).float()
        self.edges = edges.to_sparse() if layout is torch.sparse_coo else edges.to_sparse_csr()

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.layer(x).relu())


def of_jagged(model):
    rows = torch.nested.nested_tensor([torch.randn(count, 96) for count in (20, 50, 33)], layout=torch.jagged)
    return model(rows).values().square().mean()


def of_strided_nested(model):
    rows = torch.nested.nested_tensor([torch.randn(count, 96) for count in (20, 50, 33)])
    return torch.nested.to_padded_tensor(model(rows), 0.0).square().mean()


def of_gradient(model):
    """A gradient by ``torch.func`` inside of a step, as for a penalty."""
    batch, parameters = torch.randn(256, 96), dict(model.named_parameters())

    def loss_at(parameters):
        return torch.func.functional_call(model, parameters, (batch,)).square().mean()

    penalty = sum(value.square().sum() for value in torch.func.grad(loss_at)(parameters).values())
    return loss_of(model) + penalty


def of_gradients_of_samples(model):
    parameters = dict(model.named_parameters())

    def loss_at(parameters, row):
        return torch.func.functional_call(model, parameters, (row,)).square().mean()

    found = torch.func.vmap(torch.func.grad(loss_at), (None, 0))(parameters, torch.randn(16, 96))
    return sum(value.square().mean() for value in found.values())


def of_jvp(model):
    batch = torch.randn(256, 96)
    value, change = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    return value.square().mean() + change.square().mean()


def of_vjp(model):
    value, pull = torch.func.vjp(model, torch.randn(256, 96))
    return value.square().mean() + pull(torch.ones_like(value))[0].square().mean()


def of_duals(model):
    batch = torch.randn(256, 96)
    with torch.autograd.forward_ad.dual_level():
        result = model(torch.autograd.forward_ad.make_dual(batch, torch.ones_like(batch)))
        value, change = torch.autograd.forward_ad.unpack_dual(result)
        return value.square().mean() + change.square().mean()


PARTS = {
    "scripted": (lambda: torch.jit.script(blocks()), loss_of),
    "scripted part": (lambda: nn.Sequential(nn.Linear(96, 96), nn.Tanh(), torch.jit.script(blocks())), loss_of),
    "traced": (lambda: torch.jit.trace(blocks(), torch.randn(4, 96)), loss_of),
    "jagged": (Jagged, of_jagged),
    "jagged norms": (lambda: nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.ReLU()), of_jagged),
    "nested": (lambda: nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96)), of_strided_nested),
    "sparse coo": (lambda: Graphs(torch.sparse_coo), loss_of),
    "sparse csr": (lambda: Graphs(torch.sparse_csr), loss_of),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(96), nn.GELU(), nn.LazyLinear(96)), loss_of),
    "func.grad": (blocks, of_gradient),
    "func.vmap of grad": (blocks, of_gradients_of_samples),
    "func.jvp": (blocks, of_jvp),
    "func.vjp": (blocks, of_vjp),
    "duals": (blocks, of_duals),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|torch.jit|Sparse CSR|Lazy modules).*")
@pytest.mark.parametrize("budget", [None, "1GiB"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_and_transforms_train_equal(tmp_path, part, budget):
    build, loss_with = PARTS[part]

    def train(offloader_of):
        run = Outcome()
        torch.manual_seed(1)
        model = build()
        offloader = offloader_of(model)
        for number in range(4):
            torch.manual_seed(number)
            with offloader:
                loss = loss_with(model)
                if not isinstance(offloader, contextlib.nullcontext):
                    settle(offloader)
                loss.backward()
            note(run, model, loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        return run

    train(lambda _: contextlib.nullcontext())  # a scripted function is compiled anew in its first calls
    expected = train(lambda _: contextlib.nullcontext())
    with everything_parked(), contextlib.ExitStack() as made:
        options = OPTIONS | {"budget": budget}
        actual = train(
            lambda model: made.enter_context(contextlib.closing(offload.activations(model, disk=tmp_path, **options)))
        )
    assert_same(expected, actual)


def test_torch_func_is_as_it_was_without_a_context(open_offloader):
    model = blocks()
    own = torch.autograd.graph.disable_saved_tensors_hooks
    with open_offloader(model):
        assert torch.autograd.graph.disable_saved_tensors_hooks is not own
        with (
            pytest.raises(RuntimeError, match="saved tensor hooks"),
            torch.autograd.graph.save_on_cpu(),
        ):
            torch.func.grad(lambda x: x.sum())(torch.ones(2))
        loss_of(model).backward()
    assert torch.autograd.graph.disable_saved_tensors_hooks is own


def test_reference_forwards_without_gradients_do_not_change_what_a_step_is(open_offloader):
    """As in DPO: the reference sees other batches, before and between the forwards that are trained."""
    model = blocks()
    reference = copy.deepcopy(model)
    offloader = open_offloader(model, budget="1GiB")
    for number in range(6):
        rows = 64 + 8 * number
        with offloader:
            with torch.no_grad():
                model(torch.randn(rows, 96)), reference(torch.randn(rows, 96))
            chosen = loss_of(model)
            with torch.no_grad():
                model(torch.randn(rows, 96))
            (chosen - loss_of(model, 128)).backward()
    assert offloader.statistics().is_planned
    assert len(offloader._learner._lessons) == 2  # without and with gradients


class Scheduled:
    """A profiler with a schedule, which begins and ends between steps."""

    def __enter__(self):
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
        return self.profiler.__enter__()

    def __exit__(self, *error):
        return self.profiler.__exit__(*error)


@pytest.mark.parametrize("tool", [Scheduled, lambda: FlopCounterMode(display=False)], ids=["profiler", "flops"])
def test_tools_around_the_loop_are_not_disturbed(open_offloader, tool):
    def train(offloader_of):
        model = blocks()
        optimizer, offloader, losses = torch.optim.AdamW(model.parameters()), offloader_of(model), []
        torch.manual_seed(1)
        with tool() as used:
            for _ in range(9):
                losses.append(update(model, optimizer, offloader, num_batches=2))
                getattr(used, "step", lambda: None)()
        return losses

    expected = train(lambda _: contextlib.nullcontext())
    assert train(lambda model: open_offloader(model, budget="5MiB")) == expected


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_cell_that_was_interrupted_runs_again(open_offloader, where):
    model = blocks()
    optimizer, offloader = torch.optim.AdamW(model.parameters()), open_offloader(model, budget="1GiB")
    notebook = {}

    def cell(*, is_interrupted):
        for number in range(5):
            with offloader:
                notebook["loss"] = loss_of(model)
                if is_interrupted and where == "inside" and number == 3:
                    raise KeyboardInterrupt
            if is_interrupted and number == 3:
                raise KeyboardInterrupt
            notebook["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(KeyboardInterrupt):
        cell(is_interrupted=True)
    for _ in range(3):
        cell(is_interrupted=False)
    with offloader:
        pass
    assert offloader.statistics().is_planned
    notebook.clear()
    gc.collect()
    assert offloader.tier_statistics().num_live_handles == 0


@pytest.mark.parametrize("has_context_inside", [False, True])
def test_lbfgs_keeps_its_budget(open_offloader, collected, has_context_inside):
    def train(offloader_of):
        model = blocks(depth=3)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
        offloader, losses = offloader_of(model), []
        inner = offloader if has_context_inside else contextlib.nullcontext()
        outer = contextlib.nullcontext() if has_context_inside else offloader
        for _ in range(4):
            batch = torch.randn(1024, 96)

            def closure(batch=batch):
                optimizer.zero_grad()
                with inner:
                    loss = model(batch).square().mean()
                    loss.backward()
                return loss

            with outer:
                losses.append(optimizer.step(closure).item())
        return losses

    plain = probe.peak_bytes(lambda: train(lambda _: contextlib.nullcontext()), device="cpu")
    budget = plain.start_bytes + int(0.8 * plain.activation_bytes)
    ours = probe.peak_bytes(lambda: train(lambda model: open_offloader(model, budget=budget)), device="cpu")
    assert ours.result == plain.result
    assert ours.peak_bytes <= 1.05 * budget  # its history grows within a step, which is measured as a whole
