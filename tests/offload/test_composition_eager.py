"""Offloading in eager PyTorch: whatever training does, its numbers stay equal to the bit."""

import contextlib
import gc
import itertools
import os
import threading
import weakref
from functools import partial

import pytest
import torch
from _helpers import (
    OPTIONS,
    Mlp,
    Run,
    assert_moved,
    assert_nothing_leaked,
    assert_same,
    assert_trains_equal,
    everything_parked,
    forward_backward,
    mlp_loss,
    note,
    num_changes,
    settle,
    train,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from penstock import offload
from penstock.errors import DoubleBackwardError, ForkedProcessError, OffloadDeclinedWarning

pytestmark = pytest.mark.usefixtures("one_thread")
INPLACE = "modified by an inplace operation"


@pytest.fixture
def planned():
    """Plans park everything, in tests that do not go through ``assert_trains_equal``."""
    with everything_parked():
        yield


@pytest.fixture
def offloading(tmp_path, planned):
    """Makes offloaders and closes them."""
    with contextlib.ExitStack() as made:

        def make(model, **options):
            offloader = offload.activations(model, disk=tmp_path, **OPTIONS | options)
            made.callback(offloader.close)
            return offloader

        yield make


# ---------------------------------------------------------------------------------------------------- plain training


@pytest.mark.parametrize("min_size", [0, "4KiB"])
@pytest.mark.parametrize("max_in_flight", ["16KiB", "1MiB"])
def test_trains_equal(tmp_path, min_size, max_in_flight):
    assert_trains_equal(Mlp, forward_backward(mlp_loss), tmp_path, min_size=min_size, max_in_flight=max_in_flight)


def test_trains_equal_while_copies_race_with_backward(tmp_path):
    def step(model, index, settle):
        loss = mlp_loss(model)
        if index == 0:
            settle()
        loss.backward()
        return loss.detach()

    assert_trains_equal(Mlp, step, tmp_path, num_steps=8)


def test_trains_equal_with_the_planner_free_to_keep(tmp_path):
    expected = train(Mlp, forward_backward(mlp_loss), num_steps=6)
    actual = train(
        Mlp,
        forward_backward(mlp_loss),
        lambda model: offload.activations(model, disk=tmp_path, **OPTIONS),
        num_steps=6,
    )
    assert_same(expected, actual)


def test_max_stall_of_1_never_declines_for_time():
    """As ``OffloadProblem`` says; packing a single tensor can take longer than the step around it."""
    storage = offload.SavedStorage(size_bytes=2**20, label="", pack_event=0, need_event=2, free_event=3)
    problem = offload.OffloadProblem(
        storages=(storage,),
        event_times_s=(0.0, 0.001, 0.002),
        step_s=0.002,
        out_bandwidth_bytes_per_s=1e10,
        in_bandwidth_bytes_per_s=1e10,
        overhead_s=0.003,
        max_stall_share=1.0,
        min_saving_share=0.0,
    )
    assert not offload.plan(problem).declined


# ------------------------------------------------------------------------------------------------- checkpointed blocks


def save_matmuls(_, operator, *args, **keywords):
    from torch.utils.checkpoint import CheckpointPolicy

    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_matmuls),
    ),
}


