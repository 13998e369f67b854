"""Faulty waterfalls below main memory, and a gate that holds their transfers back."""

import threading

import pytest
from random_cycles import faulty_waterfall


@pytest.fixture
def make(tmp_path):
    """Makes faulty waterfalls on the temporary directory; ends them at the end."""
    waterfalls = []

    def make(**settings):
        waterfalls.append(faulty_waterfall(tmp_path, **settings))
        return waterfalls[-1]

    yield make
    for waterfall, _ in waterfalls:
        waterfall.close()


@pytest.fixture
def waterfall(make):
    return make()[0]


class Gate:
    """Holds transfers back until it is opened; says when the first has come."""

    def __init__(self):
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        self.opened.wait()

    def shut(self):
        self.begun.clear()
        self.opened.clear()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()
