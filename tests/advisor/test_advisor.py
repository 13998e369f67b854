"""Advice on small models: what is tried, what is left as it was, and code that trains."""

import collections
import copy
import functools
import gc
import random
import statistics
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.advisor import Option, _trial, _ways, choose
from penstock.advisor._ways import blocks_of, checkpointed
from penstock.probe import peak_bytes
from penstock.testing import GPT
from penstock.tiers import Budget

pytestmark = pytest.mark.usefixtures("one_thread", "capturing_is_imported")


@pytest.fixture(autouse=True)
def _without_garbage(monkeypatch):
    """What earlier tests left must not be freed between two measurements; no step runs again to be timed better."""
    monkeypatch.setattr(_trial, "LEAST_S", 0.0)
    for _ in range(3):  # finalisers leave more
        gc.collect()


def gpt():
    torch.manual_seed(0)
    return GPT(num_layers=2, width=64, num_heads=2, context=64)


def tokens(seed=0, batch=16):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (batch, 64), generator=generator) for _ in range(2))


def option(name="remat", ratio=1.0, peak=10, **changes):
    given = {
        "name": name, "rooms": (), "is_refused": False, "reason": "", "peak_bytes": peak, "ratio": ratio,
        "is_measured": True, "code": "",
    }  # fmt: skip
    return Option(**(given | changes))


class TestChoosing:
    def test_the_fastest_is_taken(self):
        options = [option("plain", 1.0, is_refused=True), option("remat", 1.3), option("offload", 1.1)]
        assert choose(options).name == "offload"

    def test_of_those_as_fast_the_simplest(self):
        assert choose([option("remat", 0.98), option("offload", 0.99), option("plain", 1.0)]).name == "plain"
        assert choose([option("remat", 0.9), option("offload", 0.99), option("plain", 1.0)]).name == "remat"

    def test_of_those_as_simple_the_smallest(self):
        options = [option("remat + swap", 1.0, 20), option("checkpoint + offload", 1.0, 10)]
        assert choose(options).name == "checkpoint + offload"

    def test_an_unknown_ratio_comes_last(self):
        assert choose([option("plain", None), option("remat", 3.0)]).name == "remat"
        assert choose([option("fleet", None)]).name == "fleet"

    def test_nothing_is_taken_where_all_are_refused(self):
        assert choose([option(is_refused=True)]) is None


def test_blocks_are_the_largest_list_of_one_class():
    assert blocks_of(gpt()) == ["blocks.0", "blocks.1"]
    assert blocks_of(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == []
    assert blocks_of(nn.Linear(3, 3)) == []


def peak_of_a_copy(model, batch):
    """Of a plain step with gradients, without what the copy's parameters take."""
    other = copy.deepcopy(model)
    plainly(other, [batch], is_updated=False)
    measured = peak_bytes(lambda: plainly(other, [batch], is_updated=False), device="cpu")
    return measured.peak_bytes - sum(one.nbytes for one in model.parameters())


def test_everything_is_tried_and_measured_and_nothing_is_changed(tmp_path):
    model, batch = gpt(), tokens()
    model.head.weight.grad = kept = torch.ones_like(model.head.weight)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    peak = peak_of_a_copy(model, batch)
    advice = penstock.advise(model, batch, "1GiB", disk=tmp_path, rounds=1)
    assert [one.name for one in advice.options if one.is_refused] == []
    assert {one.name for one in advice.options} == {
        "plain", "checkpoint", "offload", "checkpoint + offload", "remat", "remat + swap",
    }  # fmt: skip
    assert all(one.is_measured and one.ratio and one.peak_bytes for one in advice.options)
    assert advice.plain_is_measured
    assert advice.plain_peak_bytes == pytest.approx(peak - kept.nbytes, rel=0.02)
    assert model.head.weight.grad is kept
    assert (kept == 1).all()
    assert all(one.grad is None for name, one in model.named_parameters() if name != "head.weight")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(one) for one in model.modules())


