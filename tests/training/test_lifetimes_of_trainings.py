"""Trainings live as long as what they train: several at once, dropped, made again; and accesses that no mode sees."""

import copy
import functools
import gc
import pickle
import queue
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from penstock import probe
from penstock.native import can_refuse
from penstock.offload import training
from penstock.state import _past
from penstock.training import _managed

MIB = 2**20
guarded = pytest.mark.skipif(not can_refuse(), reason="needs a C++ compiler")


def make_model(depth=12, width=192, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        *[part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())], nn.Linear(width, 10)
    )


def beside(model, size_mib=3):
    gc.collect()
    return probe.held_bytes("cpu") - sum(each.nbytes for each in model.parameters()) + int(size_mib * MIB)


def step(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    loss = functional.cross_entropy(model(torch.randn(256, 192, generator=generator)), torch.arange(256) % 10)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def run(tmp_path, loop, *, size_mib=3):
    """What ``loop(model, optimizer, context)`` returns, within a budget; it is what it returns plainly."""
    import contextlib

    model = make_model()
    expected = loop(model, sgd(model), contextlib.nullcontext())
    model = make_model()
    optimizer = sgd(model)
    with contextlib.closing(training(model, optimizer, beside(model, size_mib), disk=tmp_path)) as ours:
        seen = loop(model, optimizer, ours)
    assert seen == expected
    return ours


# lifetimes


def test_a_training_that_nobody_has_any_more_is_closed(tmp_path):
    model = make_model()
    optimizer = sgd(model)
    ours = training(model, optimizer, beside(model), disk=tmp_path)
    with ours:
        step(model, optimizer)
    managed = weakref.ref(ours._managed)
    waterfall = weakref.ref(ours._managed.pages.copies.waterfall)
    threads = [each for each in threading.enumerate() if "penstock" in each.name]
    del ours, model, optimizer
    gc.collect()
    assert managed() is None
    for thread in threads + [each for each in threading.enumerate() if "penstock" in each.name]:
        thread.join(60)
        assert not thread.is_alive()
    gc.collect()
    assert waterfall() is None
    assert not _past._replaced
    assert torch.ones(3).sum() == 3


def test_a_model_outlives_its_training(tmp_path):
    def fit():
        model = make_model()
        optimizer = sgd(model)
        ours = training(model, optimizer, beside(model), disk=tmp_path)
        for number in range(3):
            with ours:
                step(model, optimizer, number)
        return model

    fitted, plain = fit(), make_model()
    optimizer = sgd(plain)
    for number in range(3):
        step(plain, optimizer, number)
    gc.collect()
    assert all(map(torch.equal, fitted.parameters(), plain.parameters()))


def test_a_cell_that_runs_again(tmp_path):
    """With new models, and with the same model and a new optimizer."""
    plain = make_model()
    expected = []
    for _ in range(3):
        optimizer = sgd(plain)
        expected.append([step(plain, optimizer, number) for number in range(2)])
    model = make_model()
    budget = beside(model)
    seen = []
    for _ in range(3):
        optimizer = sgd(model)
        ours = training(model, optimizer, budget, disk=tmp_path)
        losses = []
        for number in range(2):
            with ours:
                losses.append(step(model, optimizer, number))
        seen.append(losses)
    assert seen == expected
    assert len(_managed._open) == 1
    ours.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    del ours, optimizer, model
    budget = beside(nn.Linear(1, 1), 3)
    for seed in range(3):  # as in a search, without close
        model = make_model(seed=seed)
        optimizer = sgd(model)
        ours = training(model, optimizer, budget, disk=tmp_path)
        with ours:
            step(model, optimizer)
    ours.close()


def test_an_earlier_training_of_the_model_says_that_it_is_closed(tmp_path):
    model = make_model()
    budget = beside(model)
    first = training(model, sgd(model), budget, disk=tmp_path)
    second = training(model, sgd(model), budget, disk=tmp_path)
    with pytest.raises(ValueError, match="a later one has its model"), first:
        pass
    first.close()
    with second, pytest.raises(ValueError, match="in the middle of a step of another training"):
        training(model, sgd(model), "1GiB", disk=tmp_path)
    second.close()
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_two_trainings_take_turns(tmp_path):
    models, plain = [make_model(seed=seed) for seed in (0, 1)], [make_model(seed=seed) for seed in (0, 1)]
    theirs = [sgd(model) for model in plain]
    expected = [
        step(model, optimizer, number) for number in range(4) for model, optimizer in zip(plain, theirs, strict=True)
    ]
    optimizers = [sgd(model) for model in models]
    budget = beside(nn.ModuleList(models), 6)
    trainings = [
        training(model, optimizer, budget, disk=tmp_path) for model, optimizer in zip(models, optimizers, strict=True)
    ]
    seen = []
    for number in range(4):
        for ours, model, optimizer in zip(trainings, models, optimizers, strict=True):
            with ours:
                seen.append(step(model, optimizer, number))
    assert seen == expected
    trainings[0].close()
    with trainings[1]:
        step(models[1], optimizers[1])
    trainings[1].close()


def test_one_training_inside_of_another(tmp_path):
    """A teacher and its student: two contexts at once, and tensors of one in operators of the other."""
    teacher, student = make_model(seed=0), make_model(seed=1)
    plain_teacher, plain_student = copy.deepcopy(teacher), copy.deepcopy(student)

    def distil(teacher, student, first, second):
        losses, generator = [], torch.Generator().manual_seed(0)
        both = [sgd(teacher), sgd(student)] if first is None else [first.optimizer, second.optimizer]
        import contextlib

        for _ in range(4):
            batch = torch.randn(256, 192, generator=generator)
            with first or contextlib.nullcontext(), second or contextlib.nullcontext():
                wanted = teacher(batch)
                loss = functional.mse_loss(student(batch), wanted.detach()) + wanted.square().mean()
                loss.backward()
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = distil(plain_teacher, plain_student, None, None)
    budget = beside(nn.ModuleList([teacher, student]), 6)
    first = training(teacher, sgd(teacher), budget, disk=tmp_path)
    second = training(student, sgd(student), budget, disk=tmp_path)
    assert distil(teacher, student, first, second) == expected
    first.close()
    second.close()
    assert all(map(torch.equal, student.parameters(), plain_student.parameters()))


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Quiet, lambda: FlopCounterMode(display=False)])
def test_modes_of_the_users_around_inside_and_across(tmp_path, mode):
    model = make_model()
    optimizer = sgd(model)
    budget = beside(model)
    with mode():
        ours = training(model, optimizer, budget, disk=tmp_path)
        with ours:
            step(model, optimizer)
    with ours, mode():
        step(model, optimizer)
    crossing = mode()
    ours.__enter__()
    crossing.__enter__()
    step(model, optimizer)
    ours.__exit__(None, None, None)
    crossing.__exit__(None, None, None)
    around = mode()
    around.__enter__()
    ours.close()
    around.__exit__(None, None, None)
    assert not _get_current_dispatch_mode_stack()
    plain = make_model()
    optimizer = sgd(plain)
    for _ in range(3):
        step(plain, optimizer)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


