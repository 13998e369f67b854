"""Many compute, or one traces."""

import os
import threading

import pytest
import torch

from penstock.tiers import Gate


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_tracer_waits_for_those_who_compute_and_goes_before_new_ones():
    gate, order = Gate(), []
    inside, leave = threading.Event(), threading.Event()

    def computes():
        with gate.computing():
            inside.set()
            leave.wait()
            order.append("first")

    def traces():
        with gate.tracing():
            order.append("traced")

    def computes_later():
        with gate.computing():
            order.append("second")

    first = in_a_thread(computes)
    inside.wait()
    tracer = in_a_thread(traces)
    while not gate._num_waiting:
        pass
    later = in_a_thread(computes_later)
    leave.set()
    for thread in (first, tracer, later):
        thread.join()
    assert order == ["first", "traced", "second"]


def test_a_thread_that_computes_may_trace_and_what_it_traces_may_compute():
    gate = Gate()
    with gate.computing(), gate.computing(), gate.tracing(), gate.tracing(), gate.computing():
        assert gate._is_tracing
        assert not gate._num_computing
    assert not gate._is_tracing
    assert not gate._num_computing


def test_two_that_compute_may_both_trace():
    gate, both, done = Gate(), threading.Barrier(2), []

    def run():
        with gate.computing():
            both.wait()
            with gate.tracing():
                done.append(gate._num_computing)

    for thread in [in_a_thread(run), in_a_thread(run)]:
        thread.join()
    assert done == [0, 0]
    assert not gate._num_computing


def test_who_waits_lets_others_trace():
    gate = Gate()

    def traces():
        with gate.tracing():
            pass

    with gate.computing():
        with gate.released():
            in_a_thread(traces).join()
            assert not gate._num_computing
        assert gate._num_computing == 1


def test_a_thread_knows_whether_others_compute():
    gate, inside, leave = Gate(), threading.Event(), threading.Event()

    def computes():
        with gate.computing():
            inside.set()
            leave.wait()

    with gate.computing(), gate.computing():
        assert not gate.others_compute
        computing = in_a_thread(computes)
        inside.wait()
        assert gate.others_compute
        leave.set()
        computing.join()
        assert not gate.others_compute


def test_errors_leave_the_gate_open():
    gate = Gate()
    for enter in (gate.computing, gate.tracing, gate.released):
        try:
            with enter():
                raise KeyError
        except KeyError:
            pass
    with gate.tracing(), gate.computing():
        pass


def test_a_forked_child_finds_it_open():
    gate = Gate()
    with gate.computing():
        child = os.fork()
        if not child:
            with gate.tracing():
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_an_interrupted_tracer_keeps_nobody_waiting(monkeypatch):
    gate = Gate()

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), gate.computing():  # noqa: PT012
        patch.setattr(gate._condition, "wait_for", interrupted)
        with gate.tracing():
            pass
    assert (gate._num_waiting, gate._num_computing, gate._is_tracing) == (0, 0, False)
    with gate.computing(), gate.tracing():
        pass


def test_who_waits_may_trace_and_compute():
    gate = Gate()
    with gate.computing(), gate.released():
        with gate.tracing(), gate.computing():
            pass
        with gate.computing():
            assert gate._num_computing == 1
        assert not gate._num_computing


class _Calls(torch.autograd.Function):
    """Its backward calls a function."""

    @staticmethod
    def forward(ctx, x, inside):
        ctx.inside = inside
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.inside()
        return gradient, None


def test_backward_does_not_wait_for_those_who_wait_for_it():
    gate, in_backward = Gate(), []

    def inside():
        gate._mine.depth = 0  # a thread that the gate does not know, though its caller computes
        with gate.computing():
            in_backward.append(gate._num_waiting)
        gate._mine.depth = 1

    def traces():
        with gate.tracing():
            pass

    with gate.computing():
        loss = _Calls.apply(torch.ones(1, requires_grad=True), inside)
        tracer = in_a_thread(traces)
        while not gate._num_waiting:
            pass
        loss.backward()
    tracer.join()
    assert in_backward == [1]