def plainly(model, batches, loss=None, *, is_updated=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        (model(*batch) if loss is None else loss(model, batch)).backward()
        if is_updated:
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_the_code_of_every_option_trains_as_plain_pytorch_does(tmp_path):
    model, batches = gpt(), [tokens(at) for at in range(3)]
    advice = penstock.advise(model, batches[0], "64MiB", disk=tmp_path, rounds=1)
    expected = plainly(copy.deepcopy(model), batches)
    for one in advice.options:
        names = {"model": copy.deepcopy(model), "batches": batches, "torch": torch}
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        exec(one.code, names)
        for (name, left), right in zip(expected.named_parameters(), names["model"].parameters(), strict=True):
            assert torch.equal(left, right), f"{one.name}: {name}"
        for made in ("offloader", "step"):
            if made in names:
                names[made].close()


def test_a_tight_budget_rules_out_what_exceeds_it(tmp_path):
    model, batch = gpt(), tokens()
    advice = penstock.advise(model, batch, "1GiB", disk=tmp_path, rounds=1)
    by_name = {one.name: one for one in advice.options}
    limit = (by_name["checkpoint + offload"].peak_bytes + by_name["plain"].peak_bytes) // 2
    tight = penstock.advise(model, batch, limit, disk=tmp_path, rounds=1)
    plain = next(one for one in tight.options if one.name == "plain")
    assert plain.is_refused
    assert plain.ratio == 1
    assert "above the budget" in plain.reason
    assert tight.best.peak_bytes <= limit
    assert not tight.best.is_refused
    assert tight.budget_bytes == limit
    assert tight.best.code in tight.explain()
    assert f"* {tight.best.name}" in tight.explain()


def test_an_optimizers_state_is_counted_before_its_first_step():
    model, batch = gpt(), tokens()
    without = penstock.advise(model, batch, None, rounds=1)
    optimizer = torch.optim.Adam(model.parameters())
    with_it = penstock.advise(model, batch, None, optimizer=optimizer, rounds=1)
    state_bytes = 2 * sum(one.nbytes for one in model.parameters())
    for left, right in zip(
        sorted(without.options, key=lambda one: one.name),
        sorted(with_it.options, key=lambda one: one.name),
        strict=True,
    ):
        assert right.peak_bytes == pytest.approx(left.peak_bytes + state_bytes, rel=0.01), left.name
    assert not optimizer.state


def test_losses_are_found_or_given():
    labels = torch.randint(4, (32,))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), torch.randn(32, 8)
    with pytest.raises(ValueError, match=r"scalar loss, got a tensor of shape \[32, 4\].*loss=lambda model, batch"):
        penstock.advise(model, x, None)
    mean = model[1].running_mean.clone()
    loss = lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    advice = penstock.advise(model, (x, labels), None, loss=loss, rounds=1)
    assert torch.equal(model[1].running_mean, mean)
    assert "loss(model, batch).backward()" in next(one for one in advice.options if one.name == "plain").code


