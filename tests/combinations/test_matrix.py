"""Every pair of rooms under one account: gradients equal plain PyTorch's, and no limit is exceeded."""

import contextlib
import copy
import gc
import itertools
import threading

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame

from penstock import fleet, offload, probe, relational, remat, unified
from penstock.errors import BudgetError
from penstock.remat import _profile
from penstock.testing import GPT, assert_gradients_equal
from penstock.tiers import Budget, Waterfall

MIB = 2**20


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def account(tmp_path):
    """Of which nothing may be left over, and no limit exceeded."""
    budget = Budget(device="96MiB", host="24MiB", disk={tmp_path: "256MiB"})
    yield budget
    torch.compiler.reset()  # compiled code holds graphs
    gc.collect()
    for use in budget.uses():
        assert use.held_bytes == 0, use
        assert use.limit_bytes is None or use.peak_bytes <= use.limit_bytes, use


def mlp(width=64):
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())])


def gpt():
    torch.manual_seed(0)
    return GPT(num_layers=2, width=64, num_heads=2, context=64)


def tokens(seed=0, batch=8):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (batch, 64), generator=generator) for _ in range(2))


def graph():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(500, (2, 4000), generator=generator)
    return relational.RelationalGraph(
        edges, torch.randint(5, (4000,), generator=generator), num_nodes=500, num_edge_types=5
    )


