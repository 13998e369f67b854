"""Waiting for what ends in another thread or process: until it has, not for as long as it takes on a quiet machine."""

import time

PATIENCE_S = 600
"""What never comes fails the test before the test's own limit does."""


def eventually(holds, patience_s=PATIENCE_S):
    """Waits until ``holds()`` is true, and returns what it is."""
    end_s = time.monotonic() + patience_s
    while not (found := holds()):
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.01)
    return found