# what no mode sees


def in_thread(do):
    found = queue.Queue()

    def work():
        try:
            found.put(do())
        except BaseException as error:
            found.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    result = found.get()
    if isinstance(result, BaseException):
        raise result
    return result


def test_threads_read_and_train(tmp_path):
    def loop(model, optimizer, context):
        seen = []
        for number in range(4):
            with context:
                generator = torch.Generator().manual_seed(number)
                loss = model(torch.randn(256, 192, generator=generator)).square().mean()
                in_thread(loss.backward)
                seen.append(in_thread(lambda: [each.grad.norm().item() for each in model.parameters()]))
                optimizer.step()
                optimizer.zero_grad()
            seen.append(in_thread(lambda: [each.detach().norm().item() for each in model.parameters()]))
        return seen

    run(tmp_path, loop)


def test_threads_of_any_callable_start(tmp_path):
    model, seen = make_model(), queue.SimpleQueue()
    ours = training(model, sgd(model), beside(model), disk=tmp_path)
    for target in (seen.put, functools.partial(seen.put), seen.put):
        thread = threading.Thread(target=target, args=(1,))
        thread.start()
        thread.join()
    ours.close()
    assert seen.qsize() == 3


@guarded
def test_a_thread_from_before_gets_an_error_that_names_the_parameter(tmp_path):
    asked, answered = queue.Queue(), queue.Queue()

    def serve():
        while (do := asked.get()) is not None:
            try:
                answered.put(do())
            except RuntimeError as error:
                answered.put(error)

    thread = threading.Thread(target=serve)
    thread.start()
    model = make_model()
    optimizer = sgd(model)
    ours = training(model, optimizer, beside(model), disk=tmp_path)
    for number in range(3):
        with ours:
            step(model, optimizer, number)
        present = {name: each.detach().clone() for name, each in model.named_parameters()}
        for name, parameter in model.named_parameters():
            for read in (lambda each=parameter: each.detach().clone(), lambda each=parameter: each.detach() + 0):
                asked.put(read)
                answer = answered.get()
                if isinstance(answer, RuntimeError):
                    assert name in str(answer)
                    assert "training.whole" in str(answer)
                else:
                    assert torch.equal(answer, present[name])
    ours.park()
    asked.put(lambda: model[0].weight.detach().norm())
    assert isinstance(answered.get(), RuntimeError)

    def read_whole():
        with ours.whole(model[0]):
            return model[0].weight.detach().norm()

    asked.put(read_whole)
    assert isinstance(answered.get(), torch.Tensor)
    asked.put(None)
    thread.join()
    ours.close()


