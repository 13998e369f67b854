"""Dynamo's settings and answers: those of a step while it is traced, and others' before and after."""

import threading

import torch
from breaking import batch, make, through
from torch import nn

from penstock import remat


class Asks(nn.Module):
    """Takes another path when it is compiled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return (y * 3 if torch.compiler.is_compiling() else y * 2).sum()


def test_a_model_that_asks_whether_it_is_compiled_is_told_no():
    model, x = Asks(), torch.randn(4, 8)
    assert torch.equal(remat.compile(model, budget="1MiB")(x), model(x))
    assert torch.equal(remat.optimize(model, [x], None)(x), model(x))
    torch._dynamo.reset()
    assert not torch.equal(torch.compile(model, backend="eager")(x), model(x))


def test_other_backends_see_none_of_our_settings():
    from torch._dynamo import config

    names = (
        "allow_rnn",
        "recompile_limit",
        "suppress_errors",
        "enable_dynamo_decompositions",
        "use_numpy_random_stream",
    )
    before = {name: getattr(config, name) for name in names}
    seen = []

    def theirs(module, _):
        seen.append({name: getattr(config, name) for name in names})
        return module.forward

    model = make("plain", num_blocks=1)
    step = through("string", model, "64MiB")
    step(batch()).backward()
    torch.compile(model.head, backend=theirs)(batch())
    assert seen == [before]
    entered = []

    class Own:
        def __init__(self, function):
            self.function = function

        def __call__(self, *arguments):
            return self.function(*arguments)

    mine = Own(lambda module, _: module.forward)
    mine.backend_ctx_ctor = lambda: entered.append(1)
    torch.compile(nn.Linear(4, 4), backend=mine)(torch.randn(2, 4))
    assert not entered  # PyTorch itself does not look at it there


def test_settings_are_put_back_when_calls_of_threads_overlap():
    from torch._dynamo import config
    from torch._dynamo.variables.torch import tracing_state_functions

    from penstock.remat import _dynamo

    before = config.allow_rnn, config.recompile_limit, dict(tracing_state_functions())
    first, second = _dynamo.tracing_a_step(), _dynamo.tracing_a_step(has_rest=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.allow_rnn
    second.__exit__(None, None, None)
    assert (config.allow_rnn, config.recompile_limit, tracing_state_functions()) == before


def test_settings_of_threads_that_overlap_are_put_back_in_each():
    from penstock.remat import _dynamo

    def read():
        return dynamo_config.suppress_errors, dynamo_config.recompile_limit

    import torch._dynamo.config as dynamo_config

    before, after = read(), []
    both, first_left = threading.Barrier(2), threading.Event()

    def run(is_first):
        with _dynamo.tracing_a_step(has_rest=True):
            both.wait()
            if not is_first:
                first_left.wait()
        after.append(read())
        first_left.set()

    threads = [threading.Thread(target=run, args=(is_first,)) for is_first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert after[1] == before
    if _dynamo._has_settings_per_thread():
        assert after == [before, before]


def test_hooks_that_come_later_run():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.ones(4, 8)
    step = remat.compile(model, budget="8MiB")
    step(x).sum().backward()
    model[1].register_forward_hook(lambda module, inputs, result: result * 100)
    assert torch.equal(step(x), model(x))
    seen = []
    step.register_full_backward_hook(lambda module, inputs, gradients: seen.append(gradients[0].shape))
    step(x.requires_grad_()).sum().backward()
    assert seen == [(4, 8)]
    assert model._is_full_backward_hook is None
