"""The process's generators are held by one room at a time."""

import os
import threading

from penstock.tiers import gate, generators_held


def test_who_waits_for_the_generators_lets_others_trace():
    holds, is_traced, waits = threading.Event(), threading.Event(), threading.Event()

    def holder():
        with generators_held():
            holds.set()
            waits.wait()
            with gate.tracing():  # while another, which computes, waits for the generators
                is_traced.set()

    def computer():
        with gate.computing():
            waits.set()
            with generators_held():
                assert is_traced.is_set()

    threads = [threading.Thread(target=target) for target in (holder, computer)]
    threads[0].start()
    holds.wait()
    threads[1].start()
    for thread in threads:
        thread.join(600)
    assert is_traced.is_set()
    assert not any(thread.is_alive() for thread in threads)


def test_a_thread_may_hold_them_twice():
    with generators_held(), generators_held():
        pass
    done = threading.Event()

    def computer():
        with generators_held():
            done.set()

    threading.Thread(target=computer).start()
    assert done.wait(600)


def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have():
    holds, leave = threading.Event(), threading.Event()

    def holder():
        with generators_held():
            holds.set()
            leave.wait()

    thread = threading.Thread(target=holder)
    thread.start()
    holds.wait()
    child = os.fork()
    if child == 0:
        with generators_held():
            os._exit(0)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
