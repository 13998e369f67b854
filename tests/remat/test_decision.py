"""Numbers that Python and C share, and decisions by the names that they had."""

import ctypes
import pickle
from pathlib import Path

import pytest

from penstock import native
from penstock.native._compiler import with_numbers
from penstock.remat import Decision
from penstock.remat._decision import NUMBERS_OF_C

OLD = {"RECOMPUTE_EACH_TIME": Decision.RECOMPUTE_PER_GROUP, "RECOMPUTE_EVERY_TIME": Decision.RECOMPUTE_PER_USE}


@pytest.mark.skipif(not native.find_compiler(), reason="needs a C compiler")
def test_compiled_numbers_are_those_of_python():
    source = (Path(native.__file__).parent / "remat.c").read_text()
    members = [member for kind in NUMBERS_OF_C for member in kind]
    names = ", ".join(member.name for member in members)
    source = f"{with_numbers(source, NUMBERS_OF_C)}\nconst int32_t penstock_numbers[] = {{{names}}};\n"
    library = native.compile_source(source, "remat-numbers")
    assert list((ctypes.c_int32 * len(members)).in_dll(library, "penstock_numbers")) == members


def test_a_source_without_shared_numbers_stays_as_it_is():
    assert with_numbers("int answer;", ()) == "int answer;"


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_works_and_warns_where_it_is_used(name):
    with pytest.warns(DeprecationWarning, match=f"{name} is now called Decision.{OLD[name].name}") as caught:
        assert getattr(Decision, name) is OLD[name]
        assert Decision[name] is OLD[name]
    assert [warning.filename for warning in caught] == [__file__] * 2


@pytest.mark.parametrize("decision", Decision)
def test_saved_decisions_stay_readable(decision):
    assert pickle.loads(pickle.dumps(decision)) is decision
    assert Decision(int(decision)) is decision
    assert Decision[decision.name] is decision


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OLD)
def test_a_decision_pickled_by_its_old_name_is_read(name):
    by_name = b"cbuiltins\ngetattr\n(cpenstock.remat\nDecision\nV" + name.encode() + b"\ntR."  # as in Python 3.11
    assert pickle.loads(by_name) is OLD[name]


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="'Decision' has no attribute 'RECOMPUTE_NEVER'"):
        _ = Decision.RECOMPUTE_NEVER
    with pytest.raises(KeyError):
        Decision["RECOMPUTE_NEVER"]
    assert [member.value for member in Decision] == [0, 1, 2, 3, 4]
