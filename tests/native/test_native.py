"""Compiled once per content, safely cached, and done without where there is no compiler."""

import ctypes
import os
import stat
import subprocess
import sys

import pytest

from penstock.errors import InternalError, PenstockWarning
from penstock.native import _build, can_compile, compile_source, find_compiler, load, tell_what_is_slower
from penstock.native._compiler import FLAGS, compile_to, read_source
from penstock.remat._decision import NUMBERS_OF_C

SOURCE = "int answer(void) {{ return {}; }}\n"


@pytest.fixture(autouse=True)
def _nothing_loaded(empty_cache, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TOLD_OF_COMPILER", "")
    for known in (_build._loaded, _build._own):
        known.cache_clear()
    yield
    for known in (_build._loaded, _build._own):
        known.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")


def cache():
    return _build.cache_folder()


def test_a_source_is_compiled_once_and_found_again(monkeypatch):
    assert compile_source(SOURCE.format(42), "answer").answer() == 42
    (library,) = cache().glob("answer-*.so")
    _build._loaded.cache_clear()
    monkeypatch.setattr(_build, "_compile", lambda *_: pytest.fail("it is there already"))
    assert compile_source(SOURCE.format(42), "answer").answer() == 42
    assert library.exists()
    assert [file.name for file in cache().iterdir()] == [library.name]


def test_another_content_is_another_library():
    assert compile_source(SOURCE.format(1), "answer").answer() == 1
    assert compile_source(SOURCE.format(2), "answer").answer() == 2
    assert len(list(cache().glob("answer-*.so"))) == 2


def test_the_cache_is_the_users_alone():
    compile_source(SOURCE.format(3), "answer")
    assert stat.S_IMODE(os.stat(cache()).st_mode) & 0o077 == 0


def test_a_header_beside_a_source_is_compiled_with_it(tmp_path):
    header, source = tmp_path / "numbers.h", tmp_path / "answer.c"
    header.write_text("enum { ANSWER = 7 };\n")
    source.write_text('#include <stdint.h>\n#include "numbers.h"\n\nint answer(void) { return ANSWER; }\n')
    assert compile_source(read_source(source), "answer").answer() == 7
    header.write_text("enum { ANSWER = 8 };\n")
    assert compile_source(read_source(source), "answer").answer() == 8
    for wrong, place in ((header, "numbers.h:2:"), (source, "answer.c:5:")):
        text = wrong.read_text()
        wrong.write_text(f"{text}no C\n")
        with pytest.raises(InternalError, match=place):
            compile_source(read_source(source), "answer")
        wrong.write_text(text)


def test_a_refused_source_says_what_the_compiler_said():
    with pytest.raises(InternalError, match="cannot compile broken.c"):
        compile_source("int broken(", "broken")


def test_without_a_compiler_it_is_said_once(no_compiler):
    with pytest.warns(PenstockWarning, match=r"no C compiler was found.*planning.*disk.*sampling.*apt-get") as caught:
        assert load("remat") is None
        assert load("unified", openmp=True) is None
        assert compile_source(SOURCE.format(4), "answer") is None
        assert not can_compile()
        tell_what_is_slower(pytest.fail)
    assert len(caught) == 1


def test_a_compiler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc -O2")
    with pytest.warns(PenstockWarning, match=r"`\$CC` names 'no-such-cc -O2', which is not a program"):
        assert load("remat") is None


def test_what_was_said_first_is_not_said_again_by_children(no_compiler):
    told = []
    tell_what_is_slower(told.append)
    tell_what_is_slower(told.append)
    assert len(told) == 1
    code = "from penstock.native import load; print(load('remat'))"
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None\n"


def test_nothing_is_said_where_nothing_is_slower():
    tell_what_is_slower(pytest.fail)


def broken_compiler(folder, monkeypatch):
    """As GCC without the headers of the C library."""
    compiler = folder / "cc"
    compiler.write_text("#!/bin/sh\necho 'fatal error: stdlib.h: No such file or directory' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))


def test_a_compiler_that_does_not_work_is_as_good_as_none(monkeypatch, tmp_path):
    broken_compiler(tmp_path, monkeypatch)
    with pytest.warns(PenstockWarning, match=r"not work: .*cannot compile remat.c: .*stdlib.h.*libc6-dev") as caught:
        assert load("remat") is None
        assert load("relational", openmp=True) is None
    assert len(caught) == 1


@pytest.mark.parametrize("how", ["none", "broken"])
def test_libraries_of_a_wheel_serve_without_a_compiler(monkeypatch, tmp_path, how):
    shipped = tmp_path / "remat.so"
    compile_to(find_compiler(), FLAGS, SOURCE.format(7), "answer", shipped)
    monkeypatch.setattr(_build, "_shipped", lambda _: shipped)
    if how == "broken":
        broken_compiler(tmp_path, monkeypatch)
    else:
        monkeypatch.setenv("CC", "no-such-cc")
    assert load("remat").answer() == 7
    tell_what_is_slower(pytest.fail)


def test_a_compiler_is_preferred_to_the_wheel(monkeypatch):
    monkeypatch.setattr(_build, "_shipped", lambda _: pytest.fail("it fits this machine's processor less"))
    assert load("unified", openmp=True)


@pytest.mark.parametrize("is_global", [True, False], ids=["as PyTorch opens it", "hidden"])
def test_the_openmp_runtime_that_is_loaded_serves(is_global):
    """In a process without PyTorch, which keeps its runtime under a name of its own."""
    code = (
        "import ctypes, importlib.util, os, sys\n"
        "from pathlib import Path\n"
        "from penstock.native import load\n"
        "folder = Path(importlib.util.find_spec('torch').origin).parent / 'lib'\n"
        "(runtime,) = folder.glob('libgomp*')\n"
        f"ctypes.CDLL(str(runtime), mode={'ctypes.RTLD_GLOBAL' if is_global else 0})\n"
        "assert load('unified', openmp=True)\n"
        "maps = Path('/proc/self/maps').read_text()\n"
        "assert 'torch' not in sys.modules\n"
        "print({line.split()[-1] for line in maps.splitlines() if 'libgomp' in line} == {str(runtime.resolve())})"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_without_an_openmp_runtime_one_thread_serves():
    code = "from penstock.native import load; print(load('unified', openmp=True) is not None)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_source(SOURCE.format(5), "answer").answer() == 5
    assert cache().name.startswith("penstock-native-")


def test_our_own_sources_compile_without_a_warning():
    assert isinstance(load("remat", numbers=NUMBERS_OF_C), ctypes.CDLL)
