"""Steps that follow a plan: equal to plain PyTorch to the bit, bytes as planned, and safe to leave at any place."""

import contextlib
import functools
import gc

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from training_loops import Transformer, batches, loss_of, simple_step

from penstock import probe
from penstock.offload import training
from penstock.state import verify
from penstock.state._copies import Copies
from penstock.state._replay import Replay

MIB = 2**20
NUM_STEPS = 12


@pytest.fixture(autouse=True)
def _planned(monkeypatch):
    """Wait for the plan of every kind of step as soon as it is measured."""
    monkeypatch.setattr(Replay, "prepare", functools.partialmethod(Replay.prepare, is_waited_for=True))


def make_model(recompute=None, dropout=0.1):
    torch.manual_seed(0)
    return Transformer(dropout=dropout, recompute=recompute)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def clipped_step(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accumulated_step(model, optimizer, tokens):
    losses = []
    for part in tokens.split(2):
        loss = loss_of(model, part) / 2
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def half_step(model, optimizer, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.item()


STEPS = {"simple": simple_step, "clipped": clipped_step, "accumulated": accumulated_step, "half": half_step}


@contextlib.contextmanager
def opened(tmp_path, model, optimizer, share, room=2 * MIB, **options):
    """A training that holds a share of parameters, gradients and states, and what activations take."""
    gc.collect()
    own_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget = probe.held_bytes("cpu") - own_bytes + int(4 * own_bytes * share) + room
    with contextlib.closing(training(model, optimizer, budget, disk=tmp_path, **options)) as context:
        yield context


def plainly(step, recompute=None, num_steps=NUM_STEPS, options=None):
    model = make_model(recompute)
    optimizer = make_optimizer(model)
    torch.manual_seed(1)
    losses = [step(model, optimizer, tokens) for tokens in batches(num_steps)]
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(losses, model, plain):
    assert losses == plain[0]
    assert all(map(torch.equal, model.parameters(), plain[1]))


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("recompute", [None, "not reentrant"])
@pytest.mark.parametrize("name", STEPS)
def test_replayed_steps_are_plains(tmp_path, name, recompute, share):
    step = STEPS[name]
    plain = plainly(step, recompute)
    model = make_model(recompute)
    optimizer = make_optimizer(model)
    with opened(tmp_path, model, optimizer, share) as context:
        pages = context._managed.pages
        torch.manual_seed(1)
        losses, moved = [], []
        for tokens in batches(NUM_STEPS):
            with context:
                losses.append(step(model, optimizer, tokens))
            copies = pages.copies
            script = pages.replay.script_of(pages.course.last)
            moved.append((sum(copies.fetched_bytes.values()), sum(copies.parked_bytes.values()), script))
        assert pages.replay.num_steps >= 3
        assert context._progress.peak_bytes <= pages.course.budget_bytes  # that of the last step that was measured
        problem, plan = script.ordered.problem, script.planned.plan
        verify(problem, plan)
        (_, _, before), (in_before, out_before, same), (in_after, out_after, _) = moved[-3:]
        assert before is same is script
        assert out_after - out_before == plan.out_bytes(problem)
        assert in_after - in_before == plan.in_bytes(problem)
        assert plan.in_bytes(problem) > 0
    assert_equal(losses, model, plain)


def micro_steps(context, model, optimizer, num_turns, seen=None):
    """Train with a context around each of three micro-batches."""
    losses = []
    for number, tokens in enumerate(batches(3 * num_turns)):
        with context:
            loss = loss_of(model, tokens)
            loss.backward()
            losses.append(loss.item())
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        if seen is not None:
            seen()
    return losses


@pytest.mark.parametrize("recompute", [None, "not reentrant"])
def test_steps_that_come_in_turns_have_a_plan_together(tmp_path, recompute):
    num_turns = 14  # the plan of step 32, which is measured again, is followed from the turn after that
    model = make_model(recompute)
    torch.manual_seed(1)
    plain = micro_steps(contextlib.nullcontext(), model, make_optimizer(model), num_turns), list(model.parameters())
    model = make_model(recompute)
    optimizer = make_optimizer(model)
    with opened(tmp_path, model, optimizer, 0.4) as context:
        replay, copies = context._managed.pages.replay, context._managed.pages.copies
        moved = []

        def note():
            script = replay.script_of(context._managed.pages.course.last)
            fetched, parked = sum(copies.fetched_bytes.values()), sum(copies.parked_bytes.values())
            moved.append((fetched, parked, replay.num_steps, script and script.planned))

        torch.manual_seed(1)
        losses = micro_steps(context, model, optimizer, num_turns, note)
        script = replay.script_of(context._managed.pages.course.last)
        problem, plan = script.ordered.problem, script.planned.plan
        verify(problem, plan)
        assert len({id(planned) for _, _, _, planned in moved[-4:]}) == 1
        pairs = zip(moved[-1][:3], moved[-4][:3], strict=True)
        fetched, parked, num_steps = (after - before for after, before in pairs)
        assert num_steps == 3
        assert fetched == plan.in_bytes(problem) > 0
        assert parked == plan.out_bytes(problem) > 0
        assert context.statistics().predicted_step_s == pytest.approx(script.planned.simulated.step_s / 3)
    assert_equal(losses, model, plain)


class Mixed(torch.nn.Module):
    """Matrices, and between them vectors of 24 KiB."""

    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(256, 256) / 16) for _ in range(8)])
        self.vectors = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(24, 256)) for _ in range(32)])

    def forward(self, x):
        for number, vector in enumerate(self.vectors):
            x = torch.tanh(x @ self.matrices[number // 4]) * vector.mean(0)
        return x.sum()


@pytest.mark.parametrize("begin_s", [0.0, 1e-3])
def test_small_pages_stay_where_copies_are_dear_to_begin(tmp_path, monkeypatch, begin_s):
    monkeypatch.setattr(Copies, "begin_s", begin_s)
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with opened(tmp_path, model, optimizer, 0.5) as context:
        for _ in range(6):
            with context:
                model(torch.ones(8, 256)).backward()
                optimizer.step()
                optimizer.zero_grad()
        script = context._managed.pages.replay.script_of(context._managed.pages.course.last)
        pages, copies = script.ordered.problem.pages, script.planned.plan.copies_in
        small = [copy for copy in copies if pages[copy.page].size_bytes == 24 * 2**10]
        assert script.ordered.problem.rates.copy_s == max(begin_s, 8e-6)
        assert copies
        assert bool(small) == (begin_s == 0.0)


class Interrupted(Exception):
    """What a user's code raises."""


def trained_with_troubles(context, model, optimizer, trouble, num_steps=NUM_STEPS + 3):
    """Train, with some trouble in a step that a plan would have made; without a context plainly."""
    kept, losses = [], []
    for number, tokens in enumerate(batches(num_steps)):
        with context or contextlib.nullcontext():
            losses.append(trouble(model, optimizer, tokens, kept, is_now=number in (NUM_STEPS - 3, NUM_STEPS)))
    return losses


def reads_a_parameter(model, optimizer, tokens, kept, *, is_now):
    loss = loss_of(model, tokens)
    if is_now:
        kept.append(float(model.blocks[0].layers[0].weight.detach().square().sum()))
    loss.backward()
    if is_now:
        kept.append(float(model.blocks[2].layers[2].weight.grad.sum()))
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def keeps_activations(model, optimizer, tokens, kept, *, is_now):
    hooks = []
    if is_now:  # they must live on although the plan gives their memory to others
        hooks = [
            block.layers[1].register_forward_hook(lambda module, inputs, output: kept.append(output.detach()))
            for block in model.blocks
        ]
    loss = simple_step(model, optimizer, tokens)
    for hook in hooks:
        hook.remove()
    return loss


def is_longer(model, optimizer, tokens, kept, *, is_now):
    return simple_step(model, optimizer, torch.cat([tokens, tokens], 1) if is_now else tokens)


def is_interrupted(model, optimizer, tokens, kept, *, is_now):
    if is_now:
        with contextlib.suppress(Interrupted):
            hook = model.blocks[1].register_forward_pre_hook(interrupt)
            try:
                model(tokens)
            finally:
                hook.remove()
    return simple_step(model, optimizer, tokens)


def interrupt(module, inputs):
    raise Interrupted


def evaluates(model, optimizer, tokens, kept, *, is_now):
    if is_now:
        model.eval()
        with torch.no_grad():
            kept.append(float(loss_of(model, tokens)))
        model.train()
    return simple_step(model, optimizer, tokens)


def skips_the_update(model, optimizer, tokens, kept, *, is_now):
    loss = loss_of(model, tokens)
    loss.backward()
    if not is_now:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


TROUBLES = [reads_a_parameter, keeps_activations, is_longer, is_interrupted, evaluates, skips_the_update]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_a_step_that_does_otherwise_leaves_the_plan(tmp_path, trouble):
    model = make_model()
    optimizer = make_optimizer(model)
    torch.manual_seed(1)
    plain = trained_with_troubles(None, model, optimizer, trouble), [*map(torch.clone, model.parameters())]
    model = make_model()
    optimizer = make_optimizer(model)
    with opened(tmp_path, model, optimizer, 0.35) as context:
        torch.manual_seed(1)
        losses = trained_with_troubles(context, model, optimizer, trouble)
        replay = context._managed.pages.replay
        assert 3 <= replay.num_steps <= NUM_STEPS  # some before the trouble, and others after it
        assert replay.num_left >= 1
    assert_equal(losses, model, plain)


def forward_and_stop(model, tokens):
    loss_of(model, tokens)
    raise Interrupted


def test_steps_that_are_broken_off_and_reads_between_steps(tmp_path):
    plain = plainly(simple_step)
    model = make_model()
    optimizer = make_optimizer(model)
    with opened(tmp_path, model, optimizer, 0.35) as context:
        torch.manual_seed(1)
        losses = []
        for number, tokens in enumerate(batches(NUM_STEPS)):
            state = torch.get_rng_state()
            if number == NUM_STEPS - 3:
                with pytest.raises(Interrupted), context:
                    forward_and_stop(model, tokens)
                torch.set_rng_state(state)
            with context:
                losses.append(simple_step(model, optimizer, tokens))
            if number == NUM_STEPS - 2:
                context.save(tmp_path / "checkpoint")
                assert float(model.head.weight.detach().sum()) != 0
        assert context._managed.pages.replay.num_steps >= 3
    assert_equal(losses, model, plain)
