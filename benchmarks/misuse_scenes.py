"""Misuses that no signature shows: wrong order, and objects that two of ours share."""

import copy
import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.misuse_engine import batch, gradients_of, loss_of, model, plain, remat_problem, same, steps, trains
from benchmarks.misuse_fleets import batches, fields, job, net, options, sgd, trained
from benchmarks.misuse_graphs import chosen, copied_sums, edge_index, equal_rows, graph, rows, typed, x
from benchmarks.misuse_table import Told, require, scene
from benchmarks.soak_case import Case
from penstock import fleet, offload, relational, remat, tiers, unified


def offloader_of(case: Case, module: nn.Module, **changes: Any) -> offload.Offloader:
    given = {"budget": case.budget(disk=case.disk()), "min_size": 0}
    return offload.activations(module, **(given | changes))


def forward(module: nn.Module) -> torch.Tensor:
    result: torch.Tensor = module(batch()).square().mean()
    return result


# offload


@scene("offload: two offloaders of one model, in turn")
def two_in_turn(case: Case) -> None:
    module = model()
    first, second = offloader_of(case, module), offloader_of(case, module)
    trains(first, module)
    trains(second, module)
    first.close()
    trains(second, module)
    second.close()


@scene("offload: two offloaders of one model and one Budget")
def two_on_one_account(case: Case) -> None:
    module, budget = model(), case.budget(device="1GiB", disk=case.disk())
    first = offload.activations(module, budget=budget, min_size=0)
    held_bytes = budget.held_bytes("device")
    second = offload.activations(module, budget=budget, min_size=0)
    require(budget.held_bytes("device") == held_bytes, "parameters count once")
    for one in (first, second, first, second):
        trains(one, module)
    first.close()
    second.close()


@scene("offload: two offloaders in two threads")
def two_threads(case: Case) -> None:
    errors: list[BaseException] = []

    def train(number: int) -> None:
        try:
            module = model()
            one = offload.activations(module, disk=case.disk(f"disk{number}"), min_size=0)
            trains(one, module, 5)
            one.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@scene("offload: one offloader trained by two threads")
