"""Compiled once per content, safely cached, and done without where there is no compiler."""

import ctypes
import os
import stat

import pytest

from penstock.errors import InternalError, PenstockWarning
from penstock.native import _build, compile_source, load

SOURCE = "int answer(void) {{ return {}; }}\n"


@pytest.fixture(autouse=True)
def _nothing_loaded(empty_cache):
    _build._loaded.cache_clear()
    _build._warn_once.cache_clear()
    yield
    _build._loaded.cache_clear()
    _build._warn_once.cache_clear()


def cache():
    return _build._cache()


def test_a_source_is_compiled_once_and_found_again(monkeypatch):
    assert compile_source(SOURCE.format(42), "answer").answer() == 42
    (made,) = cache().glob("answer-*.so")
    _build._loaded.cache_clear()
    monkeypatch.setattr(_build, "_compile", lambda *_: pytest.fail("it is there already"))
    assert compile_source(SOURCE.format(42), "answer").answer() == 42
    assert made.exists()
    assert [one.name for one in cache().iterdir()] == [made.name]


def test_another_content_is_another_library():
    assert compile_source(SOURCE.format(1), "answer").answer() == 1
    assert compile_source(SOURCE.format(2), "answer").answer() == 2
    assert len(list(cache().glob("answer-*.so"))) == 2


def test_the_cache_is_the_users_alone():
    compile_source(SOURCE.format(3), "answer")
    assert stat.S_IMODE(os.stat(cache()).st_mode) & 0o077 == 0


def test_a_refused_source_says_what_the_compiler_said():
    with pytest.raises(InternalError, match="refuses broken.c"):
        compile_source("int broken(", "broken")


def test_without_a_compiler_it_is_said_once(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(_build.shutil, "which", lambda _: None)
    with pytest.warns(PenstockWarning, match="no C compiler was found") as caught:
        assert load("remat") is None
        assert compile_source(SOURCE.format(4), "answer") is None
    assert len(caught) == 1


def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_source(SOURCE.format(5), "answer").answer() == 5
    assert cache().name.startswith("penstock-native-")


def test_our_own_sources_compile_without_a_warning():
    assert isinstance(load("remat"), ctypes.CDLL)
