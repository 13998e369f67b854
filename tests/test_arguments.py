"""Arguments against their annotations: what passes, what is refused, and in which words."""

import inspect
import math
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from penstock import fleet, tiers
from penstock.arguments import check_fields, checked, renamed


def calling(annotation, **least):
    """A function whose one argument has an annotation."""

    def call(value):
        return value

    call.__annotations__ = {"value": annotation}
    return checked("call(1)", **least)(call)


@pytest.mark.parametrize(
    ("annotation", "values"),
    [
        (int, [0, -1, 2**63 - 1, np.int64(3)]),
        (float, [0, 1.5, math.inf, np.float32(0.5), np.int64(3)]),
        (bool, [True, False, 0, 1, np.bool_(True)]),
        (int | str | None, [3, "6GiB", None]),
        (str | os.PathLike[str], ["a", Path("a")]),
        (Callable[[int], bool] | None, [len, int, lambda _: True, None]),
        (Literal["a", "b"], ["a", "b"]),
        (Sequence[str], [[], ["a"], ("a", "b")]),
        (Sequence[float], [[1, 2.5], range(3), (math.nan,) * 0]),
        (Mapping[str, Sequence[tuple[float, int]]], [{}, {"a": [(0.5, 1), (1, 2)]}]),
        (tiers.DiskSpec, ["/a", Path("/a"), ["/a", Path("/b")], {"/a": "1MiB", Path("/b"): None}, None]),
        (Iterable[fleet.Job], [[], (), (nobody for nobody in ())]),
        (nn.Module, [nn.Linear(1, 1)]),
        (torch.Tensor, [torch.ones(1), nn.Parameter(torch.ones(1))]),
        (torch.device | str, ["cpu", torch.device("cpu")]),
        (type[Any], [int]),
        (Any, [object(), None]),
        ("a.name.that.nobody.imports", [object(), None]),
    ],
)
def test_what_an_annotation_takes_passes(annotation, values):
    for value in values:
        assert calling(annotation)(value) is value


@pytest.mark.parametrize(
    ("annotation", "values", "words"),
    [
        (int, [True, 1.0, "1", None, torch.ones(1)], "an int"),
        (float, [True, "1", None], "a number"),
        (bool, [None, 2, "yes", 0.5], "True or False"),
        (int | str | None, [1.5, [], b"1"], "an int, text or None"),
        (str | os.PathLike[str], [3, None, b"a"], "text or a path"),
        (Callable[[int], bool], [None, "len", 3], "a function"),
        (Sequence[str], ["text", [1], {"a"}, None], "a list of text"),
        (Sequence[float], [["a"], [None], "12"], "a list of numbers"),
        (tuple[str, int], [("a",), ("a", "b"), ["a", 1]], r"a tuple \(text, an int\)"),
        (Mapping[str, int], [{1: 1}, {"a": "b"}, [("a", 1)]], "a dict of ints"),
        (nn.Module, [lambda x: x, nn.Linear, torch.ones(1)], "a torch.nn.Module"),
        (tiers.Budget, ["6GiB", tiers.Budget], "a penstock.tiers.Budget"),
        (fleet.Tracker, [object(), None], r"an object with log\(\), end\(\) and close\(\)"),
        (type[Any], ["int"], "a class"),
    ],
)
def test_what_it_does_not_take_is_named(annotation, values, words):
    for value in values:
        with pytest.raises(TypeError, match=rf"^`value` must be {words}, got .*: call\(1\)$"):
            calling(annotation)(value)


def test_values_out_of_range_are_refused():
    with pytest.raises(ValueError, match="`value` must be a number, got nan"):
        calling(float)(math.nan)
    with pytest.raises(ValueError, match="`value` must be a number, got nan"):
        calling(int | float | None)(math.nan)
    with pytest.raises(ValueError, match="`value` must be at least 1, got 0"):
        calling(int, value=1)(0)
    with pytest.raises(ValueError, match="`value` must be at least 0, got -0.5"):
        calling(float | None, value=0)(-0.5)
    with pytest.raises(ValueError, match="`value` must be a number of at most 63 bits"):
        calling(int)(2**63)
    with pytest.raises(ValueError, match="`value` must be 'a' or 'b', got 'c'"):
        calling(Literal["a", "b"])("c")
    assert calling(int | None, value=1)(None) is None


def test_values_are_shown_short_and_objects_by_their_class():
    with pytest.raises(TypeError, match=r"got \[0, 0, .*\.\.\. \(list\)") as caught:
        calling(int)([0] * 1000)
    assert len(str(caught.value)) < 150
    with pytest.raises(TypeError, match="got an object of torch.nn.modules.linear.Linear"):
        calling(int)(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="got the function calling"):
        calling(int)(calling)
    with pytest.raises(TypeError, match="got the class Budget"):
        calling(int)(tiers.Budget)


def test_methods_keywords_and_signatures_stay():
    class Thing:
        @checked("Thing(1)")
        def __init__(self, size: int, *rest: int, name: str = "a", **others: int):
            self.size, self.rest, self.name, self.others = size, rest, name, others

    thing = Thing(1, 2, 3, name="b", other=4)
    assert (thing.size, thing.rest, thing.name, thing.others) == (1, (2, 3), "b", {"other": 4})
    assert list(inspect.signature(Thing).parameters) == ["size", "rest", "name", "others"]
    with pytest.raises(TypeError, match="`name` must be text"):
        Thing(1, name=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'size'"):
        Thing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    size_bytes: int
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "Record(size_bytes=1)", size_bytes=0)


def test_fields_of_a_dataclass_are_checked():
    assert pickle.loads(pickle.dumps(Record(size_bytes=1))) == Record(size_bytes=1)
    with pytest.raises(TypeError, match=r"`name` must be text, got 3 \(int\): Record"):
        Record(size_bytes=1, name=3)
    with pytest.raises(ValueError, match="`size_bytes` must be at least 0, got -1"):
        Record(size_bytes=-1)


@renamed(host_budget="host")
@checked("give(host=1)")
def give(*, host: int | None = None) -> int | None:
    return host


def test_an_earlier_name_works_and_warns_with_the_new_one():
    with pytest.warns(DeprecationWarning, match="`host_budget` is now called `host`") as caught:
        assert give(host_budget=3) == 3
    assert caught[0].filename == __file__
    assert give(host=4) == 4
    with pytest.raises(TypeError, match="`host_budget` is the earlier name of `host`; give `host` alone"):
        give(host=1, host_budget=1)
    with (
        pytest.warns(DeprecationWarning, match="`host_budget`"),
        pytest.raises(TypeError, match="`host` must be an int or None"),
    ):
        give(host_budget="much")
