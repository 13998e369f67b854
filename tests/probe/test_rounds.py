"""Alternatives timed alternately, and the names in their results."""

from collections import Counter
from types import SimpleNamespace

from penstock.probe import _rounds, in_rounds, provenance


def test_short_ways_are_run_again_in_their_turn(monkeypatch):
    clock = SimpleNamespace(now_s=0.0, counts=Counter())
    monkeypatch.setattr("penstock.probe._rounds.time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def way(name, takes_s):
        clock.counts[name] += 1
        clock.now_s += takes_s

    ways = {
        "short": lambda: way("short", 0.25),
        "shorter": lambda: way("shorter", 0.125),
        "long": lambda: way("long", 2),
    }
    seconds = in_rounds(ways, rounds=3, least_s=0.5)
    assert clock.counts == {"short": 6, "shorter": 12, "long": 3}
    assert seconds == {"short": [0.25] * 3, "shorter": [0.125] * 3, "long": [2.0] * 3}


def test_results_name_what_was_measured(monkeypatch):
    monkeypatch.setattr(_rounds, "kinds", lambda: ("cpu", "cuda"))
    of_cpu = _rounds.backend_of("cpu")
    gpu = SimpleNamespace(name="a GPU")
    monkeypatch.setattr(_rounds, "backend_of", lambda device: of_cpu if device == "cpu" else gpu)
    assert provenance("cuda:0")["device"] == provenance()["device"] == "a GPU"
    assert provenance("cpu")["device"] != "a GPU"