@guarded
def test_what_is_due_is_not_found_as_it_was(tmp_path):
    """A step ends, and updates are put off: whoever reads past the watch gets an error, not the value of before."""
    asked, answered = queue.Queue(), queue.Queue()

    def serve():
        while (do := asked.get()) is not None:
            try:
                answered.put(do())
            except RuntimeError as error:
                answered.put(error)

    thread = threading.Thread(target=serve)
    thread.start()
    model = make_model()
    optimizer = sgd(model)
    ours = training(model, optimizer, "1GiB", disk=tmp_path)
    with ours:
        step(model, optimizer)
    asked.put(lambda: model[0].weight.detach().clone())
    answer = answered.get()
    assert isinstance(answer, RuntimeError)
    assert "yet to be updated" in str(answer)
    assert probe.held_bytes("cpu") >= sum(each.nbytes for each in model.parameters())
    first = model[0].weight.detach().clone()  # does what is due
    asked.put(lambda: model[0].weight.detach().clone())
    assert torch.equal(answered.get(), first)
    asked.put(None)
    thread.join()
    ours.close()


def through_queue(weight):
    from multiprocessing.reduction import ForkingPickler

    return pickle.loads(ForkingPickler.dumps(weight.detach())).sum().item()


ROADS = {
    "print": repr,
    "a capsule": lambda weight: dlpack.from_dlpack(dlpack.to_dlpack(weight.detach())).sum().item(),
    "torch.to_dlpack": lambda weight: dlpack.from_dlpack(torch.to_dlpack(weight.detach())).sum().item(),
    "the storage": lambda weight: sum(bytes(weight.untyped_storage()[:4096])),
    "part of the storage": lambda weight: weight.untyped_storage()[:64].tolist(),
    "a copy of the storage": lambda weight: bytes(weight.untyped_storage().clone()[:64]),
    "numpy": lambda weight: float(weight.detach().numpy().sum()),
    "a list": lambda weight: weight.detach().tolist(),
    "a queue": through_queue,
    "a copy": lambda weight: copy.deepcopy(weight).sum().item(),
}


@pytest.mark.parametrize("name", ROADS)
def test_roads_past_the_dispatcher(tmp_path, name):
    def loop(model, optimizer, context):
        seen = []
        for number in range(4):
            with context:
                seen.append(step(model, optimizer, number))
            if number in (1, 3):
                seen += [ROADS[name](model[index].weight) for index in (0, 4)]
        return seen

    run(tmp_path, loop)
