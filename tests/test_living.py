"""Objects of a class, found while other threads run."""

import sys
import threading
import time

import torch

from penstock.living import living


class Kept(torch.nn.Linear):
    pass


def test_objects_of_a_class_and_of_those_derived_from_it():
    layers = [torch.nn.Linear(2, 2), Kept(2, 2)]
    assert {id(layer) for layer in living(torch.nn.Linear)} >= {id(layer) for layer in layers}
    assert living(Kept) == [layers[1]]
    del layers
    assert living(Kept) == []


def test_other_threads_may_be_building_tuples():
    """CPython cannot resize a tuple that somebody else has; without a pause for the others this fails at once."""
    errors, is_over = [], threading.Event()
    many = [[] for _ in range(300_000)]  # so that a look takes longer than a turn

    def numbers():
        for number in range(12):
            time.sleep(0)  # others run, as while a loader's thread copies the parts of a mini-batch
            yield number

    def build():
        while not is_over.is_set():
            try:
                assert len(tuple(numbers())) == 12
            except SystemError as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=build) for _ in range(3)]
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-3)
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            living(torch.Tensor)
        assert sys.getswitchinterval() == 1e-3
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before_s)
    assert len(many) == 300_000
    assert errors == []
