"""What the tests of the Trainers share: a small GPT-2, and what must be true before, during and after training."""

import contextlib
import threading
from unittest import mock

import torch

from penstock.offload import _plan
from penstock.offload._cycle import Cycle
from waiting import eventually

MIB = 2**20
EVERYTHING = {"min_size": "8KiB", "max_in_flight": "2MiB", "min_saving": 0.0, "max_stall": 1.0, "verify": True}
"""Small storages are parked too, and nothing is declined."""
TIGHT = {"min_size": "8KiB", "max_in_flight": "2MiB"}
"""For runs under a budget."""


def gpt2(**options):
    import transformers

    torch.manual_seed(0)
    config = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **ends, **options))
    model.loss_type = "ForCausalLM"  # GPT-2's is found by a warning, which breaks graphs
    return model


def texts(count=64):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 128, (count, 64), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


@contextlib.contextmanager
def everything_parked():
    """All that may be parked leaves and is fetched, in every cycle and on any disk.

    Plans park it however long its copies take, since tiny steps hide no copy; fetches begin in backward, and backward
    when the copies out have ended: what is asked for before is handed back from memory, and never written.
    """
    patched = {"_bisect": 0, "_never_gone": set(), "_declined": ""}
    needed = Cycle.needed

    def needed_when_settled(cycle, entry):
        if not cycle.num_needs:
            cycle._reap.__self__.drain()
        needed(cycle, entry)

    with contextlib.ExitStack() as stack:
        for name, value in patched.items():
            stack.enter_context(mock.patch.object(_plan, name, return_value=value))
        stack.enter_context(mock.patch.object(_plan, "lay_fetches", _plan._fetch_at_need))
        stack.enter_context(mock.patch.object(Cycle, "needed", needed_when_settled))
        yield


@contextlib.contextmanager
def nothing_left(model, disk, like=None):
    """Fails where the block leaves a thread, a hook, a file or a model changed otherwise than ``like`` behind."""
    threads, marks = _threads(), _marks(like or model)
    yield
    eventually(lambda: _threads() <= threads)  # those with which transformers loads weights may end meanwhile
    assert _marks(model) == marks
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch.autograd._profiler_enabled()
    assert list(disk.iterdir()) == []


def _threads():
    return {thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"}  # of tqdm's


def _marks(model):
    """Accelerate leaves a ``forward`` of its own on models that it casts for."""
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
        for module in model.modules()
    ]
    return hooks, model._compiled_call_impl, type(model), list(model.state_dict())


def assert_same_parameters(expected, actual):
    left, right = expected.state_dict(), actual.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
