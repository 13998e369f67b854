"""The state of a fleet in SQLite. Other processes also control the fleet here: they leave commands, and it answers.

It is one file, `fleet.db` in the run's folder, with a write-ahead log, so that readers never stop the writer. It must
be on a local disk. No port is opened and nothing in the file is executed.
"""

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import FleetStateError
from penstock.files import parse_json

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, place INTEGER, state TEXT, step INTEGER, num_steps INTEGER, epoch INTEGER, loss REAL,
    validation TEXT, device TEXT, seconds_per_step REAL, error TEXT, tags TEXT, source TEXT, updated_s REAL
);
CREATE TABLE IF NOT EXISTS commands (
    id INTEGER PRIMARY KEY AUTOINCREMENT, verb TEXT, job TEXT, arguments TEXT, made_s REAL, answer TEXT
);
CREATE TABLE IF NOT EXISTS fleet (key TEXT PRIMARY KEY, value TEXT);
"""
_COLUMNS = (
    "name", "place", "state", "step", "num_steps", "epoch", "loss", "validation", "device", "seconds_per_step", "error",
    "tags", "source", "updated_s",
)  # fmt: skip
_SET = "INSERT OR REPLACE INTO fleet (key, value) VALUES (?, ?)"
_AS_JSON = ("validation", "tags", "source")
_WAIT_S = 30.0
"""Seconds to wait for another process that uses the file."""
ALIVE_S = 10.0
"""Seconds without a write after which a fleet counts as not running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as another process sees it. The record is wide because it has a field per column of the database."""

    name: str
    """Name given by the user."""
    place: int
    """Index in the order in which jobs were added."""
    state: str
    """The value of a ``JobState``."""
    step: int
    """Optimizer steps done."""
    num_steps: int
    """Total number of optimizer steps."""
    epoch: int
    """Epoch of the next batch."""
    loss: float | None
    """Loss of the last step."""
    validation: dict[str, float]
    """The last validation, with its step; empty before the first."""
    device: str
    """The device on which it ran last."""
    seconds_per_step: float
    """Seconds of a step on one device."""
    error: str | None
    """The error that made it fail."""
    tags: dict[str, Any]
    """Tags of the job."""
    source: dict[str, Any] | None
    """Import path and parameters of a job that another process can make again."""
    updated_s: float
    """Time of this row, as ``time.time()``."""


@dataclass(frozen=True, slots=True)
class Command:
    """A request from a user to a running fleet."""

    id: int
    """Number with which it is answered."""
    verb: str
    """``"pause"``, ``"resume"``, ``"stop"`` or ``"clone"``."""
    job: str
    """Name of the job that it is about."""
    arguments: dict[str, Any]
    """For a clone: ``"name"``, ``"changes"``, ``"warm"``."""


_STATES = ("pending", "running", "waiting", "paused", "done", "failed", "stopped")


def _row_of(known: dict[str, Any]) -> JobRow:  # any: what SQLite holds
    """Convert a row of the database. Raise ``TypeError`` or ``ValueError`` for values that cannot be one."""
    for column in _AS_JSON:
        known[column] = parse_json(known[column], column)
    for column in ("name", "state", "device"):
        _kind(known[column], str)
    for column in ("place", "step", "num_steps", "epoch"):
        _kind(known[column], int)
    _kind(known["seconds_per_step"], int, float)
    _kind(known["updated_s"], int, float)
    _kind(known["loss"], int, float, type(None))
    _kind(known["error"], str, type(None))
    _kind(known["tags"], dict)
    _kind(known["source"], dict, type(None))
    for value in _kind(known["validation"], dict).values():
        _kind(value, int, float)
    if known["state"] not in _STATES:
        raise ValueError(f"its state must be one of {', '.join(_STATES)}, got {known['state']!r}")
    return JobRow(**known)


def _kind(value: Any, *kinds: type) -> Any:  # any: what SQLite and JSON hold
    if not isinstance(value, kinds):
        raise TypeError(f"expected {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}")
    return value


class FleetState:
    """The database of one run's folder. Each method opens it anew, so that any thread or process may call it."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / "fleet.db"

    @property
    def exists(self) -> bool:
        """Whether a fleet was ever run in that folder."""
        if not self.path.is_file():
            return False
        with self._open() as database:
            return _has_fleet(database)

    def create(self, *, resume: bool = False) -> None:
        """Create missing tables, and note that this process runs the fleet. Raise as `refuse_strangers` does."""
        with self._open() as database:
            # One transaction, so that of two processes that come at once the second sees the first.
            database.execute("BEGIN IMMEDIATE")
            self._refuse_strangers(database, resume=resume)
            for statement in _SCHEMA.split(";"):
                database.execute(statement)
            database.execute("UPDATE commands SET answer = 'the fleet had ended' WHERE answer IS NULL")
            self._say_alive(database)
        self._let_others_read()

    def _let_others_read(self) -> None:
        """Keep changes in a log, so that readers and writers do not wait for each other.

        SQLite does not wait for another process that may write, but says at once that the file is locked.
        """
        end_s = time.monotonic() + _WAIT_S
        while True:
            try:
                with self._open() as database:
                    database.execute("PRAGMA journal_mode=WAL")
                return
            except FleetStateError as error:
                if "is locked" not in str(error) or time.monotonic() > end_s:
                    raise
            time.sleep(0.01)

    def say_alive(self) -> None:
        """Write this process and the current time."""
        with self._open() as database:
            self._say_alive(database)

    def _say_alive(self, database: sqlite3.Connection) -> None:
        values = {"host": socket.gethostname(), "pid": str(os.getpid()), "alive_s": repr(time.time())}
        database.executemany(_SET, values.items())

    def say_ended(self) -> None:
        """Note that no process runs the fleet any more."""
        with self._open() as database:
            database.execute(_SET, ("alive_s", "0"))

    def refuse_strangers(self, *, resume: bool) -> None:
        """Raise ``ValueError`` if the folder holds another fleet, or one that is running now.

        With ``resume`` it may hold a fleet that is not running.
        """
        if self.path.is_file():
            with self._open() as database:
                self._refuse_strangers(database, resume=resume)

    def _refuse_strangers(self, database: sqlite3.Connection, *, resume: bool) -> None:
        folder = self.path.parent
        if not _has_fleet(database):
            return
        if not resume:
            raise ValueError(
                f"{folder} already holds a fleet; continue it with fleet.run(..., resume=True), or give another run_dir"
            )
        if _is_alive(database):
            raise ValueError(f"a process is running the fleet in {folder}; `penstock fleet ps {folder}` shows it")

    @property
    def is_alive(self) -> bool:
        """Whether a process runs the fleet now."""
        with self._open() as database:
            return _is_alive(database)

    def write(self, rows: list[JobRow]) -> None:
        """Replace the rows of these jobs."""
        marks = ", ".join("?" for _ in _COLUMNS)
        values = [
            tuple(
                json.dumps(getattr(row, column), default=str) if column in _AS_JSON else getattr(row, column)
                for column in _COLUMNS
            )
            for row in rows
        ]
        with self._open() as database:
            database.executemany(f"INSERT OR REPLACE INTO jobs ({', '.join(_COLUMNS)}) VALUES ({marks})", values)  # noqa: S608

    def jobs(self) -> list[JobRow]:
        """Return all jobs, in the order in which they were added."""
        with self._open() as database:
            rows = database.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs ORDER BY place").fetchall()  # noqa: S608
        try:
            return [_row_of(dict(zip(_COLUMNS, values, strict=True))) for values in rows]
        except (TypeError, ValueError) as error:
            raise FleetStateError(
                f"{self.path} holds a job that cannot be read: {error}. The jobs' checkpoints do not need that file: "
                "move it away, and resume"
            ) from error

    def ask(self, verb: str, job: str, arguments: Mapping[str, Any] | None = None) -> int:
        """Leave a command and return its number."""
        with self._open() as database:
            cursor = database.execute(
                "INSERT INTO commands (verb, job, arguments, made_s) VALUES (?, ?, ?, ?)",
                (verb, job, json.dumps(dict(arguments or {})), time.time()),
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def commands(self) -> list[Command]:
        """Return the commands without an answer, in order."""
        with self._open() as database:
            cursor = database.execute("SELECT id, verb, job, arguments FROM commands WHERE answer IS NULL ORDER BY id")
            rows = cursor.fetchall()
        commands = []
        for number, verb, job, text in rows:
            try:
                commands.append(Command(number, verb, job, _kind(parse_json(text, "its arguments"), dict)))
            except (TypeError, ValueError) as error:  # the error is the sender's; the fleet continues
                self.answer(number, f"the command cannot be read: {error}")
        return commands

    def answer(self, number: int, text: str) -> None:
        """Answer a command. An empty text means that it was carried out."""
        with self._open() as database:
            database.execute("UPDATE commands SET answer = ? WHERE id = ?", (text, number))

    def answer_to(self, number: int, timeout_s: float) -> str | None:
        """Wait for the answer to a command and return it; ``None`` if none came in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            with self._open() as database:
                row = database.execute("SELECT answer FROM commands WHERE id = ?", (number,)).fetchone()
            if row is None:
                raise FleetStateError(f"{self.path} no longer has command {number}; send it again")
            if row[0] is not None:
                return str(row[0])
            if time.monotonic() > end_s:
                return None
            time.sleep(0.05)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise FleetStateError(
                f"{self.path} cannot be used: {error}. It must be on a local disk with space left; give another run_dir"
            ) from error


def _has_fleet(database: sqlite3.Connection) -> bool:
    return bool(database.execute("SELECT name FROM sqlite_master WHERE name = 'fleet'").fetchall())


def _is_alive(database: sqlite3.Connection) -> bool:
    values = dict(database.execute("SELECT key, value FROM fleet").fetchall())
    try:
        alive_s, pid = float(values.get("alive_s", "0")), int(values.get("pid", "0"))
    except (TypeError, ValueError):
        return False  # a running fleet writes numbers
    if not abs(time.time() - alive_s) <= ALIVE_S:
        return False
    return values.get("host") != socket.gethostname() or Path(f"/proc/{pid}").exists()
