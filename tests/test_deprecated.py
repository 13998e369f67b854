"""Old names work for one more minor version, and warn with the new spelling."""

import pytest

from penstock import probe


def test_an_old_name_is_the_new_one_and_warns():
    with pytest.warns(DeprecationWarning, match=r"penstock\.probe\.Place is now called penstock\.probe\.MeasuredPlace"):
        assert probe.Place is probe.MeasuredPlace


def test_an_import_of_an_old_name_warns_at_the_line_that_imports():
    with pytest.warns(DeprecationWarning, match="MeasuredPlace") as warned:
        from penstock.probe import Place
    assert Place is probe.MeasuredPlace
    assert warned[0].filename == __file__


def test_other_names_are_refused_as_by_any_module():
    with pytest.raises(AttributeError, match=r"module 'penstock\.probe' has no attribute 'Places'"):
        _ = probe.Places
    assert not hasattr(probe, "Places")