def test_a_model_of_hugging_face_takes_its_batch_by_name(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
    torch.manual_seed(0)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(64, (16, 64))
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    advice = penstock.advise(model, batch, "1GiB", disk=tmp_path, rounds=1)
    assert [one.name for one in advice.options if one.is_refused] == []
    by_name = {one.name: one for one in advice.options}
    assert "_checkpointing_enable(" in by_name["checkpoint + offload"].code
    assert by_name["checkpoint"].peak_bytes < by_name["plain"].peak_bytes
    assert not any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    assert not any(one.training for one in model.modules())
    names = {"model": model, "batches": [batch], "optimizer": torch.optim.SGD(model.parameters())}
    exec(by_name["checkpoint"].code, names)
    assert model.training  # as in the trial, with dropout
    assert any(getattr(one, "gradient_checkpointing", False) for one in model.modules())


def test_checkpointing_in_between_does_not_have_a_step_captured_anew():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    model, ids = transformers.GPT2LMHeadModel(config).train(), torch.randint(64, (4, 32))
    step = penstock.remat.optimize(lambda ids: model(input_ids=ids, labels=ids).loss, [ids], None)
    for _ in range(3):
        step(ids).backward()
        with checkpointed(model, blocks_of(model)):
            model(input_ids=ids, labels=ids).loss.backward()
    step(ids).backward()
    assert len(step.plans) == 1
    step.close()


class Shares(nn.Module):
    """One block, several times over, with a forward of its own."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        block.forward = lambda x: block[1](block[0](x))
        self.blocks = nn.ModuleList([block] * 3)

    def forward(self, x):
        for one in self.blocks:
            x = one(x)
        return x.square().mean()


def test_blocks_that_are_shared_or_patched_are_left_as_they_were():
    model = Shares()
    patched = model.blocks[0].forward
    advice = penstock.advise(model, torch.randn(64, 16), None, rounds=1)
    assert not next(one for one in advice.options if one.name == "checkpoint").is_refused
    assert model.blocks[0].forward is patched


class Tires(nn.Module):
    """Raises in its sixth step."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_steps = nn.Linear(16, 16), 0

    def forward(self, x):
        if torch.is_grad_enabled():
            self.num_steps += 1
        if self.num_steps > 5:
            raise ArithmeticError("tired")
        return self.layer(x).square().mean()


def test_what_raises_while_it_is_timed_is_refused():
    advice = penstock.advise(Tires(), torch.randn(64, 16), None, rounds=9)
    plain = next(one for one in advice.options if one.name == "plain")
    assert plain.is_refused
    assert plain.reason == "tired"


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x)
        return (y * y.sum().item()).square().mean()


def test_a_step_of_several_graphs_is_advised_on_without_remat():
    advice = penstock.advise(Breaks(), torch.randn(64, 16), None, rounds=1)
    refused = [one for one in advice.options if one.is_refused]
    assert [one.name for one in refused] == ["remat"]
    assert "reads the value of a tensor" in refused[0].reason
    assert advice.smallest_bytes is None
    assert not advice.best.is_refused  # on a busy machine one round may favor any


