"""Misuses of `remat` and `tiers` that no signature shows: wrong order, and steps or handles that two of ours share."""

import copy
from typing import Any

import torch

from benchmarks.misuse_engine import batch, gradients_of, loss_of, model, plain, remat_problem, same, steps, trains
from benchmarks.misuse_table import require, scene
from benchmarks.soak_case import Case
from penstock import offload, remat, tiers


@scene("remat: two steps of one model on one Budget")
def two_steps(case: Case) -> None:
    module, budget = model(), case.budget(device="1GiB")
    first, second = (remat.optimize(module, [batch()], budget) for _ in range(2))
    for step in (first, second, first):
        steps(step, module, "two steps")
    first.close()
    steps(second, module, "the other is closed")
    second.close()


@scene("remat: a Budget shared with offloading")
def two_rooms(case: Case) -> None:
    module, budget = model(), case.budget(device="1GiB", disk=case.disk())
    planned = remat.optimize(module, [batch()], budget)
    offloader = offload.activations(module, budget=budget, min_size=0)
    for _ in range(2):
        steps(planned, module, "beside offloading")
        trains(offloader, module)
    planned.close()
    offloader.close()


@scene("remat: backward twice")
def remat_backward_twice(_: Case) -> None:
    module = model()
    planned = remat.optimize(loss_of(module), [batch()], None)
    try:
        loss = planned(batch())
        loss.backward()
        loss.backward()
    finally:
        planned.close()


@scene("remat: backward twice with retain_graph")
def remat_retained(_: Case) -> None:
    module = model()
    expected = plain(module)
    planned = remat.optimize(loss_of(module), [batch()], None)
    try:
        loss = planned(batch())
        loss.backward(retain_graph=True)
        module.zero_grad()
        loss.backward()
        same(gradients_of(module), expected, "backward again")
    finally:
        planned.close()


@scene("remat: backward after close")
def remat_backward_after_close(_: Case) -> None:
    module = model()
    expected = plain(module)
    planned = remat.optimize(loss_of(module), [batch()], None)
    loss = planned(batch())
    planned.close()
    loss.backward()
    same(gradients_of(module), expected, "backward after close")


@scene("remat: another number of arguments")
def other_arguments(_: Case) -> None:
    planned = remat.optimize(model(), [batch()], None)
    try:
        planned(batch(), batch())
    finally:
        planned.close()


@scene("remat: another shape, then the first")
def other_shape(_: Case) -> None:
    module = model()
    planned = remat.optimize(module, [batch()], None)
    planned(torch.ones(3, 64)).sum().backward()
    steps(planned, module, "after another shape")
    planned.close()


@scene("remat: a width that the model does not take")
def other_width(_: Case) -> None:
    planned = remat.optimize(model(), [batch()], None)
    try:
        planned(torch.ones(3, 5))
    finally:
        planned.close()


@scene("remat: a step that returns no tensor")
def no_tensor(_: Case) -> None:
    remat.optimize(lambda x: "12 potatoes", [batch()], None).close()


@scene("remat: a step that returns None")
def nothing(_: Case) -> None:
    remat.optimize(lambda x: None, [batch()], None).close()


@scene("remat: a step without parameters")
def no_parameters(_: Case) -> None:
    planned = remat.optimize(lambda x: x.sum(), [batch()], None)
    require(torch.equal(planned(batch()), batch().sum()), "the sum")
    planned.close()


@scene("remat: a step that raises")
def raising(_: Case) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("`step` must be this way, such as the user says")

    remat.optimize(step, [batch()], None)


@scene("remat: no example inputs")
def no_inputs(_: Case) -> None:
    remat.optimize(model(), [], None)


@scene("remat: without gradients")
def without_gradients(_: Case) -> None:
    module = model()
    with torch.no_grad():
        planned = remat.optimize(module, [batch()], None)
        require(torch.equal(planned(batch()), module(batch())), "the same output")
    steps(planned, module, "with gradients again")
    planned.close()


@scene("remat: compile of what is compiled")
def compiled_twice(case: Case) -> None:
    module = model()
    first = remat.compile(module, budget="1GiB")
    second = None
    try:
        second = remat.compile(first, budget="1GiB")
        steps(second, module, "compiled twice")
    finally:
        first.close()
        if second is not None:
            second.close()


@scene("remat: optimize of what is planned")
def planned_twice(_: Case) -> None:
    module = model()
    first = remat.optimize(loss_of(module), [batch()], None)
    second = None
    try:
        second = remat.optimize(first, [batch()], None)
        steps(second, module, "planned twice")
    finally:
        first.close()
        if second is not None:
            second.close()


@scene("remat: the profile of another step")
def other_profile(_: Case) -> None:
    module = model()
    planned = remat.optimize(module, [batch()], None, profile=remat_problem())
    steps(planned, module, "with another's profile")
    planned.close()