def table(rows=2000, width=64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


class Relations(nn.Module):
    """Two relational layers with an MLP between them."""

    def __init__(self, graph):
        super().__init__()
        torch.manual_seed(0)
        self.first = relational.RGCNConv(64, 64, num_relations=5)
        self.between = mlp()
        self.second = relational.RGCNConv(64, 64, num_relations=5)
        self.graph = graph

    def forward(self, x):
        return self.second(self.between(self.first(x, self.graph)), self.graph)


def square(x):
    return x.square().mean()


def plainly(module, *steps):
    """A copy of the module with the gradients that the steps leave."""
    other = copy.deepcopy(module)
    for step in steps:
        step(other).backward()
    return other


def tiered(source, account, **options):
    return unified.TieredFeatures(source, host="4MiB", budget=account, progress=False, **options)


def job(name="job", module=gpt, loss=lambda model, batch: model(*batch), data=None, steps=3):
    return fleet.Job(
        name=name, model=module, data=data or (lambda: [tokens(index) for index in range(3)]), loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps=steps,
    )  # fmt: skip


def trained_plainly(fleet_job):
    torch.manual_seed(fleet_job.seed)
    model = fleet_job.model()
    optimizer, losses = fleet_job.optimizer(model.parameters()), []
    for batch in itertools.islice(itertools.cycle(fleet_job.data()), fleet_job.steps):
        loss = fleet_job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


def settled(loss, offloader):
    """The same loss, when what was parked on the way to it has left: until then it is handed back from memory."""
    for waterfall in offloader._waterfalls.values():
        waterfall.drain()
    return loss


@contextlib.contextmanager
def a_fleet_beside(account, *jobs):
    """Trains jobs in another thread until the block has ended and they are done; their losses are checked."""
    expected = [trained_plainly(fleet_job) for fleet_job in jobs]
    losses_found = []
    device = fleet.Device(name="cpu", budget="24MiB", threads=1)
    with fleet.Fleet([device], account, progress=None) as running:
        for fleet_job in jobs:
            running.add(fleet_job)
        waiting = threading.Thread(target=lambda: losses_found.append(running.wait()))
        waiting.start()
        yield
        waiting.join()
    results = losses_found[0]
    for fleet_job, losses in zip(jobs, expected, strict=True):
        assert results[fleet_job.name].error is None, results[fleet_job.name].error
        assert results[fleet_job.name].losses == losses
    assert all(device.peak_bytes <= device.budget_bytes for device in results.devices)


def test_offload_and_remat_share_a_model(account):
    model, batch = gpt(), tokens()

    def loss(module):
        return module(*batch)

    expected = plainly(model, loss, loss, loss, loss)
    step = remat.optimize(model, batch, account)
    with contextlib.closing(offload.activations(model, budget=account, min_size=0)) as offloader:
        for _ in range(2):
            with offloader:
                loss(model).backward()
            step(*batch).backward()
    step.close()
    assert_gradients_equal(expected, model)
    device = next(use for use in account.uses() if use.place == "device")
    assert {holder.name for holder in device.holders} == {"offload", "remat"}


def test_the_hooks_of_an_offloader_do_not_have_a_planned_step_traced_again(account, monkeypatch):
    model, batch = mlp(), torch.randn(64, 64)
    with contextlib.closing(offload.activations(model, budget=account)):
        step = remat.optimize(lambda x: square(model(x)), [batch], account)
        monkeypatch.setattr(convert_frame, "_compile", lambda *_, **__: pytest.fail("traced again"))
        for _ in range(3):
            step(batch).backward()
        step.close()


def test_offload_around_a_planned_part(account):
    model, batch = mlp(), torch.randn(4096, 64)
    front, back = model[:4], model[4:]
    expected = plainly(model, lambda module: square(module(batch)), lambda module: square(module(batch)))
    planned = remat.optimize(back, [front(batch).detach().requires_grad_()], account, method="recompute")
    with contextlib.closing(offload.activations(front, budget=account, min_size=0)) as offloader:
        for _ in range(2):
            with offloader:
                settled(square(planned(front(batch))), offloader).backward()
        assert offloader.tier_statistics().parked_bytes > 0
    planned.close()
    assert_gradients_equal(expected, model)


def test_remat_leaves_what_the_offloader_holds_alone(tmp_path):
    model, other, batch = mlp(256), mlp(256), torch.randn(512, 256)
    alone = remat.optimize(lambda x: square(other(x)), [batch], None)
    needed = remat.smallest_budget_bytes(alone.plan.problem)
    held = 2 * sum(parameter.nbytes for parameter in model.parameters())
    account = Budget(device=needed + held // 2, disk=tmp_path)
    offloader = offload.activations(model, budget=account)
    with pytest.raises(BudgetError, match="cannot be met"):
        remat.optimize(lambda x: square(other(x)), [batch], account)
    offloader.close()
    remat.optimize(lambda x: square(other(x)), [batch], account).close()
    assert account.held_bytes("device") == 0


def test_the_offloader_plans_anew_when_others_take_more(tmp_path, monkeypatch):
    monkeypatch.setattr(Waterfall, "rates_bytes_per_s", lambda _: (1e12, 1e12))
    model, batch = gpt(), tokens(batch=32)
    plain = probe.peak_bytes(lambda: model(*batch).backward(), device="cpu")
    account = Budget(device=plain.peak_bytes - plain.activation_bytes // 8, disk=tmp_path)
    options = {"budget": account, "min_size": 0}
    with contextlib.closing(offload.activations(model, **options)) as offloader:

        def step():
            with offloader:
                settled(model(*batch), offloader).backward()
            return offloader.statistics()

        first = [step() for _ in range(4)][-1]
        account.named("others").charge("device", plain.activation_bytes // 8)
        later = [step() for _ in range(3)][-1]
    assert later.predicted_peak_bytes <= first.predicted_peak_bytes - plain.activation_bytes // 16
    assert later.parked_bytes > first.parked_bytes


def test_offload_beside_a_fleet(account):
    model, batch = gpt(), tokens(7)
    expected = plainly(model, *[lambda module: module(*batch)] * 4)
    free = Budget(host=account.host_bytes, disk=account.disk_bytes)
    with a_fleet_beside(account, job("first"), job("second")):
        assert account.beside_bytes() == 24 * MIB
        with contextlib.closing(offload.activations(model, budget=free, min_size=0)) as offloader:
            for _ in range(4):
                with offloader:
                    settled(model(*batch), offloader).backward()
            assert offloader.tier_statistics().parked_bytes > 0
    assert_gradients_equal(expected, model)


def test_remat_beside_a_fleet(account):
    model, batch = gpt(), tokens(7)
    expected = plainly(model, *[lambda module: module(*batch)] * 3)
    step = remat.optimize(model, batch, account)
    alone = step.plan.budget_bytes
    step.close()
    with a_fleet_beside(account, job()):
        step = remat.optimize(model, batch, account)
        assert step.plan.budget_bytes == alone - 24 * MIB
        for _ in range(3):
            step(*batch).backward()
        step.close()
    assert_gradients_equal(expected, model)


def test_profiling_a_step_does_not_change_the_parameters_that_a_job_draws(monkeypatch):
    model, batch = gpt(), tokens(7)
    is_profiled, is_half_built, threads = threading.Event(), threading.Event(), []
    workspace_bytes = _profile._workspace_bytes

    def until_half_built(run):
        is_profiled.set()
        is_half_built.wait(1.0)  # which it is not, for as long as the profile has the generators
        return workspace_bytes(run)

    def make():
        is_profiled.wait()
        first = nn.Linear(64, 64)
        is_half_built.set()
        for thread in threads:
            thread.join(1.0)  # the profile puts back what it found
        return nn.Sequential(first, nn.Linear(64, 64))

    drawing_job = job(module=make, loss=lambda model, x: square(model(x)), data=lambda: [torch.ones(4, 64)])
    is_profiled.set()
    expected = trained_plainly(drawing_job)
    is_profiled.clear()
    is_half_built.clear()
    monkeypatch.setattr(_profile, "_workspace_bytes", until_half_built)
    threads.append(threading.Thread(target=lambda: remat.optimize(model, batch, None).close()))
    threads[0].start()
    is_profiled.wait()
    results = fleet.run([drawing_job], [fleet.Device(name="cpu", threads=1)], progress=None)
    threads[0].join()
    assert results[drawing_job.name].losses == expected


class Planned(nn.Module):
    """A stage of a job that plans itself when it first runs on the device."""

    def __init__(self, module, budget, plans):
        super().__init__()
        self.module, self.budget, self.plans = module, budget, plans
        self.steps = {}

    def forward(self, x):
        if x.shape not in self.steps:
            self.steps[x.shape] = remat.optimize(self.module, [x], self.budget, method="recompute")
            self.plans.append(self.steps[x.shape].plan)
        return self.steps[x.shape](x)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_planned_stage_inside_of_a_fleets_job(account, dropout):
    data = [torch.randn(2048, 64, generator=torch.Generator().manual_seed(index)) for index in range(3)]

    def make(budget=None):
        model = mlp()
        model[3] = nn.Sequential(nn.GELU(), nn.Dropout(dropout))
        return model if budget is None else nn.Sequential(model[:2], Planned(model[2:6], *budget), model[6:])

    plain_job = job("plain", make, lambda model, batch: square(model(batch)), lambda: data)
    budget, plans = 0.9, []
    planned = plain_job.with_changes(name="planned", model=lambda: make((budget, plans)), stages=list)
    expected = trained_plainly(plain_job)
    with a_fleet_beside(account, planned):
        pass
    assert trained_plainly(planned) == expected
    assert any(plan.plan.peak_bytes < plan.plan.keep_all_peak_bytes for plan in plans)


def test_a_fleet_takes_what_is_left_of_the_device(account):
    account.named("remat").charge("device", 70 * MIB)
    with fleet.Fleet(["cpu"], account, progress=None) as running:
        assert running._engine.workers[0].memory.budget_bytes == 26 * MIB
        assert account.room_bytes("device") == 0
    account.named("remat").credit("device", 70 * MIB)


def test_offload_over_tiered_features(account):
    model, rows = mlp(), table(40_000)
    index = torch.randint(40_000, (4096,), generator=torch.Generator().manual_seed(2))
    expected = plainly(model, *[lambda module: square(module(rows[index]))] * 3)
    with (
        tiered(rows, account) as features,
        contextlib.closing(offload.activations(model, budget=account, min_size=0)) as offloader,
    ):
        for _ in range(3):
            with offloader:
                settled(square(model(features[index])), offloader).backward()
        assert features.statistics().disk_rows > 0
        assert offloader.tier_statistics().parked_bytes > 0
        held = {holder.name for use in account.uses() for holder in use.holders if holder.held_bytes}
        assert held == {"offload", "unified"}
    assert_gradients_equal(expected, model)


def test_remat_over_tiered_features(account):
    model, rows = mlp(), table(40_000)
    index = torch.randint(40_000, (4096,), generator=torch.Generator().manual_seed(2))
    expected = plainly(model, *[lambda module: square(module(rows[index]))] * 2)
    with tiered(rows, account) as features:
        step = remat.optimize(lambda x: square(model(x)), [features[index]], account)
        for _ in range(2):
            step(features[index]).backward()
        step.close()
    assert_gradients_equal(expected, model)


def test_features_take_what_is_left_of_host_and_disk(account, tmp_path):
    account.named("fleet").charge("host", 20 * MIB)
    with unified.TieredFeatures(table(40_000), budget=account, progress=False) as features:
        assert features.host_bytes <= 4 * MIB
        assert account.held_bytes("host") <= 24 * MIB
        assert account.held_bytes(str(tmp_path)) > 0
        with pytest.raises(BudgetError):
            unified.TieredFeatures(table(40_000), host="4MiB", budget=account, progress=False)
    account.named("fleet").credit("host", 20 * MIB)


def test_offload_around_relational_layers(account):
    edges = graph().charge_to(account)
    model, x = Relations(edges), torch.randn(500, 64)
    expected = plainly(model, *[lambda module: square(module(x))] * 3)
    with contextlib.closing(offload.activations(model, budget=account, min_size=0)) as offloader:
        for _ in range(3):
            with offloader:
                settled(square(model(x)), offloader).backward()
        assert offloader.tier_statistics().parked_bytes > 0
    assert_gradients_equal(expected, model)
    held = {holder.name: holder.held_bytes for use in account.uses() for holder in use.holders}
    assert held["relational"] >= edges.edge_index.nbytes + edges.edge_type.nbytes


def test_an_index_that_does_not_fit_is_refused():
    edges = graph()
    account = Budget(device=edges.edge_index.nbytes + edges.edge_type.nbytes + 1)
    edges.charge_to(account)
    assert edges.charge_to(account) is edges  # once
    layer = relational.RGCNConv(64, 64, num_relations=5)
    with pytest.raises(BudgetError, match="more on device"):
        layer(torch.randn(500, 64), edges)


def test_remat_of_relational_layers(account):
    model, x = Relations(graph().charge_to(account)), torch.randn(500, 64)
    expected = plainly(model, *[lambda module: square(module(x))] * 2)
    step = remat.optimize(lambda x: square(model(x)), [x], account)
    for _ in range(2):
        step(x).backward()
    step.close()
    assert_gradients_equal(expected, model)


def test_a_fleet_over_tiered_features(account):
    rows = table(40_000)
    indexes = [torch.randint(40_000, (1024,), generator=torch.Generator().manual_seed(index)) for index in range(3)]
    with tiered(rows, account) as features:
        feature_job = job(
            "features", mlp, lambda model, batch: square(model(batch)), lambda: [features[index] for index in indexes]
        )
        with a_fleet_beside(account, feature_job):
            pass
        assert features.statistics().disk_rows > 0


def test_a_fleet_of_relational_models(account):
    edges, x = graph().charge_to(account), torch.randn(500, 64, generator=torch.Generator().manual_seed(3))
    relations_job = job(
        "relations", lambda: Relations(edges), lambda model, batch: square(model(batch)), lambda: [x] * 3
    )
    with a_fleet_beside(account, relations_job):
        pass


def test_relational_layers_over_tiered_features(account):
    rows, edges = table(40_000), torch.randint(40_000, (2, 60_000), generator=torch.Generator().manual_seed(4))
    types = torch.randint(5, (60_000,), generator=torch.Generator().manual_seed(5))
    topology = unified.Graph(edges, num_nodes=40_000)
    torch.manual_seed(0)
    layer = relational.RGCNConv(64, 64, num_relations=5)
    other = copy.deepcopy(layer)

    def block(batch):
        size = len(batch.nodes)
        return relational.RelationalGraph(batch.edge_index, types[batch.sample.edges], num_nodes=size, num_edge_types=5)

    with tiered(rows, account) as features:
        for batch in unified.Loader(
            unified.NeighborSampler(topology, [5]), features, torch.arange(512), batch_size=256
        ):
            assert torch.equal(batch.x, rows[batch.nodes])
            square(layer(batch.x, block(batch).charge_to(account))).backward()
            square(other(rows[batch.nodes], block(batch))).backward()
        assert features.statistics().disk_rows > 0
    assert_gradients_equal(other, layer)


def test_all_five_together(account):
    """Offload around relational layers over tiered features, a planned head, and a fleet beside them."""
    rows, edges = table(40_000), graph().charge_to(account)
    index = torch.randint(40_000, (500,), generator=torch.Generator().manual_seed(2))
    model, head = Relations(edges), mlp()
    whole = nn.ModuleList([model, head])
    expected = plainly(whole, *[lambda both: square(both[1](both[0](rows[index])))] * 3)
    free = Budget(disk=account.disk_bytes)
    # drawn before there is a fleet: PyTorch's generator belongs to the process, and a job may have its state in it
    example = torch.randn(500, 64, requires_grad=True)
    with tiered(rows, account) as features, a_fleet_beside(account, job()):
        planned = remat.optimize(head, [example], account, method="recompute")
        with contextlib.closing(offload.activations(model, budget=free, min_size=0)) as offloader:
            for _ in range(3):
                with offloader:
                    square(planned(model(features[index]))).backward()
        planned.close()
    assert_gradients_equal(expected, whole)
    held = {holder.name for use in account.uses() for holder in use.holders}
    assert held >= {"fleet", "relational", "remat", "unified"}
