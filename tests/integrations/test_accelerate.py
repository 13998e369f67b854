"""`offloading`: a loop written with Accelerate trains as without it, within its budget, and nothing stays behind."""

import contextlib
import gc

import pytest
import torch

from loops import EVERYTHING, TIGHT, assert_same_parameters, everything_parked, gpt2, nothing_left, texts
from penstock import offload, probe, tiers
from penstock.errors import BudgetError
from penstock.integrations import offloading

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _fresh_state():
    """Accelerate's state is the process's."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


class Loop:
    """A training loop as a user writes it: accumulation, clipping, evaluation in between."""

    def __init__(self, **options):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        self.plain = gpt2()
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(texts(), batch_size=8)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.plain, optimizer, loader)
        self.losses = []

    def run(self, *, loss_outside=False, between=lambda step: None, around=None):
        torch.manual_seed(5)
        for step, batch in enumerate(self.loader):
            between(step)
            with self.accelerator.accumulate(self.model):
                if around is None:
                    loss = self._forward_backward(batch, loss_outside)
                else:
                    loss = around(step, lambda batch=batch: self._forward_backward(batch, loss_outside))
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.model.eval()
            with torch.no_grad():
                self.losses.append(self.model(**batch).loss.item())
            self.model.train()

    def _forward_backward(self, batch, loss_outside):
        if loss_outside:
            logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        else:
            loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("loss_outside", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}],
    ids=lambda settings: next(iter(settings), ""),
)
def test_trains_as_without_it(disk, options, loss_outside):
    plain = Loop(**options)
    plain.run(loss_outside=loss_outside)
    loop, parked = Loop(**options), []
    with (
        nothing_left(loop.plain, disk),
        everything_parked(),
        offloading(loop.accelerator, loop.model, disk=disk, **EVERYTHING) as offloader,
    ):
        loop.run(loss_outside=loss_outside, between=lambda _: parked.append(offloader.summary().parked_bytes))
    assert loop.losses == plain.losses
    assert_same_parameters(plain.plain, loop.plain)
    summary = offloader.summary()
    assert summary.num_cycles == 8
    assert parked == sorted(set(parked))  # each micro-batch parked something
    assert summary.written_to_disk_bytes == summary.parked_bytes > parked[-1] > 0
    assert "backward" not in vars(loop.accelerator)


def test_figures_are_numbers_for_a_log(disk):
    loop = Loop()
    with everything_parked(), offloading(loop.accelerator, loop.model, disk=disk, **EVERYTHING) as offloader:
        assert offloader.figures() == {}
        seen = []
        loop.run(between=lambda step: seen.append(offloader.figures()) if step else None)
    assert all(figures.keys() == {"parked_gib", "stall_share"} for figures in seen)
    assert all(figures["parked_gib"] > 0 and 0 <= figures["stall_share"] <= 1 for figures in seen)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["one", "accumulated"])
def test_a_shared_budget_is_kept_with_the_optimizer_state_in_it(disk, collected, options):
    reports = []

    def measured(step, forward_backward):
        if step < 6:
            return forward_backward()
        report = probe.peak_bytes(forward_backward, device="cpu")
        reports.append(report)
        return report.result

    plain = Loop(**options)
    plain.run(around=measured)
    expected, most = plain.losses, max(reports, key=lambda report: report.peak_bytes)
    account = tiers.Budget(device=most.start_bytes + int(0.7 * most.activation_bytes), disk=disk)
    del plain
    gc.collect()
    reports.clear()
    loop = Loop(**options)
    with nothing_left(loop.plain, disk), offloading(loop.accelerator, loop.model, budget=account, **TIGHT) as offloader:
        loop.run(around=measured)
        assert offloader.figures()["highest_peak_gib"] * 2**30 == offloader.summary().peak_bytes
    assert loop.losses == expected
    assert len(reports) == 2
    assert max(report.peak_bytes for report in reports) <= account.device_bytes < most.peak_bytes
    assert account.peak_bytes(str(disk)) > 0
    assert account.held_bytes(str(disk)) == 0


def test_a_step_that_loss_scaling_skips_gives_the_optimizer_no_state(disk, monkeypatch):
    loop, seen = Loop(), []
    monkeypatch.setattr(type(loop.accelerator), "optimizer_step_was_skipped", property(lambda _: len(seen) <= 3))
    with offloading(loop.accelerator, loop.model, budget=2**40, disk=disk, **TIGHT) as offloader:
        loop.run(between=lambda _: seen.append(offloader.offloader))
    assert [current is seen[0] for current in seen] == [True] * 4 + [False] * 4
    assert len(set(map(id, seen))) == 2


def test_a_budget_that_cannot_be_met_is_refused(disk):
    loop = Loop()
    static_bytes = 2 * sum(parameter.nbytes for parameter in loop.plain.parameters())
    with (
        nothing_left(loop.plain, disk),
        pytest.raises(BudgetError, match="needs at least"),
        offloading(loop.accelerator, loop.model, budget=static_bytes + 2**18, disk=disk, **TIGHT),
    ):
        loop.run()
    assert "backward" not in vars(loop.accelerator)


def test_checkpoints_and_models_are_as_ever(disk, tmp_path):
    plain = Loop()
    plain.run()
    loop = Loop()
    with offloading(loop.accelerator, loop.model, disk=disk, **EVERYTHING):
        loop.accelerator.save_state(tmp_path / "start")
        loop.run()
        for options in ({}, {"keep_fp32_wrapper": False}, {"keep_torch_compile": False}):
            assert loop.accelerator.unwrap_model(loop.model, **options) is loop.plain
        assert loop.accelerator.get_state_dict(loop.model).keys() == plain.plain.state_dict().keys()
        first, loop.losses = loop.losses, []
        loop.accelerator.load_state(tmp_path / "start")
        loop.run()
    assert first == loop.losses == plain.losses
    assert_same_parameters(plain.plain, loop.plain)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["forward", "backward", "between"])
def test_after_a_fault_nothing_is_left(disk, moment, kind):
    loop, calls = Loop(), []

    def fault(*_):
        calls.append(moment)
        if len(calls) == 3:
            raise kind(moment)

    if moment == "forward":
        handle = loop.plain.transformer.h[1].register_forward_hook(fault)
    elif moment == "backward":
        handle = loop.plain.transformer.h[1].ln_1.weight.register_hook(fault)
    with (
        nothing_left(loop.plain, disk),
        pytest.raises(kind, match=moment),
        offloading(loop.accelerator, loop.model, disk=disk, budget=2**40, **TIGHT),
    ):
        loop.run(between=fault if moment == "between" else lambda _: None)
    assert "backward" not in vars(loop.accelerator)
    if moment != "between":
        handle.remove()


def test_a_loop_that_goes_on_after_a_fault_trains_on(disk):
    """As loops do that skip a batch which does not fit."""
    plain, loop = Loop(), Loop()

    def skipping(loop):
        def around(step, forward_backward):
            if step != 3:
                return forward_backward()
            handle = loop.plain.transformer.h[1].ln_1.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                forward_backward()
            handle.remove()
            loop.optimizer.zero_grad()
            return torch.zeros(())

        return around

    plain.run(around=skipping(plain))
    with (
        nothing_left(loop.plain, disk),
        everything_parked(),
        offloading(loop.accelerator, loop.model, disk=disk, budget=2**40, **TIGHT) as offloader,
    ):
        loop.run(around=skipping(loop))
    assert loop.losses == plain.losses
    assert offloader.summary().num_cycles == 8  # with the one whose backward failed


def test_two_models_and_forwards_before_backwards(disk):
    """As adversarial training does: the graph of one model waits while the other's optimizer steps."""

    accelerator = accelerate.Accelerator(cpu=True)
    options = {"disk": disk, "budget": 2**40, **TIGHT}

    def train(*, is_offloaded):
        torch.manual_seed(0)
        models = [accelerator.prepare(mlp()) for _ in range(2)]
        optimizers = [accelerator.prepare(torch.optim.AdamW(model.parameters())) for model in models]
        losses = []
        with contextlib.ExitStack() as stack:
            chosen = models if is_offloaded else []
            offloaders = [
                stack.enter_context(offloading(accelerator, chosen_model, **options)) for chosen_model in chosen
            ]
            for _ in range(4):
                both = [model(torch.randn(256, 64)).square().mean() for model in models]
                for optimizer in optimizers:
                    loss = both.pop(0)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
        return losses, [offloader.summary() for offloader in offloaders]

    expected, _ = train(is_offloaded=False)
    with everything_parked():
        losses, summaries = train(is_offloaded=True)
    assert losses == expected
    assert [summary.num_cycles for summary in summaries] == [4, 4]
    assert all(summary.parked_bytes > 0 for summary in summaries)
    assert "backward" not in vars(accelerator)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def test_unknown_options_are_told(disk):
    loop = Loop()
    with pytest.raises(TypeError, match="minsize.*min_size"), offloading(loop.accelerator, loop.model, minsize=1):
        pass


def test_a_model_whose_regions_are_compiled_is_not_taken_for_one_region(disk):
    model = gpt2()
    model.__dict__["_orig_mod"] = model  # as Accelerate leaves it: an attribute, no wrapper
    with everything_parked():
        offloader = offload.activations(model, disk=disk, min_size=0)
        with offloader:
            ids = torch.randint(64, (2, 16))
            model(input_ids=ids, labels=ids).loss.backward()
    assert offloader.statistics().parked_bytes > 0
    offloader.close()
