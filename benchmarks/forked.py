"""Child processes that need not import PyTorch again, since they are forked from a server that has done so.

What the server has imported is `multiprocessing.set_forkserver_preload`'s; a benchmark says it when it is run.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any


class Forked:
    """A call ``call(*arguments)`` in a process that leads a group, with this process's environment and ``more`` of it.

    Each line that it or a child of its own prints goes to ``heard``, in a thread; without that, into ``said``.
    """

    def __init__(
        self,
        call: Callable[..., object],
        *arguments: Any,
        more: Mapping[str, str] | None = None,
        heard: Callable[[str], object] | None = None,
    ):
        self.said: list[str] = []
        context = multiprocessing.get_context("forkserver")
        reader, writer = context.Pipe(duplex=False)
        environment = {**os.environ, **(more or {})}
        self._process = context.Process(target=_run, args=(writer, os.getcwd(), environment, call, arguments))
        self._process.start()
        writer.close()
        self._listener = threading.Thread(target=_hear, args=(reader, heard or self.said.append))
        self._listener.start()

    def wait(self, limit_s: float | None = None) -> int | None:
        """Return the exit status once the process has ended; ``None`` if it and its children had to be stopped."""
        self._process.join(limit_s)
        status = self._process.exitcode
        if status is None:
            with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._listener.join()
        return status


def _hear(reader: Connection, heard: Callable[[str], object]) -> None:
    with os.fdopen(os.dup(reader.fileno()), errors="replace") as lines:
        reader.close()
        for line in lines:
            heard(line)


def _run(
    writer: Connection,
    folder: str,
    environment: Mapping[str, str],
    call: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    os.setsid()
    for number in (1, 2):
        os.dup2(writer.fileno(), number)
    writer.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    call(*arguments)
