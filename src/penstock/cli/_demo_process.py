"""Handles of the demo's training processes, for the process that starts them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from penstock.errors import PenstockError


class Child:
    """A training process that answers each line of input with a line of output."""

    def __init__(self, process: "subprocess.Popen[str]", errors: IO[str]):
        self._process = process
        self._errors = errors
        self.hello = self._answer(may_fail=True)
        """Its first answer when it is ready, or the error that kept it from starting."""

    def ask(self, command: str, *, may_fail: bool = False) -> dict[str, Any]:
        """Send a command and return the answer. Raises ``PenstockError`` for a dead child, unless it ``may_fail``."""
        assert self._process.stdin is not None
        if "error" in self.hello:
            return self._checked(self.hello, may_fail=may_fail)
        with suppress(BrokenPipeError):  # it has died, and its last words are the answer
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self._answer(may_fail=may_fail)

    def _answer(self, *, may_fail: bool) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        return self._checked(answer, may_fail=may_fail)

    @staticmethod
    def _checked(answer: dict[str, Any], *, may_fail: bool) -> dict[str, Any]:
        if "error" in answer and not may_fail:
            raise PenstockError(f"a training process of the demo failed: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().strip().splitlines()
        return words[-1] if words else f"exit status {self._process.returncode}"


@contextmanager
def child(*arguments: str, module: str = "penstock.cli._demo_child") -> Iterator[Child]:
    """Start a training process, which runs that module.

    All use the same malloc settings: few arenas, and large freed blocks return at once.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        )
        try:
            yield Child(process, errors)
        finally:
            process.kill()
            process.communicate()
