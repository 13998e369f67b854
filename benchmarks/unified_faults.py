"""A campaign of faults against tables that ranks and machines hold together: ranks, disks, memory and messages.

Each trial starts two to four processes that take themselves for one to three machines (``$PENSTOCK_MACHINE``), lets
them open one table and read mini-batches of it, and harms one of them at a random moment. Checked each time: nobody
hangs; every row that is read is right; whoever cannot go on raises an error that names a rank that was harmed, or that
shared a broken connection with it; whatever does not end a process is over when the fault is; no process ends by a
signal that it was not sent.

| kind | what happens | what others see |
|---|---|---|
| killed, stopped, exited | while it opens the table, reads, or closes | ``RankError`` that names it, if needed |
| raised | its program fails in the middle of an epoch | the same, once it has ended |
| disagrees | it passes another budget, other scores, or has another file | ``RankError`` that names it |
| no memory | shared memory is exhausted on its machine | ``RankError`` that names it |
| short file | its file loses its end, and gets it back | rows that it reads for others: ``RankError`` that names it |
| failing answers | some of its answers fail | ``RankError`` that names it, then rows again |
| slow | it stops for a moment, some answers take long | nothing |
| broken connection | one of its connections ends | ``RankError`` that names an end of it |

Run it with ``python -m benchmarks.unified_faults --trials 1000 --disk /nvme --json unified-faults.json``.
"""

import errno
import json
import os
import random
import signal
import socket
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from benchmarks.common import Row, parser, show, write
from penstock import unified
from penstock.errors import RankError, TierReadError
from penstock.unified._peer_rows import PeerRows

