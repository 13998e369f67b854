"""Trainings that are closed at the end of a test."""

import pytest

from penstock.offload import training


@pytest.fixture
def make_training(tmp_path):
    made = []

    def make(model, optimizer, budget, door=training, **tiers):
        made.append(door(model, optimizer, budget, **{"disk": tmp_path, **tiers}))
        return made[-1]

    yield make
    for opened in made:
        opened.close()