@pytest.mark.parametrize("inputs_only", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_blocks(tmp_path, kind, inputs_only):
    run = assert_trains_equal(
        lambda: Mlp(call=CHECKPOINTS[kind]),
        forward_backward(mlp_loss),
        tmp_path,
        checkpoint_inputs_only=inputs_only,
    )
    if inputs_only:
        input_bytes = 96 * 32 * 4
        num_parked = 3
        if kind == "selective":  # its cache holds a block's last product, which is the next one's input
            num_parked = 1
            assert run.statistics[-1].kept_bytes["kept: held elsewhere, parking frees nothing"] == 2 * input_bytes
        planned = [statistic.saved_bytes - sum(statistic.kept_bytes.values()) for statistic in run.statistics]
        assert planned == [3 * input_bytes] + [num_parked * input_bytes] * 3
        assert run.statistics[0].parked_bytes == 3 * input_bytes
        assert run.statistics[0].kept_bytes["kept: not a checkpoint's input"] > 0


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant"])
def test_nested_checkpoints_with_dropout(tmp_path, kind):
    inner = CHECKPOINTS[kind]

    def call(block, x):
        return CHECKPOINTS[kind](lambda x: functional.dropout(inner(block, x), 0.3) + x, x)

    assert_trains_equal(lambda: Mlp(call=call), forward_backward(mlp_loss), tmp_path)


# ----------------------------------------------------------------------------------------------------------- autocast


def test_autocast_keeps_cached_casts_of_weights(tmp_path):
    seen = []

    def policy(tensor):
        seen.append(tensor)
        return True

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 3, padding=1)
            self.mlp = Mlp()

        def forward(self, x):
            return self.mlp(self.convolution(x).mean(dim=1).flatten(1))

    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(40, 3, 4, 4)).float().square().mean()

    assert_trains_equal(Net, forward_backward(forward), tmp_path, policy=policy)
    weights = {tuple(parameter.shape) for parameter in Net().parameters()}
    weights |= {shape[::-1] for shape in weights}
    assert any(tensor.dtype == torch.bfloat16 for tensor in seen)
    assert not [tensor for tensor in seen if tensor.shape in weights]


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant"])
def test_autocast_around_checkpoints(tmp_path, kind):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return mlp_loss(model).float()

    assert_trains_equal(lambda: Mlp(call=CHECKPOINTS[kind]), forward_backward(forward), tmp_path)


# ----------------------------------------------------------------------------------- micro-batches and their backwards


@pytest.mark.parametrize("context_per_batch", [False, True])
def test_gradient_accumulation(offloading, context_per_batch):
    def accumulate(offloader=None):
        run = Run()
        torch.manual_seed(1)
        model = Mlp()
        outer = inner = contextlib.nullcontext()
        if offloader := offloading(model) if offloader else None:
            outer, inner = (inner, offloader) if context_per_batch else (offloader, inner)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            with outer:
                for _ in range(2):
                    with inner:
                        loss = mlp_loss(model)
                        if offloader:
                            settle(offloader)
                        loss.backward()
            note(run, model, loss)
            optimizer.step()
            optimizer.zero_grad()
        if offloader:
            del loss
            assert offloader.statistics().num_steps == 6
            assert num_changes(offloader) == 0
            assert_nothing_leaked(offloader)
            assert_moved(offloader)
        return run

    assert_same(accumulate(), accumulate(True))


def interleaved(order):
    """A step that runs the micro-batches as ``order`` says: a number's first turn is its forward, the next backward."""

    def step(model, index, settle):
        losses = {}
        total = torch.zeros(())
        for batch in order:
            if batch in losses:
                settle()
                losses.pop(batch).backward()
            else:
                torch.manual_seed(batch)
                losses[batch] = mlp_loss(model)
                total += losses[batch].detach()
        return total

    return step


@pytest.mark.parametrize("backwards", list(itertools.permutations(range(3))))
def test_backwards_in_any_order(tmp_path, backwards):
    assert_trains_equal(Mlp, interleaved([0, 1, 2, *backwards]), tmp_path, num_steps=3)


@hypothesis_settings(max_examples=12, deadline=None)
@given(order=st.permutations([0, 0, 1, 1, 2, 2, 3, 3]))
def test_forwards_and_backwards_interleave(tmp_path_factory, order):
    step, disk = interleaved(order), tmp_path_factory.mktemp("disk")
    assert_trains_equal(partial(Mlp, num_blocks=1), step, disk, num_steps=3, follows_plan=False)


def test_the_order_may_change_from_step_to_step(tmp_path):
    orders = [(0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 0, 1, 0), (0, 1, 2, 2, 0, 1), (0, 0)]

    def step(model, index, settle):
        return interleaved(orders[index % len(orders)])(model, index, settle)

    assert_trains_equal(Mlp, step, tmp_path, num_steps=12, follows_plan=False)


# --------------------------------------------------------------------------------------- retained and refused graphs


@pytest.mark.parametrize("consumes", [False, True])
def test_retained_graph(tmp_path, offloading, consumes):
    def step(model, index, settle):
        loss = mlp_loss(model)
        settle()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=not consumes)
        return loss.detach()

    assert_trains_equal(Mlp, step, tmp_path)