def test_what_no_step_fits_a_fleet_of_one_may(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())], nn.Flatten(0))
    batch = torch.randn(4, 256)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    budget = Budget(device="2MiB", host="64MiB")
    advice = penstock.advise(model, batch, budget, loss=loss, rounds=1)
    assert advice.best.name == "fleet"
    assert 0 < advice.best.peak_bytes <= 2 * 2**20
    assert advice.best.ratio > 0
    names = {"model": copy.deepcopy(model), "batches": [batch] * 3, "loss": loss, "budget": budget}
    exec(advice.best.code, names)
    expected = plainly(model, [batch] * 3, loss)
    for left, right in zip(expected.parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(left, right)
    with pytest.raises(ValueError, match="no option trains this step within 64.0 KiB"):
        penstock.advise(model, batch, Budget(device="64KiB", host="64MiB"), loss=loss, rounds=1).best  # noqa: B018


def test_what_other_rooms_run_beside_is_left_to_them(tmp_path):
    model, batch = gpt(), tokens()
    account = Budget(device="64MiB", disk=tmp_path)
    share = penstock.tiers.Footprint(step_bytes=60 * 2**20, runs_beside=True)
    account.named("fleet").enter(share)
    advice = penstock.advise(model, batch, account, rounds=1)
    assert next(one for one in advice.options if one.name == "plain").is_refused
    account.leave(share)
    gc.collect()
    assert account.held_bytes("device") == 0
    assert "budget=budget" in next(one for one in advice.options if one.name == "offload").code


def test_misuse_is_told_with_the_call_that_works(tmp_path):
    model, batch = gpt(), tokens()
    with pytest.raises(ValueError, match="`rounds` must be at least 1"):
        penstock.advise(model, batch, None, rounds=0)
    with pytest.raises(ValueError, match="must be inside the Budget"):
        penstock.advise(model, batch, Budget(), disk=tmp_path)
    with pytest.raises(ValueError, match=r"model\.to\(device\)"):
        penstock.advise(model, tuple(one.to("meta") for one in batch), None)
    with pytest.raises(ValueError, match=r"model\.to\(device\)"):  # such as a BatchEncoding
        penstock.advise(model, collections.UserDict(tokens=batch[0].to("meta")), None)


def test_it_says_what_else_it_noticed():
    model = nn.Linear(64, 1)
    advice = penstock.advise(
        model, torch.randn(4096, 64), "3MiB", loss=lambda model, batch: model(batch).mean(), rounds=1
    )
    assert "TieredFeatures" in advice.notes[0]


def test_progress_is_told():
    said = []
    penstock.advise(nn.Linear(4, 1), torch.randn(1, 4), None, rounds=2, progress=lambda *one: said.append(one))
    assert said[0][0].startswith("capturing")
    assert all(done < total for _, done, total in said)
    assert [done for _, done, _ in said[1:]] == sorted(done for _, done, _ in said[1:])


def test_a_state_that_does_not_fit_is_trained_out_of_it(tmp_path):
    torch.manual_seed(0)
    model = GPT(num_layers=4, width=128, num_heads=2, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens(batch=2)
    state_bytes = 16 * sum(one.numel() for one in model.parameters())
    gc.collect()
    others_bytes = penstock.probe.held_bytes("cpu") - state_bytes // 4
    budget = Budget(device=others_bytes + state_bytes // 2, disk=tmp_path)
    advice = penstock.advise(model, batch, budget, optimizer=optimizer, rounds=1)
    assert advice.best.name in {"training", "fleet"}
    chosen = next(one for one in advice.options if one.name == "training")
    assert not chosen.is_refused, chosen.reason
    assert chosen.ratio > 0
    assert chosen.peak_bytes <= 1.01 * budget.device_bytes
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    for _ in range(3):
        twin(*batch).backward()
        plain.step()
        plain.zero_grad()
    del plain
    gc.collect()
    budget = Budget(device=penstock.probe.held_bytes("cpu") + state_bytes // 4, disk=tmp_path)  # the twin is there too
    names = {"model": model, "optimizer": optimizer, "batches": [batch] * 3, "budget": budget}
    code = chosen.code.replace('"trained"', repr(str(tmp_path / "trained"))).replace("discard=True", "")
    exec(code, names)
    for left, right in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_what_cannot_win_is_not_timed_again(monkeypatch):
    monkeypatch.setattr(_trial, "LONG_ROUND_S", 0.0)
    durations = {"plain": 1.0, "quick": 1.1, "close": 1.2, "slow": 2.0}
    calls = collections.Counter()

    def timed(own, rounds, refused=()):
        def run(name):
            calls[name] += 1

        calls.clear()
        running = {name: _ways.Running(step=functools.partial(run, name)) for name in own}
        trials = {name: _trial.Trial(reason="above" if name in refused else "") for name in own}
        monkeypatch.setattr(
            _trial, "in_rounds", lambda ways, **_: {name: [(way(), durations[name])[1]] for name, way in ways.items()}
        )
        workload = types.SimpleNamespace(device="cpu")
        seconds = _trial._in_turn(workload, running, rounds, trials, lambda done: None)
        assert seconds == {name: [durations[name]] * calls[name] for name in own}
        return dict(calls)

    assert timed(["plain", "quick", "close", "slow"], 5, {"plain"}) == {"plain": 3, "quick": 3, "close": 3, "slow": 1}
    assert timed(["plain", "quick"], 5) == {"plain": 3, "quick": 3}  # neither can change places any more
    assert timed(["plain", "slow"], 5, {"plain"}) == {"plain": 1, "slow": 1}
    monkeypatch.setattr(_trial, "LONG_ROUND_S", 100.0)
    assert timed(["plain", "slow"], 5, {"plain"}) == {"plain": 5, "slow": 5}


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5])
def test_the_best_is_the_best_of_all_rounds(rounds):
    """Whatever the rounds are that were saved, once half of them are over."""
    choose = random.Random(rounds)
    for _ in range(2000):
        first, second = ([choose.uniform(1, 1.4) for _ in range(rounds)] for _ in range(2))
        for done in range(1, rounds + 1):
            if _trial.cannot_win(first[:done], second[:done], rounds):
                assert statistics.median(first) > statistics.median(second)
