"""Misuses of `offload` that no signature shows: wrong order, and objects that two of ours share."""

import gc
import shutil
import threading
from typing import Any

import torch
from torch import nn

from benchmarks.misuse_engine import batch, gradients_of, loss_of, model, plain, same, steps, trains
from benchmarks.misuse_table import require, scene
from benchmarks.soak_case import Case
from penstock import offload, remat


def offloader_of(case: Case, module: nn.Module, **changes: Any) -> offload.Offloader:
    given = {"budget": case.budget(disk=case.disk()), "min_size": 0}
    return offload.activations(module, **(given | changes))


def forward(module: nn.Module) -> torch.Tensor:
    result: torch.Tensor = module(batch()).square().mean()
    return result


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
