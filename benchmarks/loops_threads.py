"""Other threads, processes and libraries: whoever reads weights past PyTorch's dispatcher of this thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.utils import dlpack

from benchmarks.loops_common import STEPS, batches, class_loss, mlp
from benchmarks.loops_door import Door, loop
from penstock.errors import ForkedProcessError


def trained(
    door: Door,
    *,
    inside: Callable[[Any, Any], Any] | None = None,
    between: Callable[[Any, Any], Any] | None = None,
    data: Any = None,
) -> None:
    """Train, and call functions with the model and the optimizer: in the context before it ends, and after it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), data or batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            if inside is not None:
                door.note(inside(model, optimizer))
            optimizer.zero_grad()
        if between is not None:
            door.note(between(model, optimizer))
        door.note(loss)


def in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@loop
def logger_thread(door: Door) -> None:
    """A thread that reads weights between steps."""
    trained(door, between=lambda model, _: in_thread(lambda: model[0].weight.detach().norm().item()))


@loop
def logger_thread_inside(door: Door) -> None:
    trained(door, inside=lambda model, _: in_thread(lambda: model[2].weight.detach().norm().item()))


@loop
def state_dict_in_a_thread(door: Door) -> None:
    """A checkpoint is copied by a thread while this one waits."""
    trained(door, between=lambda model, _: in_thread(lambda: {n: v.clone() for n, v in model.state_dict().items()}))


@loop
def evaluation_in_a_pool(door: Door) -> None:
    rows = torch.randn(16, 160)

    def judge(model: Any, _: Any) -> Any:
        with ThreadPoolExecutor(2) as pool, torch.no_grad():
            return sum(pool.map(lambda part: float(model(part).sum()), rows.split(8)))

    trained(door, between=judge)


@loop
def backward_in_a_thread(door: Door) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            in_thread(loss.backward)
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def whole_step_in_a_thread(door: Door) -> None:
    """A GUI: the door was made in the main thread, and steps run in a worker."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)

    def step(batch: Any) -> torch.Tensor:
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        door.note(in_thread(lambda batch=batch: step(batch)))


@loop
def batches_from_a_thread(door: Door) -> None:
    """Prefetching: a thread makes batches with tensors while this one trains."""
    waiting: queue.Queue[Any] = queue.Queue(maxsize=2)

    def produce() -> None:
        for rows, labels in batches():
            waiting.put((rows.clone().mul_(1.0), labels))

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    trained(door, data=(waiting.get() for _ in range(STEPS)))
    thread.join()


@loop
def loader_with_workers(door: Door) -> None:
    whole = [torch.cat(parts) for parts in zip(*batches(), strict=True)]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*whole), batch_size=192, num_workers=1, shuffle=True
    )
    trained(door, data=list(loader))


@loop
def loader_with_workers_inside(door: Door) -> None:
    """Workers are forked while the training is open."""
    whole = [torch.cat(parts) for parts in zip(*batches(), strict=True)]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _ in door.steps(4):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*whole), batch_size=480, num_workers=1)
        for batch in loader:
            with door:
                loss = class_loss(net, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            door.note(loss)


@loop
def weights_through_a_queue(door: Door) -> None:
    """Weights are sent to a process of the user's by torch.multiprocessing."""
    context = torch.multiprocessing.get_context("fork")
    waiting = context.Queue()

    def send(model: Any, _: Any) -> float:
        waiting.put(model[0].weight.detach())
        return float(waiting.get().abs().sum())

    trained(door, between=send)


@loop
def state_through_a_queue(door: Door) -> None:
    context = torch.multiprocessing.get_context("fork")
    waiting = context.Queue()

    def send(model: Any, _: Any) -> Any:
        waiting.put({name: value.cpu() for name, value in model.state_dict().items()})
        return {name: value.clone() for name, value in waiting.get().items()}

    trained(door, between=send)


@loop
def model_shared_with_processes(door: Door) -> None:
    """Hogwild's first line: share_memory() before training."""
    model = mlp().share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


def forked(context: Any, function: Callable[[], Any]) -> Any:
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(function()))
    process.start()
    found = ours.recv() if ours.poll(20) else "nothing came"
    process.join(5)
    return found


@loop
def judged_in_a_forked_process(door: Door) -> None:
    """A forked child computes with the weights of the moment."""
    context = torch.multiprocessing.get_context("fork")
    rows = torch.randn(8, 160)
    answers: list[Any] = []

    def judge(model: Any, _: Any) -> float:
        def run() -> Any:
            try:
                with torch.no_grad():
                    return float(model(rows).sum())
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        answers.append(forked(context, run))
        if not isinstance(answers[-1], float):
            raise ForkedProcessError(answers[-1])  # it is the child that refuses, by name
        return answers[-1]

    trained(door, between=judge)


@loop
def exported_by_dlpack(door: Door) -> None:
    def read(model: Any, _: Any) -> float:
        return float(dlpack.from_dlpack(dlpack.to_dlpack(model[0].weight.detach())).abs().sum())

    trained(door, between=read, inside=read)


@loop
def read_by_numpy(door: Door) -> None:
    def read(model: Any, _: Any) -> Any:
        return float(np.from_dlpack(model[0].weight.detach()).sum()), np.asarray(model[2].weight.detach())[:4].copy()

    trained(door, between=read, inside=read)


@loop
def numpy_view_kept(door: Door) -> None:
    """A view by numpy that was made before training, and read in the middle of it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    view: Any = None
    for number, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 4:
            view = model[0].weight.detach().numpy()
        if view is not None:
            door.note(view.sum())
        door.note(loss)


@loop
def storage_read_as_bytes(door: Door) -> None:
    trained(door, between=lambda model, _: sum(bytes(model[2].weight.untyped_storage()[:4096])))


@loop
def pointer_read_by_ctypes(door: Door) -> None:
    """A kernel of the user's that takes data_ptr()."""
    import ctypes

    def read(model: Any, _: Any) -> float:
        weight = model[2].weight.detach()
        return float(sum((ctypes.c_float * 64).from_address(weight.data_ptr())))

    trained(door, between=read, inside=read)


@loop
def gradients_through_numpy(door: Door) -> None:
    """Gradients are averaged by another library between backward and step, and written back."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                array = parameter.grad.numpy()
                array *= 0.5
                parameter.grad.copy_(torch.from_numpy(np.clip(array, -0.1, 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        door.note(loss)


@loop
def average_by_a_thread(door: Door) -> None:
    """A thread keeps an average of the weights, woken after every step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net = door.train(model, optimizer)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    door.also(average)

    def update() -> None:
        with torch.no_grad():
            for mine, theirs in zip(average, model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        in_thread(update)
        door.note(loss)


@loop
def two_trainings_in_two_threads(door: Door) -> None:
    """Each thread makes its own model; they take turns step by step, so that numbers are the same in each run."""
    turn = threading.Barrier(1)
    models = [mlp(depth=2), mlp(depth=2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    nets = [door.train(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for _, batch in zip(door.steps(STEPS), batches(), strict=True):
        with door:
            losses = [class_loss(net, batch) for net in nets]
            for loss in losses:
                in_thread(loss.backward)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        turn.wait()
        door.note(*losses)
