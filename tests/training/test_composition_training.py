"""Inside of what others build: two ranks of DDP, adapters of PEFT, generation by transformers."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_loops import OPTIMIZERS, Transformer, batches, beside, loss_of, simple_step

from penstock import offload, probe, remat
from penstock.offload import training
from penstock.testing import GPT
from ranks import run_in_ranks


def train_in_a_group(rank, directory):
    """A model under DDP, plainly and within a budget, on other batches in each rank."""
    data = batches()[rank:] + batches()[:rank]
    torch.manual_seed(0)
    plain = Transformer(num_blocks=2)
    ours = copy.deepcopy(plain)
    losses = []
    wrapped, optimizer = DistributedDataParallel(plain), OPTIMIZERS["adamw"](plain)
    for tokens in data:
        losses.append(simple_step(wrapped, optimizer, tokens))
    wrapped, optimizer = DistributedDataParallel(ours), OPTIMIZERS["adamw"](ours)
    context = training(ours, optimizer, beside(ours, 10), disk=directory)
    for number, tokens in enumerate(data):
        with context:
            assert simple_step(wrapped, optimizer, tokens) == losses[number]
    assert context.statistics().fetched_bytes > 0
    context.close()
    assert all(
        torch.equal(parameter, two) for parameter, two in zip(plain.parameters(), ours.parameters(), strict=True)
    )


def test_two_ranks_of_ddp(tmp_path):
    run_in_ranks(train_in_a_group, tmp_path, directory=tmp_path)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_adapters_over_a_frozen_base(tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    def make():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
        )
        model = transformers.LlamaForCausalLM(config)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=32, lora_dropout=0.1))

    def step(model, optimizer, tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def optimizer_of(model):
        return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)

    plain, ours = make(), make()
    torch.manual_seed(1)
    optimizer = optimizer_of(plain)
    expected = [step(plain, optimizer, tokens) for tokens in batches()]
    optimizer = optimizer_of(ours)
    context = training(ours, optimizer, beside(ours, 5), disk=tmp_path)
    torch.manual_seed(1)
    losses = []
    for tokens in batches():
        with context:
            losses.append(step(ours, optimizer, tokens))
    statistics = context.statistics()
    context.close()
    assert losses == expected
    assert statistics.step_fetched["parameters"] > statistics.step_parked["parameters"]  # the base is never written
    assert all(
        torch.equal(parameter, two) for parameter, two in zip(plain.parameters(), ours.parameters(), strict=True)
    )


class Quantised(torch.Tensor):
    """Eight bits a number and a scale a row, as libraries of quantisation have it: a tensor made of two others."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(*(func(argument) for argument in (args[0].numbers, args[0].scale)))
        args = [argument.numbers * argument.scale if isinstance(argument, cls) else argument for argument in args]
        return func(*args, **(kwargs or {}))


class OverFrozen(nn.Module):
    """A quantised weight that nobody trains, and two small ones that are trained beside it."""

    def __init__(self, width, *, from_numpy):
        super().__init__()
        weight = torch.randn(width, width)
        scale = weight.abs().amax(1, keepdim=True) / 127
        numbers = (weight / scale).round().to(torch.int8)
        if from_numpy:  # whose memory nobody can empty
            numbers = torch.from_numpy(numbers.numpy().copy())
        self.weight = nn.Parameter(Quantised(numbers, scale), requires_grad=False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x):
        return (x @ self.weight + self.up(self.down(x))).tanh()


@pytest.mark.parametrize("from_numpy", [False, True])
def test_a_quantised_base_moves_and_is_never_written(tmp_path, from_numpy):
    def train(model, enter):
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2
        )
        context, losses = enter(optimizer), []
        for _ in range(6):
            with context:
                loss = (model(x) - x).square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        return losses, context

    torch.manual_seed(0)
    x, width = torch.randn(4, 512), 512
    model = nn.Sequential(*[OverFrozen(width, from_numpy=from_numpy) for _ in range(6)])
    before = [layer.weight.numbers.clone() for layer in model]
    expected, _ = train(copy.deepcopy(model), lambda _: contextlib.nullcontext())
    budget = probe.held_bytes("cpu") - 6 * 2**18 + 2**22
    losses, ours = train(model, lambda optimizer: training(model, optimizer, budget, disk=tmp_path))
    statistics = ours.statistics()
    ours.park()
    assert model[0].weight.numbers.untyped_storage().nbytes() == 0
    ours.close()
    assert losses == expected
    assert statistics.step_fetched["parameters"] > 2**20
    assert statistics.step_parked["parameters"] < 2**20
    assert all(torch.equal(layer.weight.numbers, numbers) for layer, numbers in zip(model, before, strict=True))


def test_generation_and_evaluation_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    plain = transformers.GPT2LMHeadModel(config)
    ours = copy.deepcopy(plain)
    prompt = batches()[0][:1, :8]

    def run(model, context):
        optimizer, found = OPTIMIZERS["adamw"](model), []
        ours = context(model, optimizer) if context else None
        for tokens in batches(3):
            for our in (ours,) if ours else ():
                our.__enter__()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for our in (ours,) if ours else ():
                our.__exit__(None, None, None)
            model.eval()
            found += [loss.item(), model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()]
            model.train()
        if ours:
            ours.close()
        return found

    torch.manual_seed(1)
    expected = run(plain, None)
    torch.manual_seed(1)
    assert run(ours, lambda model, optimizer: training(model, optimizer, beside(model, 6), disk=tmp_path)) == expected
    assert loss_of(lambda tokens: ours(tokens).logits, batches()[0]).isfinite()


def test_a_planned_step_inside_is_the_same(tmp_path):
    def losses_of(directory):
        torch.manual_seed(0)
        model = GPT(num_layers=4, width=128, num_heads=4, context=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens, targets = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(1))
        with contextlib.ExitStack() as stack:
            training = contextlib.nullcontext()
            if directory is not None:
                training = offload.training(model, optimizer, probe.held_bytes("cpu") + 2**22, disk=directory)
                stack.callback(training.close)
            backend = stack.enter_context(contextlib.closing(remat.Backend(budget="64MiB")))
            model.compile(backend=backend)
            losses = []
            for _ in range(4):
                with training:
                    loss = model(tokens, targets)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    assert losses_of(tmp_path) == losses_of(None)


def train_in_backward_in_a_group(rank, directory):
    """Refused: gradients would be used before they are summed."""
    model = Transformer(num_blocks=1)
    context = training(model, OPTIMIZERS["sgd"](model), "1GiB", disk=directory, update_in_backward=True)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="before DistributedDataParallel has summed"), context:
        pass
    del wrapped
    theirs = type("DistributedDataParallel", (torch.nn.Module,), {})()  # as of Apex
    theirs.module = model
    with pytest.raises(ValueError, match="before DistributedDataParallel has summed"), context:
        pass
    context.close()


def test_updates_in_backward_are_not_for_ddp(tmp_path):
    run_in_ranks(train_in_backward_in_a_group, tmp_path, directory=tmp_path)