NUM_ROWS, WIDTH = 40_000, 256
HOST_BYTES = {1: 14 * 2**20, 2: 22 * 2**20, 3: 30 * 2**20, 4: 36 * 2**20}
"""Budget of a machine by its number of ranks: room for a part of the rows."""
BATCHES, BATCH_ROWS = 24, 600
PATIENCE_S, QUICK_PATIENCE_S = 3.0, 15.0
"""Seconds after which a silent rank counts as lost; more with the tests, beside which other tests run."""
HANG_S = 60.0
LAYOUTS = ([0, 0], [0, 1], [0, 0, 0], [0, 1, 2], [0, 0, 1], [0, 0, 1, 1])
ENDS = ("killed", "stopped", "exited", "raised")
KINDS = (*ENDS, "disagrees", "no memory", "short file", "failing answers", "slow", "broken connection")
MOMENTS = ("open", "read", "close")


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument("--trials", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    settings = options.parse_args(arguments)
    if settings.quick:
        settings.trials = len(KINDS)
    multiprocessing.set_forkserver_preload(["benchmarks.unified_faults"])
    faults: Counter[str] = Counter()
    trials: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(dir=settings.disk, prefix="penstock-faults-") as folder:
        _write_files(Path(folder))
        for number in range(settings.trials):
            case = _case(settings.seed, number)
            case["patience_s"] = QUICK_PATIENCE_S if settings.quick else PATIENCE_S
            trial = Path(folder) / str(number)
            trial.mkdir()
            injected, complaints = _trial(case, Path(folder), trial)
            faults[case["kind"]] += injected
            trials[case["kind"]] += 1
            wrong += [f"trial {number} ({case}): {complaint}" for complaint in complaints]
            for complaint in complaints:
                print(f"trial {number} ({case}): {complaint}", flush=True)
            if number % 50 == 49:
                print(f"{number + 1} trials, {sum(faults.values())} faults, {len(wrong)} wrong", flush=True)
    rows = [Row(name=kind, metric="faults", value=faults[kind], unit="faults") for kind in KINDS]
    rows += [Row(name=kind, metric="trials", value=trials[kind], unit="trials") for kind in KINDS]
    rows.append(Row(name="all", metric="faults", value=sum(faults.values()), unit="faults"))
    rows.append(Row(name="all", metric="trials", value=settings.trials, unit="trials"))
    rows.append(Row(name="all", metric="trials with something wrong", value=len(wrong), unit="trials"))
    show("faults", ["kind", "trials", "faults"], [[kind, str(trials[kind]), str(faults[kind])] for kind in KINDS])
    write(settings.json, {"seed": settings.seed, "wrong": wrong}, rows)
    if wrong:
        raise SystemExit(f"{len(wrong)} things were wrong")


def values(rows: torch.Tensor) -> torch.Tensor:
    return (rows[:, None] * 7 + torch.arange(WIDTH)).float()


def _write_files(folder: Path) -> None:
    """Write the rows for machines that have all of them, and for one, two and three that have parts."""
    unified.write_features(folder / "rows", values(torch.arange(NUM_ROWS)), progress=False)
    other = values(torch.arange(NUM_ROWS))
    other[-1] += 1
    unified.write_features(folder / "other", other, progress=False)
    for count in (1, 2, 3):
        for number, part in enumerate(torch.arange(NUM_ROWS).tensor_split(count)):
            unified.write_features(folder / f"part-{number}-of-{count}", values(part), progress=False)


def _case(seed: int, number: int) -> dict[str, Any]:
    """Return what a trial does; the kinds take turns."""
    choices = random.Random(seed * 1_000_003 + number)
    kind = KINDS[number % len(KINDS)]
    machines = choices.choice(LAYOUTS)
    peers = choices.choice((None, "copies", "parts")) if len(set(machines)) > 1 else None
    if kind in ("failing answers", "broken connection"):
        machines, peers = choices.choice(([0, 1], [0, 1, 2])), choices.choice(("copies", "parts"))
    return {
        "kind": kind, "machines": machines, "peers": peers, "hit": choices.randrange(len(machines)),
        "moment": choices.choice(MOMENTS), "after": choices.random(), "seed": choices.randrange(2**30),
        "seconds": choices.choice(((0.0, 1.0), (1.0, 1.0), (1.0, 20.0))),
    }  # fmt: skip


def _trial(case: dict[str, Any], files: Path, folder: Path) -> tuple[int, list[str]]:
    """Run a trial; return the number of faults, and what was wrong."""
    context = multiprocessing.start_processes(
        _rank, (case, str(files), str(folder)), nprocs=len(case["machines"]), join=False, start_method="forkserver"
    )
    deadline_s = time.monotonic() + HANG_S
    complaints = []
    for rank, process in enumerate(context.processes):
        if rank != case["hit"] or case["kind"] != "stopped":
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                complaints.append(f"rank {rank} hangs")
    injected = 0
    for rank, process in enumerate(context.processes):
        process.kill()
        process.join()
        report = folder / f"{rank}.json"
        told = json.loads(report.read_text()) if report.exists() else None
        is_hit = rank == case["hit"]
        if told is None:
            if is_hit and case["kind"] in ENDS:
                injected += 1
            elif f"rank {rank} hangs" not in complaints:
                complaints.append(f"rank {rank} has ended with {process.exitcode} and said nothing")
            continue
        injected += told["faults"]
        complaints += [f"rank {rank}: {text}" for text in told["wrong"]]
        if process.exitcode and not (is_hit and case["kind"] in ENDS) and f"rank {rank} hangs" not in complaints:
            complaints.append(f"rank {rank} has ended with {process.exitcode}")
    return injected, complaints


class Trial:
    """A trial as one of its ranks sees it."""

    def __init__(self, rank: int, case: dict[str, Any], files: Path, folder: Path):
        self.rank, self.case, self.files, self.folder = rank, case, files, folder
        self.kind, self.is_hit = case["kind"], rank == case["hit"]
        self.machine = case["machines"][rank]
        self.choices = random.Random(case["seed"] + rank)
        self.num_faults, self.wrong = 0, list[str]()
        self.answers_fail = False
        self.cut: bytes | None = None

    def run(self) -> None:
        options = {"scores": 1 / (1 + torch.arange(NUM_ROWS).double()), "host": HOST_BYTES[self._num_here()]}
        path = self._path()
        if self.is_hit and self.kind == "disagrees":
            path = self._disagree(path, options)
        if self.is_hit and self.kind == "no memory":
            os.posix_fallocate = self._no_memory  # type: ignore[assignment]
        if self.is_hit and self.kind in ENDS and self.case["moment"] == "open":
            self._later(self.case["after"] * 0.4, self._end)
        if self.is_hit and self.kind == "slow":
            self._later(self.case["after"] * 0.4, self._pause)
        try:
            features = unified.TieredFeatures(
                path, group=distributed.group.WORLD, peers=self.case["peers"], patience_s=self.case["patience_s"],
                in_flight=0, **options,
            )  # fmt: skip
        except (RankError, MemoryError) as error:
            self._expect_named(error, "while the table was opened", self.kind in (*ENDS, "disagrees", "no memory"))
            return
        except Exception as error:
            self.wrong.append(f"opening raised {type(error).__name__}: {error}")
            return
        if self.kind in ("disagrees", "no memory") and not self._is_harmless():
            self.wrong.append("the table was opened, although a rank disagrees, or has no memory")
        self.answers_fail = self.is_hit and self.kind in ("failing answers", "slow")
        self._read_all(features)
        if self.is_hit and self.kind in ENDS and self.case["moment"] == "close":
            self._later(self.case["after"] * 0.05, self._end)
        features.close()

    def _num_here(self) -> int:
        return int(self.case["machines"].count(self.machine))

    def _path(self) -> Path:
        """Return this machine's file; where it will be cut, a copy of its own."""
        count = max(self.case["machines"]) + 1
        name = f"part-{self.machine}-of-{count}" if self.case["peers"] == "parts" else "rows"
        if self.kind != "short file":
            return self.files / name
        own, ready = self.folder / f"file-{self.machine}", self.folder / f"ready-{self.machine}"
        if self.case["machines"].index(self.machine) == self.rank:
            own.write_bytes((self.files / name).read_bytes())
            ready.touch()
        while not ready.exists():
            time.sleep(0.01)
        return own

    def _read_all(self, features: unified.TieredFeatures) -> None:
        for number in range(BATCHES):
            if self.is_hit and number == int(self.case["after"] * BATCHES):
                self._harm()
            rows = torch.randint(NUM_ROWS, (BATCH_ROWS,), generator=self._generator(number))
            if not self._reads(features, rows):
                return
        if self.kind in ("short file", "failing answers") and not self.wrong:
            self._mend()
            rows = torch.randint(NUM_ROWS, (BATCH_ROWS,), generator=self._generator(BATCHES))
            if not torch.equal(features[rows], values(rows)):
                self.wrong.append("wrong rows after the fault")

    def _mend(self) -> None:
        """End the fault, and wait until the others have done so."""
        self.answers_fail = False
        if self.cut is not None:
            with self._path().open("ab") as end:
                end.write(self.cut)
        (self.folder / f"mended-{self.rank}").touch()
        while len(list(self.folder.glob("mended-*"))) < len(self.case["machines"]):
            time.sleep(0.01)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.case["seed"] + 1000 * self.rank + number)

    def _reads(self, features: unified.TieredFeatures, rows: torch.Tensor) -> bool:
        """Read a mini-batch; return whether this rank can go on."""
        try:
            read = features[rows]
        except TierReadError as error:
            if not (self.kind == "short file" and self.machine == self.case["machines"][self.case["hit"]]):
                self.wrong.append(f"reading raised {type(error).__name__}: {error}")
            return True
        except RankError as error:
            self._expect_named(error, "while rows were read", self.kind not in ("slow", "disagrees", "no memory"))
            return self.kind in ("short file", "failing answers")
        except Exception as error:
            self.wrong.append(f"reading raised {type(error).__name__}: {error}")
            return False
        if not torch.equal(read, values(rows)):
            self.wrong.append("wrong rows")
        return True

    def _expect_named(self, error: Exception, when: str, is_expected: bool) -> None:
        ranks = getattr(error, "ranks", (self.rank,))
        hit = self.case["hit"]
        is_named = hit in ranks or (self.kind == "broken connection" and self.is_hit)
        if self.kind == "disagrees":  # of two that disagree, the later is named
            is_named = True
        if self.kind in ("short file", "no memory"):  # any rank of the machine may be the one to read, or to reserve
            machines = self.case["machines"]
            is_named = any(machines[rank] == machines[hit] for rank in ranks)
        if self.kind == "broken connection":
            is_named = True  # either end, and what either end then says
        if not is_expected or not is_named:
            self.wrong.append(f"{type(error).__name__} of ranks {ranks} {when}: {error}")

    def _is_harmless(self) -> bool:
        return self.kind == "no memory" and not (self.folder / "no-memory").exists()

    def _harm(self) -> None:
        """Do what happens while this rank reads."""
        if self.kind in ENDS and self.case["moment"] == "read":
            self._end()
        if self.kind == "short file":
            self.num_faults += 1
            own = self._path()
            whole, cut = own.read_bytes(), int(own.stat().st_size * self.case["after"])
            os.truncate(own, cut)
            self.cut = whole[cut:]
        if self.kind == "broken connection":
            self._break()

    def answer(self, peers: PeerRows, rows: torch.Tensor, out: torch.Tensor) -> int:
        """Answer like `PeerRows`, but for what goes wrong; this runs in several threads."""
        if self.answers_fail and self.choices.random() < 0.3:
            self.num_faults += 1
            if self.kind == "failing answers":
                raise OSError(errno.EIO, "injected")
            time.sleep(self.choices.random() * 0.1)
        return int(_ANSWER(peers, rows, out))

    def _disagree(self, path: Path, options: dict[str, Any]) -> Path:
        """Return another file than the others', or change the options."""
        self.num_faults += 1
        if self.case["peers"] is None:
            return self.files / "part-0-of-3"
        if self.case["peers"] == "copies" and self.choices.random() < 0.5:
            return self.files / "other"
        options["scores"] = options["scores"].flip(0)
        return path

    def _no_memory(self, *_: Any) -> None:
        self.num_faults += 1
        (self.folder / "no-memory").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _pause(self) -> None:
        """Stop for a moment; a child lets this process go on."""
        self.num_faults += 1
        process = os.getpid()
        if not os.fork():
            time.sleep(0.1 + self.case["after"] * 0.5)
            os.kill(process, signal.SIGCONT)
            os._exit(0)
        os.kill(process, signal.SIGSTOP)

    def _break(self) -> None:
        """End one of the connections of this process."""
        sockets = [
            int(entry.name) for entry in Path("/proc/self/fd").iterdir()
            if entry.exists() and stat.S_ISSOCK(os.stat(entry).st_mode)
        ]  # fmt: skip
        self.choices.shuffle(sockets)
        for descriptor in sockets:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                try:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
                self.num_faults += 1
                return

    def _end(self) -> None:
        if self.kind == "raised":
            raise KeyError("of the user")
        if self.kind == "exited":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP)

    def _later(self, seconds: float, act: Callable[[], Any]) -> None:
        if self.kind == "raised" and act == self._end:
            act = lambda: os._exit(1)  # noqa: E731  # a program that fails ends
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()


