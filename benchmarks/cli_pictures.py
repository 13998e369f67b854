"""Pictures of the command line's output, from real runs: `docs/pictures/cli-*.svg`.

python -m benchmarks.cli_pictures                  # all but the demo, which takes minutes
python -m benchmarks.cli_pictures demo probe       # those
"""

import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from penstock.cli import _bench, _demo, _fleet, _plan, _probe, _simulate
from penstock.cli._answer import Answer
from penstock.cli._progress import Steps

_WIDTH = 96
_ADDRESSES = re.compile(r"@font-face\s*\{.*?\}\s*|\s*<!--.*?-->", re.DOTALL)
_TRAIN = """
import torch
from penstock.testing import GPT

def make_step():
    tokens = torch.randint(256, (4, 129))
    return GPT(num_layers=4, width=128, num_heads=4, context=128), [tokens[:, :-1].clone(), tokens[:, 1:].clone()]
"""
_JOBS = """
import torch
from penstock.fleet import Job
from penstock.testing import GPT

def make_job(lr, batch):
    def data():
        tokens = torch.randint(256, (8 * batch, 65), generator=torch.Generator().manual_seed(0))
        return [(rows[:, :-1].clone(), rows[:, 1:].clone()) for rows in tokens.split(batch)]
    return Job(
        name="gpt",
        model=lambda: GPT(num_layers=2, width=64, num_heads=4, context=64),
        data=data,
        loss=lambda model, batch: model(*batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        steps=8,
    )
"""
_SWEEP = (
    "job: jobs.py:make_job\nparameters: {lr: [1e-3, 3e-3], batch: [2, 4]}\n"
    "fleet: {devices: [cpu, cpu], budget: 64MiB, host: 256MiB}\n"
)
_PROBLEM = (
    "{jobs: [{name: gpt, copies: 6, num_steps: 50, shards: [{copies: 8, forward_s: 0.1, backward_s: 0.2, "
    "parameter_bytes: 400MB}]}], devices: [{name: cuda, copies: 2, in_bandwidth_bytes_per_s: 25GB/s}]}\n"
)


def pictures(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Draw the output of each command in ``names`` into ``folder``; none: of all commands but the demo."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with _workplace():
        for name in names or [command for command in COMMANDS if command != "demo"]:
            console = _recorder()
            answer = COMMANDS[name](console)
            answer.show(console)
            files.append(folder / f"cli-{name.replace(' ', '-')}.svg")
            files[-1].write_text(_drawn(console, f"penstock {name}"))
    return files


def _drawn(console: Console, title: str) -> str:
    """Return rich's picture, without the fonts that it would fetch."""
    text = _ADDRESSES.sub("", console.export_svg(title=title)).replace("Fira Code", "monospace")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _recorder() -> Console:
    return Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)


def _ran(_: Console | None = None) -> Answer:
    return _fleet.run(Path("sweep.yaml"), {"run_dir": "runs/1"}, Path("runs/1").exists(), Steps())


def _looked(_: Console) -> Answer:
    if not Path("runs/1").exists():
        _ran()
    return _fleet.jobs_of(Path("runs/1"))


COMMANDS: dict[str, Callable[[Console], Answer]] = {
    "probe": lambda _: _probe.probe(Path("."), False, Steps()),
    "plan": lambda _: _plan.answer(
        "train.py:make_step", [], {"disk": Path("."), "method": "hybrid", "machine": None}, None, Steps()
    ),
    "bench": lambda _: _bench.answer(["step"], True, "cpu", Path("."), None, {"rounds": 9}, Steps()),
    "bench list": lambda _: _bench.listed(),
    "fleet run": _ran,
    "fleet ps": _looked,
    "fleet simulate": lambda _: _simulate.answer(Path("problem.yaml"), "sharded-lrtf", None, Steps()),
    "demo": lambda console: _demo.run(Path("penstock-demo"), Path("."), 6, Steps(), console),
}


@contextmanager
def _workplace() -> Iterator[None]:
    """Enter a folder with the files that the commands read."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="penstock-pictures-") as folder:
        for name, text in {
            "train.py": _TRAIN,
            "jobs.py": _JOBS,
            "sweep.yaml": _SWEEP,
            "problem.yaml": _PROBLEM,
        }.items():
            (Path(folder) / name).write_text(text)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main(arguments: list[str] | None = None) -> list[Path]:
    folder = Path(__file__).resolve().parents[1] / "docs" / "pictures"
    files = pictures(folder, sys.argv[1:] if arguments is None else arguments)
    for file in files:
        print(f"wrote {file}")
    return files


if __name__ == "__main__":
    main()