def test_bytes_stay_parked_until_a_retained_graph_dies(offloading):
    model = Mlp()
    offloader = offloading(model)
    with offloader:
        loss = mlp_loss(model)
        settle(offloader)
        held_bytes = offloader.tier_statistics().held_bytes["disk"]
        loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    gc.collect()
    assert offloader.tier_statistics().held_bytes["disk"] == held_bytes > 0
    loss.backward(retain_graph=True)  # outside the context, as anything after the forward may be
    assert all(
        torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), first, strict=True)
    )
    assert offloader.tier_statistics().held_bytes["disk"] == held_bytes
    del loss
    assert_nothing_leaked(offloader)
    assert_moved(offloader)


def test_double_backward_is_refused_and_training_goes_on(tmp_path):
    def step(model, index, settle):
        if index in (0, 2):
            loss = mlp_loss(model)
            settle()
            with contextlib.suppress(DoubleBackwardError):
                torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            del loss
        return forward_backward(mlp_loss)(model, index, settle)

    assert_trains_equal(Mlp, step, tmp_path, follows_plan=False, num_steps=6)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("min_size", [0, "1GiB"])
def test_double_backward_raises(offloading, min_size):
    model = Mlp()
    offloader = offloading(model, min_size=min_size)
    with offloader:
        loss = mlp_loss(model)
        with pytest.raises(DoubleBackwardError, match="create_graph=True"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        with pytest.raises(DoubleBackwardError):
            loss.backward(create_graph=True)
    del loss
    assert_nothing_leaked(offloader)


class Recomputed(torch.autograd.Function):
    """Recomputes in backward, as reversible layers do: reads what it saved while gradients are enabled."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            y = torch.tanh(x @ weight)
        return torch.autograd.grad(y, (x, weight), gradient)


class Scaled(torch.autograd.Function):
    """Saves an input, an output, something in between, and a number."""

    @staticmethod
    def forward(ctx, x, weight):
        hidden = (x @ weight).exp()
        y = hidden / (1 + hidden)
        ctx.save_for_backward(x, weight, hidden, y)
        ctx.factor = 2.0
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, weight, hidden, y = ctx.saved_tensors
        inner = ctx.factor * gradient * y / (1 + hidden)
        return inner @ weight.T, x.T @ inner


@pytest.mark.parametrize("function", [Scaled, Recomputed])
def test_custom_functions(tmp_path, function):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x):
            for _ in range(3):
                x = function.apply(x, self.weight)
            return x

    assert_trains_equal(Net, forward_backward(mlp_loss), tmp_path)


# ---------------------------------------------------------------------------------- graphs that never see a backward


def test_forward_without_backward_leaks_nothing_and_training_goes_on(tmp_path):
    def step(model, index, settle):
        if index % 2:
            mlp_loss(model)
        return forward_backward(mlp_loss)(model, index, settle)

    assert_trains_equal(Mlp, step, tmp_path, follows_plan=False, num_steps=6)


def test_a_pending_forward_may_run_its_backward_steps_later(tmp_path):
    waiting = []

    def step(model, index, settle):
        if index < 4:
            waiting.append(model.head(model.embed(torch.randn(96, 16))).exp().mean())
        loss = mlp_loss(model)
        settle()
        loss.backward()
        return loss.detach()

    def finish(model, index):
        if len(waiting) == 2:
            model.zero_grad()
            while waiting:
                with contextlib.suppress(RuntimeError):  # the optimizer has changed the weights meanwhile
                    waiting.pop().backward()

    assert_trains_equal(Mlp, step, tmp_path, follows_plan=False, num_steps=5, between=finish)


@pytest.mark.parametrize("min_size", [0, "16KiB", "1GiB"])
@pytest.mark.parametrize(
    "operation",
    [
        torch.tanh,
        torch.relu,
        torch.exp,
        partial(torch.softmax, dim=1),
        Scaled.apply,
        functional.dropout,
    ],
    ids=["tanh", "relu", "exp", "softmax", "custom", "dropout"],
)
def test_an_abandoned_graph_frees_what_it_saved(offloading, operation, min_size):
    """Many operations save their own result, which must not keep itself alive through the graph."""
    model = nn.Linear(32, 32)
    offloader = offloading(model, min_size=min_size)
    with offloader:
        hidden = model(torch.randn(32, 32))
        result = operation(hidden, torch.eye(32)) if operation == Scaled.apply else operation(hidden)
        watched = [StorageWeakRef(tensor.untyped_storage()) for tensor in (hidden, result)]
        del hidden, result
    assert_nothing_leaked(offloader)
    assert all(weak.expired() for weak in watched)


def test_an_offloader_dies_with_its_last_reference(offloading, tmp_path):
    model = Mlp()
    offloader = offload.activations(model, disk=tmp_path, **OPTIONS)
    with offloader:
        mlp_loss(model).backward()
    offloader.close()
    gone = weakref.ref(offloader)
    del offloader, model
    gc.collect()
    assert gone() is None


# -------------------------------------------------------------------------------------------------- errors in mid-step


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(offloading, where):
    def call(block, x):
        x = block(x)
        if call.fails and where == "forward":
            raise ArithmeticError("in forward")
        return FailsInBackward.apply(x) if call.fails else x

    def run_once(with_offloader):
        run = Run()
        torch.manual_seed(1)
        model = Mlp(call=call)
        offloader = offloading(model) if with_offloader else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(7):
            call.fails = index in (0, 3)
            optimizer.zero_grad()
            torch.manual_seed(index)
            try:
                with offloader or contextlib.nullcontext():
                    loss = mlp_loss(model)
                    if offloader:
                        settle(offloader)
                    loss.backward()
            except ArithmeticError:
                continue
            note(run, model, loss)
            del loss
            optimizer.step()
        if offloader:
            assert offloader.statistics().num_steps == 5
            assert_nothing_leaked(offloader)
            assert_moved(offloader)
        return run

    assert_same(run_once(False), run_once(True))


@pytest.mark.parametrize("which", ["the same", "another"])
def test_contexts_do_not_nest(offloading, which):
    model = Mlp()
    offloader = offloading(model)
    other = offloader if which == "the same" else offloading(model)
    with offloader:
        loss = mlp_loss(model)
        with pytest.raises(ValueError, match="do not nest"), other:
            pass
        settle(offloader)
        loss.backward()
    assert offloader.statistics().num_steps == 1
    assert_moved(offloader)
    with other:
        mlp_loss(model).backward()
    del loss
    assert_nothing_leaked(offloader)
    assert_nothing_leaked(other)


def test_a_closed_offloader_is_refused(offloading):
    offloader = offloading(Mlp())
    offloader.close()
    with pytest.raises(ValueError, match="closed"), offloader:
        pass


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_evaluation_inside_parks_nothing(tmp_path, offloading, quiet):
    model = Mlp()
    offloader = offloading(model)
    with offloader, quiet():
        mlp_loss(model)
    assert offloader.tier_statistics().parked_bytes == 0
    assert offloader.statistics().num_steps == 0

    def step(model, index, settle):
        with quiet():
            before = mlp_loss(model)
        loss = mlp_loss(model)
        with quiet():
            after = mlp_loss(model)
        settle()
        loss.backward()
        return torch.stack([before, loss.detach(), after]).clone()

    assert_trains_equal(Mlp, step, tmp_path)


def change_dtype(model, index):
    if index == 3:
        model.double()
    if index == 6:
        model.float()


def move(model, index):
    if index % 3 == 2:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=False)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


@pytest.mark.parametrize("between", [change_dtype, move])
def test_the_model_changes_between_steps(offloading, between):
    def run_once(with_offloader):
        run, seen = Run(), []
        torch.manual_seed(1)
        model = Mlp()
        policy = lambda tensor: not seen.append(tensor.shape)  # noqa: E731
        offloader = offloading(model, policy=policy) if with_offloader else None
        for index in range(9):
            between(model, index)
            with offloader or contextlib.nullcontext():
                loss = model(torch.randn(96, 16, dtype=model.head.weight.dtype)).square().mean()
                if offloader:
                    settle(offloader)
                loss.backward()
            note(run, model, loss)
            del loss
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
        if offloader:
            weights = {tuple(parameter.shape) for parameter in model.parameters()}
            assert not weights & set(seen)
            assert_nothing_leaked(offloader)
            assert_moved(offloader)
        return run

    assert_same(run_once(False), run_once(True))


def test_blocks_may_be_frozen_between_steps(tmp_path):
    def between(model, index):
        model.blocks[0].requires_grad_(index % 2 == 0)
        model.embed.requires_grad_(index % 2 == 0)

    assert_trains_equal(Mlp, forward_backward(mlp_loss), tmp_path, between=between, follows_plan=False, num_steps=8)


# --------------------------------------------------------------------------------------------------- in-place changes


def change_hidden(model, hidden):
    hidden.mul_(2)


def change_a_view(model, hidden):
    hidden[1:3].zero_()


def change_weight(model, hidden):
    with torch.no_grad():
        model.head.weight.add_(1)


@pytest.mark.parametrize("change", [change_hidden, change_a_view, change_weight])
@pytest.mark.parametrize("options", [{}, {"min_size": "1MiB"}, {"min_size": "16KiB"}, {"policy": lambda _: False}])
@pytest.mark.parametrize("with_settle", [False, True])
def test_an_in_place_change_after_saving_raises(offloading, change, options, with_settle):
    def forward(model):
        hidden = torch.tanh(model.embed(torch.randn(96, 16)))
        loss = model.head(hidden).square().mean()
        return hidden, loss

    model = Mlp()
    hidden, loss = forward(model)
    with torch.no_grad():
        change(model, hidden.detach())
    with pytest.raises(RuntimeError, match=INPLACE):
        loss.backward()

    offloader = offloading(model, **options)
    with offloader:
        hidden, loss = forward(model)
        if with_settle:
            settle(offloader)
        with torch.no_grad():
            change(model, hidden.detach())
        with pytest.raises(RuntimeError, match=INPLACE):
            loss.backward()
    del hidden, loss
    gc.collect()
    for _ in range(2):
        with offloader:
            forward(model)[1].backward()
    assert_nothing_leaked(offloader)


def test_in_place_operations_that_pytorch_allows(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.buffer = torch.zeros(96, 16)

        def forward(self, x):
            self.buffer.copy_(x)  # the batch's place, written anew in each step
            x = self.buffer
            for layer in self.layers:
                y = functional.relu(layer(x), inplace=True)
                x = (x + y).add_(1).sigmoid_()
                x = torch.cat([x, y]).clamp_(max=2)[:96].mul(2)
                x[0].copy_(x[1].detach())
            return x

    assert_trains_equal(Net, forward_backward(mlp_loss), tmp_path)


def test_both_versions_of_a_storage_are_saved(tmp_path):
    """The first is used up before the change; the second must not be taken for it."""

    def step(model, index, settle):
        x = torch.randn(96, 16)
        first = model(x).exp().mean()
        settle()
        first.backward()
        x.mul_(3)
        second = model(x).exp().mean()
        settle()
        second.backward()
        return first.detach() + second.detach()

    assert_trains_equal(lambda: nn.Linear(16, 16), step, tmp_path, follows_plan=False)


# ------------------------------------------------------------------------------------------------ views and layouts


class Weighted(nn.Module):
    """One weight, and a function of it and the batch."""

    def __init__(self, shape, function, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype) / 4)
        self.function = function

    def forward(self):
        return self.function(self.weight)


def qkv_slices(weight):
    query, key, value = (torch.randn(96, 16) @ weight).chunk(3, dim=1)
    return (query * key * value + key * query).sum()


def fused_attention(weight):
    query, key, value = (torch.randn(2, 24, 16) @ weight).view(2, 24, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).square().sum()


def equal_slices(weight):
    whole = (torch.randn(64, 16) @ weight).tanh()
    parts = whole.unbind(0)
    total = 0.0
    for left, right in itertools.pairwise(parts[:12]):
        total = total + (left * right).sum() * (1 + left).log1p().sum()
    return total


def expanded(weight):
    row = (torch.randn(1, 16) @ weight).tanh()
    return (row.expand(96, -1) * (torch.randn(96, 16) @ weight)).exp().mean()


def not_contiguous(weight):
    x = (torch.randn(48, 40, 16) @ weight).permute(2, 0, 1)[::2, 3:, ::3]
    return (x * x.transpose(1, 2).flip(1).transpose(1, 2)).sigmoid().mean()


def sliced_storage(weight):
    x = (torch.randn(96, 16) @ weight)[10:20, 4:]
    return x.exp().square().mean()


def complex_conjugates(weight):
    x = torch.randn(96, 16, dtype=torch.complex64) @ weight
    y = x.conj() * torch.randn_like(x)
    return (y @ x.mH).abs().mean() + (y.conj().imag * x.real).mean()


def fourier(weight):
    spectrum = torch.fft.rfft(torch.randn(96, 16) @ weight)
    return (spectrum * spectrum.roll(1, 0).conj()).abs().mean()


def nothing_at_all(weight):
    empty = torch.randn(0, 16) @ weight
    x = torch.randn(96, 16) @ weight
    return (empty * empty.exp()).sum() + (x * x.exp()).mean()


def parts_that_count_versions_apart(weight):
    """As in recurrent cells: each part of one storage is changed in place, then saved, at a version of its own."""
    reset, update, new = (torch.randn(96, 16) @ weight).unsafe_chunk(3, dim=1)
    reset = reset.add_(1).sigmoid_()
    update = update.add_(2).sigmoid_()
    new = new.mul_(reset).tanh_()
    return (update * new).square().mean()


def scalars(weight):
    x = (torch.randn(96, 16) @ weight).square()
    return (x.sum().sqrt() * x.mean().exp()).tanh() + x.var().log()


def other_dtypes(weight):
    x = (torch.randn(96, 16) @ weight).to(torch.float16)
    chosen = x.argsort(dim=0)
    return torch.where(x > 0, x.gather(0, chosen), x.square()).float().masked_fill(x < -1, 0).std()


LAYOUTS = [
    (qkv_slices, (16, 48), torch.float32),
    (fused_attention, (16, 48), torch.float32),
    (equal_slices, (16, 16), torch.float32),
    (expanded, (16, 16), torch.float32),
    (not_contiguous, (16, 16), torch.float32),
    (sliced_storage, (16, 16), torch.float32),
    (complex_conjugates, (16, 16), torch.complex64),
    (fourier, (16, 16), torch.float32),
    (nothing_at_all, (16, 16), torch.float32),
    (parts_that_count_versions_apart, (16, 48), torch.float32),
    (scalars, (16, 16), torch.float32),
    (other_dtypes, (16, 16), torch.float32),
]


@pytest.mark.parametrize(("function", "shape", "dtype"), LAYOUTS, ids=lambda one: getattr(one, "__name__", ""))
def test_views_and_layouts(tmp_path, function, shape, dtype):
    assert_trains_equal(lambda: Weighted(shape, function, dtype), forward_backward(lambda model: model()), tmp_path)


def test_slices_of_one_storage_are_parked_once(offloading):
    """Three slices are saved, some twice; their storage counts once, and so does their product."""
    model = Weighted((16, 48), lambda weight: None)
    x = torch.randn(96, 16)
    offloader = offloading(model)
    with offloader:
        fused = x @ model.weight
        query, key, value = fused.chunk(3, dim=1)
        mixed = query * key
        loss = (mixed * value + key * query).sum()
        size_bytes = x.nbytes + fused.nbytes + mixed.nbytes
        del fused, query, key, value, mixed
        settle(offloader)
        loss.backward()
    statistics = offloader.statistics()
    assert statistics.saved_bytes == size_bytes
    assert statistics.parked_bytes == size_bytes
    assert statistics.fetched_bytes == size_bytes - x.nbytes
    assert statistics.forwarded_bytes == x.nbytes  # still held here


def test_a_storage_saved_by_two_graphs_stays_until_both_are_done(offloading):
    model = Weighted((16, 16), lambda weight: None)
    with torch.no_grad():
        shared = (torch.randn(96, 16) * 3).tanh()
    expected = torch.autograd.grad((shared @ model.weight).exp().sum(), model.weight)[0]
    offloader = offloading(model)
    with offloader:
        losses = [(shared @ model.weight).exp().sum() for _ in range(2)]
        shared = None
        settle(offloader)
        for loss in losses:
            model.weight.grad = None
            loss.backward()
            assert torch.equal(model.weight.grad, expected)
    del losses, loss
    assert_moved(offloader)
    assert_nothing_leaked(offloader)


# ------------------------------------------------------------------------------------------------------------- layers


class FromImages(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.view(-1, 1, 12, 8))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(8, 12, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x.view(-1, 12, 8))[0]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        tokens = torch.randint(32, (6, 20))
        logits = self.head(self.layers(self.embed(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(16, 16, 8)
        self.prelu = nn.PReLU(8)

    def forward(self, x):
        return self.prelu(self.layer(x, x.sin()))


LAYERS = {
    "dropout": lambda: nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8)),
    "batch norm": lambda: nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.BatchNorm1d(64)),
    "convolution": lambda: FromImages(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.GroupNorm(2, 8),
        nn.AvgPool2d(2),
    ),
    "transposed convolution": lambda: FromImages(nn.Conv2d(1, 4, 3, stride=2), nn.PReLU(), nn.ConvTranspose2d(4, 2, 3)),
    "lstm": lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.1, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attending,
    "norms": lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Softmax(-1), nn.RMSNorm(32), nn.GLU()),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)),
        nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(32, 8)),
    ),
    "bilinear": Bilinear,
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(tmp_path, kind):
    assert_trains_equal(LAYERS[kind], forward_backward(mlp_loss), tmp_path)


def test_tied_weights_and_a_model_called_twice(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x))) @ self.first.weight.T

    def forward(model):
        return model(torch.randn(96, 16)).square().mean() + model(torch.randn(80, 16)).exp().mean()

    assert_trains_equal(Tied, forward_backward(forward), tmp_path)


def test_hooks_of_the_user_still_see_everything(tmp_path):
    def forward(model):
        hidden = model.embed(torch.randn(96, 16))
        hidden.register_hook(lambda gradient: gradient * 2)
        hidden.retain_grad()
        return model.head(model.blocks[0](hidden)).square().mean()

    assert_trains_equal(Mlp, forward_backward(forward), tmp_path)


def test_an_optimizer_inside_backward(tmp_path):
    """Weights change as soon as their gradients are whole, while backward goes on."""

    def build():
        model = Mlp()

        def update(parameter):
            parameter.data.add_(parameter.grad, alpha=-0.1)
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return model

    assert_trains_equal(build, forward_backward(mlp_loss), tmp_path)


def test_backward_in_another_thread(tmp_path):
    def step(model, index, settle):
        loss = mlp_loss(model)
        settle()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss.detach()

    assert_trains_equal(Mlp, step, tmp_path)


def test_inner_saved_tensor_hooks_win(tmp_path):
    def forward(model):
        hidden = model.embed(torch.randn(96, 16))
        with torch.autograd.graph.save_on_cpu():
            hidden = model.blocks[0](hidden)
        return model.head(hidden).square().mean()

    assert_trains_equal(Mlp, forward_backward(forward), tmp_path)


def test_functional_derivatives_inside(tmp_path):
    """``torch.func`` has saved tensors of its own; what it saves in the end is parked."""

    def forward(model):
        batch = torch.randn(96, 16)
        parameters = dict(model.named_parameters())
        return torch.vmap(lambda row: torch.func.functional_call(model, parameters, (row,)))(batch).square().mean()

    assert_trains_equal(Mlp, forward_backward(forward), tmp_path)


def test_chosen_modules_only(tmp_path):
    run = assert_trains_equal(Mlp, forward_backward(mlp_loss), tmp_path, modules=["blocks.*"], keep_last=["blocks.2"])
    assert run.statistics[-1].kept_bytes["kept: last modules"] > 0
    assert run.statistics[-1].kept_bytes["kept: module not chosen"] > 0


# ------------------------------------------------------------------------------------------------------ forked children


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_workers_start_while_lanes_are_busy(tmp_path):
    def step(model, index, settle):
        loss = mlp_loss(model)
        loader = torch.utils.data.DataLoader(Batches(), batch_size=6, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            loss = loss + model(batch).square().mean()
        settle()
        loss.backward()
        return loss.detach()

    assert_trains_equal(Mlp, step, tmp_path, num_steps=3)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_may_not_fetch(offloading):
    model = Weighted((64, 64), lambda weight: None)
    offloader = offloading(model)
    with offloader:
        loss = model.weight.exp().square().sum()
        settle(offloader)
        child = os.fork()
        if not child:
            code = 1
            try:
                loss.backward()
            except (ForkedProcessError, RuntimeError) as error:  # PyTorch's own, once its engine has threads
                is_refused = isinstance(error, ForkedProcessError) or "fork-based multiprocessing" in str(error)
                code = 42 if is_refused else 1
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 42
        loss.backward()  # the parent's bytes are as they were
    weight = model.weight.detach().exp()
    assert torch.allclose(model.weight.grad, 2 * weight * weight)
    del loss
    assert_moved(offloader)
    assert_nothing_leaked(offloader)


# ------------------------------------------------------------------------------------------------------------ wrapping


def test_a_wrapped_module_trains(tmp_path, planned):
    def run_once(wrapper):
        run = Run()
        torch.manual_seed(1)
        model = wrapper(Mlp())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            loss = mlp_loss(model)
            if isinstance(model, offload.OffloadedModule):
                settle(model.offloader)
            loss.backward()
            run.losses.append(loss.detach())
            optimizer.step()
        run.state = {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}
        return run, model

    expected, _ = run_once(lambda module: module)
    actual, model = run_once(lambda module: offload.wrap(module, disk=tmp_path, **OPTIONS))
    assert_same(expected, actual)
    assert_nothing_leaked(model.offloader)
    assert_moved(model.offloader)
    assert model.offloader.statistics().num_steps == 4
    model.offloader.close()


def test_a_wrapped_module_has_a_state_dict(tmp_path):
    torch.manual_seed(1)
    inner = Mlp()
    wrapped = offload.wrap(inner, disk=tmp_path, **OPTIONS)
    state = wrapped.state_dict()
    assert state.keys() == {f"module.{name}" for name in inner.state_dict()}
    other = offload.wrap(Mlp(), disk=tmp_path, **OPTIONS)
    other.load_state_dict(state)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    assert not wrapped.eval().module.training
    with torch.no_grad():
        batch = torch.randn(8, 16)
        assert torch.equal(wrapped(batch), inner(batch))
    for module in (wrapped, other):
        module.offloader.close()


def test_wrapped_blocks_of_a_larger_model(tmp_path):
    class Partly(nn.Module):
        def __init__(self, wrapper):
            super().__init__()
            self.first = wrapper(Mlp())
            self.second = wrapper(Mlp())

        def forward(self, x):
            return torch.cat([self.first(x), self.second(x.sin())]).exp()

    expected = train(lambda: Partly(lambda module: module), forward_backward(mlp_loss))
    models = []

    def build():
        models.append(Partly(lambda module: offload.wrap(module, disk=tmp_path, **OPTIONS)))
        return models[0]

    actual = train(build, forward_backward(mlp_loss))
    actual.gradients = [
        {name.replace("module.", ""): value for name, value in step.items()} for step in actual.gradients
    ]
    actual.state = {name.replace("module.", ""): value for name, value in actual.state.items()}
    assert_same(expected, actual)
    for block in (models[0].first, models[0].second):
        assert block.offloader.statistics().num_steps == 4
        assert_nothing_leaked(block.offloader)
        block.offloader.close()


# ------------------------------------------------------------------------------------------------------ torch.compile


def compile_in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def compile_replaced(model, backend):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return model


def compile_one(model, backend):
    model.blocks[1].compile(backend=backend)
    return model


@pytest.fixture
def compiler():
    """Leaves no compiled code behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [compile_in_place, compile_replaced, compile_one])
