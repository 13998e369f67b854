"""Many compute, or one traces."""

import os
import threading

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
    for one in (first, tracer, later):
        one.join()
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

    for one in [in_a_thread(run), in_a_thread(run)]:
        one.join()
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
