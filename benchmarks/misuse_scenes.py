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
    arguments = {"budget": case.budget(disk=case.disk()), "min_size": 0}
    return offload.activations(module, **(arguments | changes))


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
    for offloader in (first, second, first, second):
        trains(offloader, module)
    first.close()
    second.close()


@scene("offload: two offloaders in two threads")
def two_threads(case: Case) -> None:
    errors: list[BaseException] = []

    def train(number: int) -> None:
        try:
            module = model()
            offloader = offload.activations(module, disk=case.disk(f"disk{number}"), min_size=0)
            trains(offloader, module, 5)
            offloader.close()
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
    offloader = offloader_of(case, module)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with offloader:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    try:
        trains(offloader, module)
    finally:
        leave.set()
        thread.join()
        offloader.close()


@scene("offload: backward twice with retain_graph")
def backward_twice(case: Case) -> None:
    module = model()
    offloader, expected = offloader_of(case, module), plain(module)
    with offloader:
        loss = forward(module)
        loss.backward(retain_graph=True)
        module.zero_grad()
        loss.backward()
    same(gradients_of(module), expected, "backward again")
    offloader.close()


@scene("offload: backward twice without retain_graph")
def backward_again(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    try:
        with offloader:
            loss = forward(module)
            loss.backward()
            loss.backward()
    finally:
        offloader.close()


@scene("offload: backward after close")
def backward_after_close(case: Case) -> None:
    module = model()
    offloader, expected = offloader_of(case, module), plain(module)
    with offloader:
        loss = forward(module)
    offloader.close()
    loss.backward()
    same(gradients_of(module), expected, "backward after close")


@scene("offload: closed between forward and backward, inside")
def closed_inside(case: Case) -> None:
    module = model()
    offloader, expected = offloader_of(case, module), plain(module)
    with offloader:
        loss = forward(module)
        offloader.close()
        loss.backward()
    same(gradients_of(module), expected, "backward after close")


@scene("offload: backward outside of the context")
def backward_outside(case: Case) -> None:
    module = model()
    offloader, expected = offloader_of(case, module), plain(module)
    for _ in range(3):
        module.zero_grad()
        with offloader:
            loss = forward(module)
        loss.backward()
        same(gradients_of(module), expected, "backward outside")
    offloader.close()


@scene("offload: backward in another thread")
def backward_elsewhere(case: Case) -> None:
    module = model()
    offloader, expected = offloader_of(case, module), plain(module)
    for _ in range(2):
        module.zero_grad()
        with offloader:
            loss = forward(module)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        same(gradients_of(module), expected, "backward elsewhere")
    offloader.close()


@scene("offload: backward in a forked child")
def backward_forked(case: Case) -> None:
    from benchmarks.misuse_case import in_child

    module = model()
    offloader = offloader_of(case, module)
    try:
        with offloader:
            loss = forward(module)
            in_child(loss.backward)
    finally:
        offloader.close()


@scene("offload: create_graph")
def create_graph(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    try:
        with offloader:
            torch.autograd.grad(forward(module), list(module.parameters()), create_graph=True)
    finally:
        offloader.close()


@scene("offload: the optimizer steps between forward and backward")
def changed_between(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    try:
        with offloader:
            loss = forward(module)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1)
            loss.backward()
    finally:
        offloader.close()


@scene("offload: an exception inside, then on")
def exception_inside(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    for _ in range(2):
        try:
            with offloader:
                forward(module)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    trains(offloader, module)
    offloader.close()


@scene("offload: the model is dropped in use")
def dropped(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    trains(offloader, module)
    del module
    gc.collect()
    offloader.statistics()
    offloader.close()


@scene("offload: a parameter is replaced in use")
def replaced(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    trains(offloader, module)
    module[0].weight = nn.Parameter(torch.ones_like(module[0].weight))  # type: ignore[index]
    trains(offloader, module)
    offloader.close()


@scene("offload: its folder goes in use")
def folder_gone(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    shutil.rmtree(case.disk())
    trains(offloader, module)
    offloader.close()


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
    offloader = offload.activations(module, disk=[case.disk(), case.disk()], min_size=0)
    trains(offloader, module)
    offloader.close()


@scene("offload: a budget of one byte")
def one_byte(case: Case) -> None:
    module = model()
    offloader = offload.activations(module, budget=1, disk=case.disk(), min_size=0)
    try:
        trains(offloader, module)
    finally:
        offloader.close()


@scene("offload: a budget below the activations")
def small_budget(case: Case) -> None:
    module = model()
    size = sum(parameter.nbytes for parameter in module.parameters())
    offloader = offload.activations(module, budget=2 * size + 10, disk=case.disk(), min_size=0)
    try:
        trains(offloader, module, 4)
    finally:
        offloader.close()


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
    offloader = offloader_of(case, module)

    def step(x: torch.Tensor) -> torch.Tensor:
        with offloader:
            return module(x).square().mean()

    planned = None
    try:
        planned = remat.optimize(step, [batch()], None)
        steps(planned, module, "offloading inside of a planned step")
    finally:
        offloader.close()
        if planned is not None:
            planned.close()


@scene("offload: around a planned step")
def offload_around_remat(case: Case) -> None:
    module = model()
    offloader = offloader_of(case, module)
    planned = remat.optimize(loss_of(module), [batch()], None)
    expected = plain(module)
    for _ in range(2):
        module.zero_grad()
        with offloader:
            planned(batch()).backward()
        same(gradients_of(module), expected, "offloading around a planned step")
    offloader.close()
    planned.close()