_ANSWER = PeerRows._answer


def _answering(trial: Trial) -> Callable[..., int]:
    """Return a method for `PeerRows`."""

    def answer(peers: PeerRows, rows: torch.Tensor, out: torch.Tensor) -> int:
        return trial.answer(peers, rows, out)

    return answer


def _rank(rank: int, case: dict[str, Any], files: str, folder: str) -> None:
    """Be one rank of a trial, and write down what was wrong."""
    torch.set_num_threads(1)
    os.environ["PENSTOCK_MACHINE"] = str(case["machines"][rank])
    PeerRows.row_seconds = lambda *_: tuple(case["seconds"])  # type: ignore[method-assign,assignment,return-value]
    size = len(case["machines"])
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    trial = Trial(rank, case, Path(files), Path(folder))
    PeerRows._answer = _answering(trial)  # type: ignore[method-assign]
    try:
        trial.run()
    except Exception as error:
        if trial.is_hit and trial.kind == "raised":
            raise
        trial.wrong.append(f"{type(error).__name__}: {error}")
    report = Path(folder) / f"{rank}.part"
    report.write_text(json.dumps({"faults": trial.num_faults, "wrong": trial.wrong}))
    report.rename(Path(folder) / f"{rank}.json")


if __name__ == "__main__":
    main()