def test_compiled_blocks(tmp_path, compiler, compiled):
    assert_trains_equal(lambda: compiled(Mlp(), "aot_eager"), forward_backward(mlp_loss), tmp_path)


@pytest.mark.parametrize("compiled", [compile_in_place, compile_replaced])
def test_compiled_blocks_with_checkpoints_and_autocast(tmp_path, compiler, compiled):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return mlp_loss(model).float()

    assert_trains_equal(
        lambda: compiled(Mlp(call=CHECKPOINTS["not reentrant"]), "aot_eager"), forward_backward(forward), tmp_path
    )


def test_blocks_compiled_by_inductor(tmp_path, compiler):
    assert_trains_equal(
        lambda: compile_in_place(Mlp(num_blocks=2), "inductor"), forward_backward(mlp_loss), tmp_path, num_steps=3
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_declined(tmp_path, compiler, in_place):
    def build():
        model = Mlp()
        if in_place:
            model.compile(backend="aot_eager")
        return model if in_place else torch.compile(model, backend="aot_eager")

    expected = train(build, forward_backward(mlp_loss))
    torch.manual_seed(1)
    model = build()
    with pytest.warns(OffloadDeclinedWarning, match="one compiled region"):
        offloader = offload.activations(model, disk=tmp_path, **OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for index in range(4):
        torch.manual_seed(100 + index)
        optimizer.zero_grad()
        with offloader:
            loss = mlp_loss(model)
            loss.backward()
        assert torch.equal(loss.detach(), expected.losses[index])
        optimizer.step()
    assert "compiled" in offloader.statistics().declined
    assert offloader.tier_statistics().parked_bytes == 0
    offloader.close()
