"""Offloaders in the wrong hands: entered twice, left by others, pickled, told of modules that are not there."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from penstock import offload


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))


@pytest.fixture
def offloader(tmp_path):
    made = offload.activations(model(), disk=tmp_path, min_size=0)
    yield made
    made.close()


def in_thread(call):
    errors = []

    def run():
        try:
            call()
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_function_is_no_model(tmp_path):
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got the function .*activations\(model, "):
        offload.activations(lambda x: x, disk=tmp_path)


def test_one_thread_at_a_time_is_inside(offloader):
    with offloader:
        with pytest.raises(ValueError, match="another thread has entered"):
            in_thread(offloader.__enter__)
        with pytest.raises(ValueError, match="cannot be exited in a thread that has not entered"):
            in_thread(lambda: offloader.__exit__(None, None, None))
    with offloader:  # what was refused left nothing behind
        pass
    in_thread(offloader.__enter__)


def test_it_is_left_only_where_it_was_entered(offloader):
    with pytest.raises(ValueError, match="cannot be exited in a thread that has not entered"):
        offloader.__exit__(None, None, None)


def test_offloaders_are_not_pickled(tmp_path):
    wrapped = offload.wrap(model(), disk=tmp_path)
    for thing, words in ((wrapped.offloader, "make another one"), (wrapped, "offloaded.module")):
        for way in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=words):
                way(thing)
    wrapped.offloader.close()


def test_a_model_that_is_offloaded_is_pickled_without_its_offloader(tmp_path):
    module = model()
    offloader = offload.activations(module, disk=tmp_path, min_size=0)
    other = pickle.loads(pickle.dumps(module))
    expected = module(torch.ones(4, 64))
    assert torch.equal(other(torch.ones(4, 64)), expected)
    for _ in range(2):
        with offloader:
            assert torch.equal(module(torch.ones(4, 64)), expected)
    offloader.close()
    assert torch.equal(other(torch.ones(4, 64)), expected)


def test_patterns_that_choose_no_module_are_refused(tmp_path):
    for modules in (["blocks.*"], []):
        with pytest.raises(ValueError, match=r"`modules` must match modules .* the model has '0', '1', '2'"):
            offload.activations(model(), disk=tmp_path, modules=modules)
    for argument in ("modules", "keep_last"):
        with pytest.raises(TypeError, match=rf"`{argument}` must be a list of text"):
            offload.activations(model(), disk=tmp_path, **{argument: "1"})
    offload.activations(model(), disk=tmp_path, modules=["[12]", "blocks.*"], keep_last=["head"]).close()


def test_problems_name_what_cannot_be():
    given = {"size_bytes": 2**20, "label": "", "pack_event": 0, "need_event": 2, "free_event": 3}
    rates = {"out_bandwidth_bytes_per_s": 1e9, "in_bandwidth_bytes_per_s": 1e9}
    times = {"event_times_s": (0.0, 0.1, 0.2, 0.3), "step_s": 0.3}
    with pytest.raises(ValueError, match=r"`storages`\[0\] must have its events in order.*free_event=9"):
        offload.OffloadProblem(storages=(offload.SavedStorage(**{**given, "free_event": 9}),), **times, **rates)
    with pytest.raises(ValueError, match="`in_bandwidth_bytes_per_s` must be above 0 and finite, got 0"):
        offload.OffloadProblem(storages=(), **times, **{**rates, "in_bandwidth_bytes_per_s": 0})
    with pytest.raises(TypeError, match="`label` must be text"):
        offload.SavedStorage(**{**given, "label": None})