@scene("remat: the optimizer of another model")
def other_optimizer(_: Case) -> None:
    module = model()
    planned = remat.optimize(module, [batch()], None, optimizer=torch.optim.Adam(model().parameters()))
    steps(planned, module, "with another's optimizer")
    planned.close()


@scene("remat: a step in two threads")
def step_in_threads(_: Case) -> None:
    from benchmarks.misuse_case import in_thread

    module = model()
    planned = remat.optimize(module, [batch()], None)
    in_thread(lambda: steps(planned, module, "in another thread"))
    steps(planned, module, "in this thread")
    planned.close()


@scene("remat: backward in another thread")
def remat_backward_elsewhere(_: Case) -> None:
    from benchmarks.misuse_case import in_thread

    module = model()
    expected = plain(module)
    planned = remat.optimize(loss_of(module), [batch()], None)
    in_thread(planned(batch()).backward)
    same(gradients_of(module), expected, "backward elsewhere")
    planned.close()


@scene("remat: parameters change between forward and backward")
def remat_changed(_: Case) -> None:
    module = model()
    planned = remat.optimize(loss_of(module), [batch()], None)
    try:
        loss = planned(batch())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        loss.backward()
    finally:
        planned.close()


@scene("remat: a budget of one byte")
def remat_one_byte(_: Case) -> None:
    remat.optimize(model(), [batch()], 1)


@scene("remat: compiled, a copy is trained")
def compiled_copy(case: Case) -> None:
    compiled = remat.compile(model(), budget="1GiB")
    other = copy.deepcopy(compiled)
    try:
        steps(other, other, "a copy")
    finally:
        compiled.close()
        other.close()


@scene("remat: the options of torch.compile's backend, misspelt")
def misspelt(_: Case) -> None:
    compiled: Any = torch.compile(model(), backend="penstock", options={"bugdet": "1GiB"})
    compiled(batch())


@scene("remat: torch.compile's backend without options")
def no_options(_: Case) -> None:
    compiled: Any = torch.compile(model(), backend="penstock")
    compiled(batch())


# tiers


@scene("tiers: a handle after its waterfall is closed")
def handle_after_close(case: Case) -> None:
    waterfall = tiers.waterfall_for("cpu", case.budget(disk=case.disk()))
    handle = waterfall.park(torch.arange(100_000).untyped_storage())
    waterfall.close()
    handle.get()


@scene("tiers: a handle after its release")
def handle_after_release(case: Case) -> None:
    waterfall = tiers.waterfall_for("cpu", case.budget(disk=case.disk()))
    try:
        handle = waterfall.park(torch.arange(100_000).untyped_storage())
        handle.release()
        handle.get()
    finally:
        waterfall.close()


@scene("tiers: one storage is parked twice")
def parked_twice(case: Case) -> None:
    waterfall = tiers.waterfall_for("cpu", case.budget(disk=case.disk()))
    tensor = torch.arange(100_000)
    first, second = (waterfall.park(tensor.untyped_storage()) for _ in range(2))
    waterfall.drain()
    layout, expected = tiers.ViewLayout.of(tensor), tensor.clone()
    del tensor
    for step in (first, second):
        require(torch.equal(layout.rebuild(step.get()), expected), "both come back")
        step.release()
    waterfall.close()


@scene("tiers: an empty storage is parked")
def parked_empty(case: Case) -> None:
    waterfall = tiers.waterfall_for("cpu", case.budget(disk=case.disk()))
    try:
        handle = waterfall.park(torch.empty(0).untyped_storage())
        require(handle.get().nbytes() == 0, "nothing comes back")
        handle.release()
    finally:
        waterfall.close()


@scene("tiers: more is given back than was taken")
def credited(_: Case) -> None:
    budget = tiers.Budget(host="1MiB")
    budget.charge("host", 10)
    budget.credit("host", 20)


@scene("tiers: a place that is not there")
def no_place(case: Case) -> None:
    tiers.Budget(host="1MiB").charge("potatoes", 10)


@scene("tiers: what belongs to another tier")
def other_tiers(_: Case) -> None:
    first, second = (tiers.HostTier("1MiB", pinned=False) for _ in range(2))
    try:
        second.release(first.reserve(4096))
    finally:
        first.close()
        second.close()


@scene("tiers: an extent is released twice")
def released_twice(_: Case) -> None:
    tier = tiers.HostTier("1MiB", pinned=False)
    try:
        extent = tier.reserve(4096)
        tier.release(extent)
        tier.release(extent)
    finally:
        tier.close()


@scene("tiers: more than there is room for")
def too_much(_: Case) -> None:
    tier = tiers.HostTier("1MiB", pinned=False)
    try:
        tier.reserve(2**21)
    finally:
        tier.close()