def one_in_two_threads(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with one:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    try:
        trains(one, module)
    finally:
        leave.set()
        thread.join()
        one.close()


@scene("offload: backward twice with retain_graph")
def backward_twice(case: Case) -> None:
    module = model()
    one, expected = offloader_of(case, module), plain(module)
    with one:
        loss = forward(module)
        loss.backward(retain_graph=True)
        module.zero_grad()
        loss.backward()
    same(gradients_of(module), expected, "backward again")
    one.close()


@scene("offload: backward twice without retain_graph")
def backward_again(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    try:
        with one:
            loss = forward(module)
            loss.backward()
            loss.backward()
    finally:
        one.close()


@scene("offload: backward after close")
def backward_after_close(case: Case) -> None:
    module = model()
    one, expected = offloader_of(case, module), plain(module)
    with one:
        loss = forward(module)
    one.close()
    loss.backward()
    same(gradients_of(module), expected, "backward after close")


@scene("offload: closed between forward and backward, inside")
def closed_inside(case: Case) -> None:
    module = model()
    one, expected = offloader_of(case, module), plain(module)
    with one:
        loss = forward(module)
        one.close()
        loss.backward()
    same(gradients_of(module), expected, "backward after close")


@scene("offload: backward outside of the context")
def backward_outside(case: Case) -> None:
    module = model()
    one, expected = offloader_of(case, module), plain(module)
    for _ in range(3):
        module.zero_grad()
        with one:
            loss = forward(module)
        loss.backward()
        same(gradients_of(module), expected, "backward outside")
    one.close()


@scene("offload: backward in another thread")
def backward_elsewhere(case: Case) -> None:
    module = model()
    one, expected = offloader_of(case, module), plain(module)
    for _ in range(2):
        module.zero_grad()
        with one:
            loss = forward(module)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        same(gradients_of(module), expected, "backward elsewhere")
    one.close()


@scene("offload: backward in a forked child")
def backward_forked(case: Case) -> None:
    from benchmarks.misuse_case import in_child

    module = model()
    one = offloader_of(case, module)
    try:
        with one:
            loss = forward(module)
            in_child(loss.backward)
    finally:
        one.close()


@scene("offload: create_graph")
def create_graph(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    try:
        with one:
            torch.autograd.grad(forward(module), list(module.parameters()), create_graph=True)
    finally:
        one.close()


@scene("offload: the optimizer steps between forward and backward")
def changed_between(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    try:
        with one:
            loss = forward(module)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1)
            loss.backward()
    finally:
        one.close()


@scene("offload: an exception inside, then on")
def exception_inside(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    for _ in range(2):
        try:
            with one:
                forward(module)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    trains(one, module)
    one.close()


@scene("offload: the model is dropped in use")
def dropped(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    trains(one, module)
    del module
    gc.collect()
    one.statistics()
    one.close()


@scene("offload: a parameter is replaced in use")
def replaced(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    trains(one, module)
    module[0].weight = nn.Parameter(torch.ones_like(module[0].weight))  # type: ignore[index]
    trains(one, module)
    one.close()


@scene("offload: its folder goes in use")
def folder_gone(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    shutil.rmtree(case.disk())
    trains(one, module)
    one.close()


@scene("offload: a file where a folder should be")
def file_for_folder(case: Case) -> None:
    path = case.folder / "out" / "file"
    path.write_text("")
    offload.activations(model(), disk=path)


@scene("offload: a folder that is not there")
def no_folder(case: Case) -> None:
    offload.activations(model(), disk=case.folder / "nowhere")


@scene("offload: one folder twice")
def folder_twice(case: Case) -> None:
    module = model()
    one = offload.activations(module, disk=[case.disk(), case.disk()], min_size=0)
    trains(one, module)
    one.close()


@scene("offload: a budget of one byte")
def one_byte(case: Case) -> None:
    module = model()
    one = offload.activations(module, budget=1, disk=case.disk(), min_size=0)
    try:
        trains(one, module)
    finally:
        one.close()


@scene("offload: a budget below the activations")
def small_budget(case: Case) -> None:
    module = model()
    size = sum(parameter.nbytes for parameter in module.parameters())
    one = offload.activations(module, budget=2 * size + 10, disk=case.disk(), min_size=0)
    try:
        trains(one, module, 4)
    finally:
        one.close()


@scene("offload: wrap of what is wrapped")
def wrap_wrapped(case: Case) -> None:
    outer = None
    inner = offload.wrap(model(), disk=case.disk())
    try:
        outer = offload.wrap(inner, disk=case.disk())
        outer(batch())
    finally:
        inner.offloader.close()
        if outer is not None:
            outer.offloader.close()


@scene("offload: neither disk nor host")
def no_tier(_: Case) -> None:
    offload.activations(model())


@scene("offload: module patterns that match nothing")
def no_match(case: Case) -> None:
    offload.activations(model(), disk=case.disk(), modules=["blocks.*"]).close()


@scene("offload: a budget and a Budget's own tiers")
def doubled_tiers(case: Case) -> None:
    offload.activations(model(), disk=case.disk(), budget=case.budget(disk=case.disk())).close()


@scene("offload: inside of a planned step")
def offload_inside_remat(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)

    def step(x: torch.Tensor) -> torch.Tensor:
        with one:
            return module(x).square().mean()

    planned = None
    try:
        planned = remat.optimize(step, [batch()], None)
        steps(planned, module, "offloading inside of a planned step")
    finally:
        one.close()
        if planned is not None:
            planned.close()


@scene("offload: around a planned step")
def offload_around_remat(case: Case) -> None:
    module = model()
    one = offloader_of(case, module)
    planned = remat.optimize(loss_of(module), [batch()], None)
    expected = plain(module)
    for _ in range(2):
        module.zero_grad()
        with one:
            planned(batch()).backward()
        same(gradients_of(module), expected, "offloading around a planned step")
    one.close()
    planned.close()


# remat


@scene("remat: two steps of one model on one Budget")
def two_steps(case: Case) -> None:
    module, budget = model(), case.budget(device="1GiB")
    first, second = (remat.optimize(module, [batch()], budget) for _ in range(2))
    for one in (first, second, first):
        steps(one, module, "two steps")
    first.close()
    steps(second, module, "the other is closed")
    second.close()


@scene("remat: a Budget shared with offloading")
def two_rooms(case: Case) -> None:
    module, budget = model(), case.budget(device="1GiB", disk=case.disk())
    planned = remat.optimize(module, [batch()], budget)
    one = offload.activations(module, budget=budget, min_size=0)
    for _ in range(2):
        steps(planned, module, "beside offloading")
        trains(one, module)
    planned.close()
    one.close()


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
    for one in (first, second):
        require(torch.equal(layout.rebuild(one.get()), expected), "both come back")
        one.release()
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


# unified


def features(case: Case, source: Any = None, **changes: Any) -> unified.TieredFeatures:
    given = {"host_budget": 20 * 1024, "in_flight": 4096, "disk": case.disk()}
    return unified.TieredFeatures(rows() if source is None else source, **(given | changes))


@scene("unified: one table in two TieredFeatures")
def table_twice(case: Case) -> None:
    source = rows()
    first, second = features(case, source), features(case, source)
    equal_rows(first, rows())
    first.close()
    equal_rows(second, rows())
    second.close()


@scene("unified: one file in two TieredFeatures")
def file_twice(case: Case) -> None:
    path = unified.write_features(case.folder / "out" / "a.features", rows(), progress=False)
    first, second = features(case, path), features(case, path)
    first.close()
    equal_rows(second, rows())
    second.close()


@scene("unified: TieredFeatures of TieredFeatures")
def table_of_table(case: Case) -> None:
    first = features(case)
    try:
        second = features(case, first)
        equal_rows(second, rows())
        second.close()
    finally:
        first.close()


@scene("unified: TieredFeatures of a unified tensor")
def table_of_unified(case: Case) -> None:
    with features(case, unified.wrap(rows())) as table:
        equal_rows(table, rows())


@scene("unified: read in threads, closed meanwhile")
def closed_meanwhile(case: Case) -> None:
    table = features(case)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(200):
                require(torch.equal(table[chosen()], rows()[chosen()]), "rows differ")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    table.close()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@scene("unified: the file goes in use")
def file_gone(case: Case) -> None:
    path = unified.write_features(case.folder / "out" / "a.features", rows(), progress=False)
    with features(case, path) as table:
        path.unlink()
        equal_rows(table, rows())


@scene("unified: the file is written anew in use")
def file_replaced(case: Case) -> None:
    path = unified.write_features(case.folder / "out" / "a.features", rows(), progress=False)
    with features(case, path) as table:
        unified.write_features(path, rows() + 1, progress=False)
        equal_rows(table, rows())


for _label, _index in {
    "a row that is not there": 40, "a row before the first": -41, "fractions": torch.tensor([0.5]),
    "a mask that is too short": torch.ones(3, dtype=torch.bool), "text": "12 potatoes", "backwards": slice(5, 0, -1),
    "huge": 2**70, "None": None, "columns": (0, 99),
}.items():  # fmt: skip

    @scene(f"unified: features by {_label}")
    def indexed(case: Case, index: Any = _index) -> None:
        with features(case) as table:
            require(table[index].shape == rows()[index].shape, "as PyTorch's")

    @scene(f"unified: a unified tensor by {_label}")
    def unified_indexed(_: Case, index: Any = _index) -> None:
        require(unified.wrap(rows())[index].shape == rows()[index].shape, "as PyTorch's")


@scene("unified: a loader inside of itself")
def nested_loader(case: Case) -> None:
    loader = unified.Loader(unified.NeighborSampler(graph(), [2]), rows()[:4], torch.arange(4), batch_size=2)
    pairs = [(outer, inner) for outer in loader for inner in loader]
    require(len(pairs) == 4, "all pairs")


@scene("unified: a loader that is left early")
def left_early(case: Case) -> None:
    with features(case) as table:
        sampler = unified.NeighborSampler(unified.Graph(edge_index(), 40), [2])
        loader = unified.Loader(sampler, table, torch.arange(40), batch_size=2, ahead=4)
        for _ in loader:
            break
        require(len(list(loader)) == 20, "the next epoch is whole")


@scene("unified: a loader over features that are closed")
def loader_of_closed(case: Case) -> None:
    table = features(case)
    sampler = unified.NeighborSampler(unified.Graph(edge_index(), 40), [2])
    loader = unified.Loader(sampler, table, torch.arange(40), batch_size=2)
    table.close()
    list(loader)


@scene("unified: a loader whose features have too few rows")
def too_few_rows(_: Case) -> None:
    list(unified.Loader(unified.NeighborSampler(graph(), [2]), rows()[:2], torch.arange(4), batch_size=2))


@scene("unified: a loader whose labels are too few")
def too_few_labels(_: Case) -> None:
    list(
        unified.Loader(
            unified.NeighborSampler(graph(), [2]), rows()[:4], torch.arange(4), batch_size=2, labels=torch.ones(1)
        )
    )


@scene("unified: seeds that are no nodes")
def no_nodes(_: Case) -> None:
    list(unified.Loader(unified.NeighborSampler(graph(), [2]), rows()[:4], torch.tensor([9]), batch_size=2))


@scene("unified: a source that fails in the middle of writing")
def failing_source(case: Case) -> None:
    def blocks() -> Iterator[torch.Tensor]:
        yield rows()
        raise ValueError("`source` must be whole, such as the user says")

    path = case.folder / "out" / "a.features"
    try:
        unified.write_features(path, blocks(), progress=False)
    finally:
        require(not os.listdir(path.parent), "nothing is left")


@scene("unified: blocks of other widths")
def other_widths(case: Case) -> None:
    unified.write_features(case.folder / "out" / "a.features", [rows(), rows()[:, :3]], progress=False)


@scene("unified: more rows than the Budget has room for")
def no_room(case: Case) -> None:
    features(case, budget=case.budget(host="1KiB"))


# relational


@scene("relational: one graph on two layers")
def two_layers(_: Case) -> None:
    shared, fresh = typed(), typed()
    torch.manual_seed(0)
    first, second = (relational.RGCNConv(8, 8, 2) for _ in range(2))
    ours, expected = second(first(x(), shared), shared), second(first(x(), fresh), typed())
    require(torch.equal(ours, expected), "as on graphs of their own")
    ours.sum().backward()


@scene("relational: one graph in two threads")
def graph_in_threads(_: Case) -> None:
    shared, found = typed(), []
    conv = relational.RGCNConv(8, 8, 2)
    threads = [threading.Thread(target=lambda: found.append(conv(x(), shared))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(len(found) == 3 and all(torch.equal(one, conv(x(), typed())) for one in found), "as in one thread")


@scene("relational: one graph in a forked child")
def graph_forked(_: Case) -> None:
    from benchmarks.misuse_case import in_child

    shared, conv = typed(), relational.RGCNConv(8, 8, 2)
    expected = conv(x(), shared)
    in_child(lambda: require(torch.equal(conv(x(), shared), expected), "as in the parent"))


@scene("relational: the caller's edges change")
def edges_change(_: Case) -> None:
    edges = edge_index()
    one = relational.RelationalGraph(edges, torch.zeros(6, dtype=torch.int64))
    layer = relational.layer(copied_sums)
    expected = layer(one, x())
    edges.fill_(99)
    require(torch.equal(layer(one, x()), expected), "the graph has its own")


@scene("relational: one graph on two Budgets")
def two_accounts(case: Case) -> None:
    one = typed()
    first, second = case.budget(device="1MiB"), case.budget(device="1MiB")
    one.charge_to(first)
    one.charge_to(second)
    relational.RGCNConv(8, 8, 2)(x(), one)
    require(first.held_bytes("device") == 0 or second.held_bytes("device") == 0, "on one account at a time")
    del one


@scene("relational: one graph on one Budget twice")
def one_account_twice(case: Case) -> None:
    one, budget = typed(), case.budget(device="1MiB")
    one.charge_to(budget)
    held_bytes = budget.held_bytes("device")
    one.charge_to(budget)
    require(budget.held_bytes("device") == held_bytes, "counts once")


def _wrong_inputs() -> dict[str, Callable[[], Any]]:
    conv = relational.RGCNConv(8, 6, 2)
    return {
        "too few rows": lambda: conv(x()[:3], typed()),
        "too many rows": lambda: conv(torch.ones(9, 8), typed()),
        "another width": lambda: conv(torch.ones(4, 5), typed()),
        "whole numbers": lambda: conv(torch.ones(4, 8, dtype=torch.int64), typed()),
        "one dimension": lambda: conv(torch.ones(4), typed()),
        "another type of number": lambda: conv(x().double(), typed()),
        "edges without types": lambda: conv(x(), edge_index()),
        "types that the layer does not know": lambda: conv(x(), edge_index(), torch.full((6,), 9)),
        "types for other edges": lambda: conv(x(), edge_index(), torch.zeros(2, dtype=torch.int64)),
        "a graph of another number of types": lambda: conv(
            x(), relational.RelationalGraph(edge_index(), torch.arange(6), num_edge_types=6)
        ),
        "a graph of the other room": lambda: conv(x(), graph()),
    }


for _label in _wrong_inputs():

    @scene(f"relational: a layer's input, {_label}")
    def wrong_input(_: Case, label: str = _label) -> None:
        _wrong_inputs()[label]()


@scene("relational: the language outside of a layer")
def language_outside(_: Case) -> None:
    relational.exp(3.0)  # type: ignore[arg-type]


@scene("relational: a layer that returns nothing")
def returns_nothing(_: Case) -> None:
    relational.layer(lambda g, x: None)(typed(), x())


@scene("relational: a layer that takes nothing")
def takes_nothing(_: Case) -> None:
    relational.layer(lambda: None)(typed(), x())


@scene("relational: a layer that iterates over its graph")
def iterates(_: Case) -> None:
    relational.layer(lambda g, x: [one for one in g])(typed(), x())


@scene("relational: a layer that asks a value whether it is true")
def asks(_: Case) -> None:
    def branching(g: Any, x: Any) -> Any:
        for e in g.edges():
            return x[e.src] if x[e.src] > 0 else x[e.dst]

    relational.layer(branching)(typed(), x())


@scene("relational: backward twice")
def relational_twice(_: Case) -> None:
    conv = relational.RGCNConv(8, 6, 2)
    loss = conv(x(), typed()).sum()
    loss.backward()
    loss.backward()


@scene("relational: double backward")
def relational_double(_: Case) -> None:
    conv = relational.RGCNConv(8, 6, 2)
    (gradient,) = torch.autograd.grad(conv(x(), typed()).square().sum(), conv.weight, create_graph=True)
    gradient.sum().backward()


# fleet


def run(case: Case, *jobs: fleet.Job, **changes: Any) -> fleet.Results:
    return fleet.run(list(jobs), **(options(case) | changes))


def finished(results: fleet.Results) -> None:
    """All are done, or the first failure is raised."""
    for one in results.values():
        if one.state is fleet.JobState.FAILED:
            raise Told(one.error)


@scene("fleet: a device that is not there")
def no_cuda(case: Case) -> None:
    run(case, job(), devices=["cuda:0"])


@scene("fleet: two jobs whose factory returns one model")
def one_model(case: Case) -> None:
    shared = net()
    finished(run(case, job(name="a", model=lambda: shared), job(name="b", model=lambda: shared)))


@scene("fleet: two jobs whose models share a parameter")
def one_parameter(case: Case) -> None:
    shared = nn.Parameter(torch.ones(16, 8))

    def make() -> nn.Module:
        made = net()
        made[0].weight = shared  # type: ignore[index]
        return made

    finished(run(case, job(name="a", model=make), job(name="b", model=make)))


@scene("fleet: two jobs whose models share a storage")
def one_storage(case: Case) -> None:
    shared = torch.ones(16, 8)

    def make() -> nn.Module:
        made = net()
        made[0].weight = nn.Parameter(shared[:])  # type: ignore[index]
        return made

    finished(run(case, job(name="a", model=make), job(name="b", model=make)))


@scene("fleet: two jobs whose data is one iterator")
def one_iterator(case: Case) -> None:
    shared = iter(batches())
    finished(run(case, job(name="a", data=lambda: shared), job(name="b", data=lambda: shared)))


@scene("fleet: two jobs with one optimizer")
def one_optimizer(case: Case) -> None:
    shared = sgd(net().parameters())
    finished(run(case, job(name="a", optimizer=lambda _: shared), job(name="b", optimizer=lambda _: shared)))


@scene("fleet: two jobs of one name")
def one_name(case: Case) -> None:
    run(case, job(), job())


@scene("fleet: one job object twice")
def one_job(case: Case) -> None:
    one = job()
    run(case, one, one)


@scene("fleet: no jobs")
def no_jobs(case: Case) -> None:
    require(len(run(case)) == 0, "no results")


@scene("fleet: no devices")
def no_devices(case: Case) -> None:
    run(case, job(), devices=[])


@scene("fleet: one device twice")
def device_twice(case: Case) -> None:
    trained(run(case, job(), devices=["cpu", "cpu"]), {})


@scene("fleet: a run_dir that has another's run")
def used_run_dir(case: Case) -> None:
    run(case, job())
    run(case, job())


@scene("fleet: two fleets at once in one run_dir")
def shared_run_dir(case: Case) -> None:
    given = options(case)
    with fleet.Fleet(**given) as first:
        first.add(job())
        with fleet.Fleet(**given) as second:
            second.add(job())
            second.wait()
        first.wait()


@scene("fleet: a job in two fleets")
def two_fleets(case: Case) -> None:
    one = job()
    for name in ("first", "second"):
        trained(run(case, one, run_dir=case.folder / "out" / name), {})


@scene("fleet: used before it is entered")
def fleet_unentered(case: Case) -> None:
    one = fleet.Fleet(**options(case))
    one.add(job())
    one.wait()


@scene("fleet: used after it is left")
def fleet_left(case: Case) -> None:
    with fleet.Fleet(**options(case)) as one:
        one.add(job())
        one.wait()
    one.add(job(name="b"))
    one.wait()


@scene("fleet: in another thread")
def fleet_thread(case: Case) -> None:
    from benchmarks.misuse_case import in_thread

    in_thread(lambda: trained(run(case, job()), {}))


@scene("fleet: in a forked child")
def fleet_forked(case: Case) -> None:
    from benchmarks.misuse_case import in_child

    in_child(lambda: trained(run(case, job()), {}))


@scene("fleet: inside of a job of a fleet")
def fleet_inside(case: Case) -> None:
    def data() -> list[torch.Tensor]:
        trained(run(case, job(), run_dir=case.folder / "out" / "inner"), {})
        return batches()

    trained(run(case, job(data=data)), {})


@scene("fleet: a job that nobody knows")
def unknown_job(case: Case) -> None:
    with fleet.Fleet(**options(case)) as one:
        one.add(job())
        try:
            one.pause("12 potatoes")
        finally:
            one.wait()


@scene("fleet: inside of an offloader")
def fleet_in_offloader(case: Case) -> None:
    one = offloader_of(case, model())
    try:
        with one:
            trained(run(case, job()), {})
    finally:
        one.close()


for _label, _changes in {
    "data that is empty": {"data": list}, "data that is no iterable": {"data": lambda: 12},
    "a model that is None": {"model": lambda: None}, "a model without parameters": {"model": nn.Tanh},
    "a loss that is None": {"loss": lambda model, batch: None},
    "a loss that is a number": {"loss": lambda model, batch: 0.5},
    "a loss of many numbers": {"loss": lambda model, batch: model(batch)},
    "a loss without gradients": {"loss": lambda model, batch: model(batch).square().mean().detach()},
    "a loss that does not use the model": {"loss": lambda model, batch: batch.sum()},
    "a loss that raises": {"loss": lambda model, batch: {}["potatoes"]},
    "an optimizer that is None": {"optimizer": lambda parameters: None},
    "an optimizer of other parameters": {"optimizer": lambda _: sgd(net().parameters())},
    "batches that fit nothing": {"data": lambda: [torch.ones(4, 5)] * 2},
    "a metric that is no number": {"metric": lambda model, batch: "12 potatoes"},
    "stages that are none": {"stages": lambda model: []},
    "stages of another model": {"stages": lambda model: list(net())},  # type: ignore[call-overload]
    "a scheduler that is None": {"lr_scheduler": lambda optimizer: None},
}.items():  # fmt: skip

    @scene(f"fleet: a job with {_label}")
    def odd_job(case: Case, changes: Any = _changes) -> None:
        finished(run(case, fleet.Job(**fields(**changes))))


@scene("fleet: a tracker that raises")
def raising_tracker(case: Case) -> None:
    class Tracker:
        def log(self, *_: Any) -> None:
            raise KeyError("potatoes")

        end = close = log

    trained(run(case, job(), trackers=[Tracker()]), {})


@scene("fleet: a stopper that returns text")
def odd_stopper(case: Case) -> None:
    finished(run(case, job(steps=4, evaluate_every=1), stopper=lambda *_: "12 potatoes"))


@scene("fleet: a scheduler that returns text")
def odd_scheduler(case: Case) -> None:
    finished(run(case, job(), job(name="b"), scheduler=lambda _: "12 potatoes"))


@scene("fleet: a budget below the smallest unit")
def fleet_small(case: Case) -> None:
    finished(run(case, job(), budget=100))


@scene("fleet: a Budget shared with offloading")
def fleet_budget(case: Case) -> None:
    budget = case.budget(device="64MiB", host="64MiB", disk=case.disk())
    module = model()
    one = offload.activations(module, budget=budget, min_size=0)
    trained(run(case, job(), budget=budget, host_budget=None, disk=None), {})
    trains(one, module)
    one.close()
