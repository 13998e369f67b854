"""Pictures for the docs: small real runs, the pages of their reports, and headless Chromium's screenshots of them.

`python -m benchmarks.pictures` takes a few minutes and writes docs/pictures/. To add a picture, write a function
that makes a page in a folder, and name it in `PAGES`.
"""

import argparse
import contextlib
import html
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from penstock import advise, fleet, offload, probe, remat, report, tiers, unified

OUT = Path(__file__).parents[1] / "docs" / "pictures"
MOST_BYTES = 300_000
"""The most bytes of a picture."""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A view of a page for a screenshot."""

    name: str
    width: int = 1100
    is_dark: bool = False
    most_height: int = 1500


LIGHT, DARK, PHONE = Shot(name=""), Shot(name="-dark", is_dark=True), Shot(name="-phone", width=390)

_SMALL: dict[str, Any] = {
    "n_embd": 256, "n_head": 4, "vocab_size": 2048, "n_positions": 256, "use_cache": False, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


@cache
def _steps() -> tuple[offload.Offloader, probe.PeakReport]:
    """Train a small GPT with its activations on the disk, and measure the memory of one step."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**_SMALL, n_layer=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offloader = offload.activations(model, disk=tempfile.mkdtemp(), min_saving=0, max_stall=1)

    def step() -> None:
        tokens = torch.randint(2048, (8, 256))
        with offloader:
            _loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for _ in range(5):
        step()
    return offloader, probe.peak_bytes(step)


@cache
def _planned() -> remat.OptimizedStep:
    """Plan a step of the same kind for 45% of its peak."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**_SMALL, n_layer=4))

    return remat.optimize(lambda tokens: _loss(model, tokens), [torch.randint(2048, (8, 256))], 0.45)


def _loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 2048), tokens[:, 1:].reshape(-1))


def _perceptron(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(256, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU(),
        torch.nn.Linear(width, 1),
    )  # fmt: skip


def _job(name: str, width: int, rate: float) -> fleet.Job:
    def data() -> Any:
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randn(256, 256, generator=generator) for _ in range(40)]
        return [(batch, batch[:, :8].sum(1, keepdim=True)) for batch in batches]

    return fleet.Job(
        name=name,
        model=lambda: _perceptron(width),
        data=data,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        epochs=2,
    )


@cache
def _trained() -> fleet.Results:
    """Train four jobs, one of which fails, on two devices whose budget holds one job at a time."""
    jobs = [_job("width 512", 512, 1e-3), _job("width 768", 768, 1e-3), _job("fast", 512, 5e-3), _job("wild", 512, 1e6)]
    devices = [fleet.Device(name="cpu", threads=1)] * 2
    return fleet.run(
        jobs, devices, "21MiB", host="64MiB", run_dir=Path(tempfile.mkdtemp()) / "four-jobs", progress=None
    )


@cache
def _features() -> unified.TieredFeatures:
    """Read a table, of which memory holds a fifth, by a sampler over a graph with hubs."""
    generator = torch.Generator().manual_seed(0)
    hubs = (torch.rand(300_000, generator=generator) ** 4 * 30_000).long()
    graph = unified.Graph(torch.stack([hubs, torch.randint(30_000, (300_000,), generator=generator)]), num_nodes=30_000)
    train = torch.arange(4_000)
    scores = unified.expected_accesses(graph, train, [10, 5], batch_size=256)
    table = torch.randn(30_000, 256, generator=generator)
    features = unified.TieredFeatures(table, host="10MiB", disk=tempfile.mkdtemp(), scores=scores, progress=False)
    for _ in unified.Loader(unified.NeighborSampler(graph, [10, 5]), features, train, batch_size=256):
        pass
    return features


def _offload_page(folder: Path) -> Path:
    return report.write_html(folder / "offload.html", *reversed(_steps()), title="Offloading a small GPT")[0]


def _remat_page(folder: Path) -> Path:
    return report.write_html(folder / "remat.html", _planned(), title="A GPT's step in 45% of its memory")[0]


def _fleet_page(folder: Path) -> Path:
    return report.write_html(folder / "fleet.html", _trained(), title="Four jobs on two devices")[0]


def _unified_page(folder: Path) -> Path:
    return report.write_html(folder / "unified.html", _features(), title="Features of a graph in 10 MiB")[0]


def _advice_page(folder: Path) -> Path:
    """Make a page with the advice for a step, and the budget that two rooms share."""
    torch.manual_seed(0)
    Path("nvme").mkdir()
    account = tiers.Budget(device="512MiB", disk={"nvme": "1GiB"})
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)], torch.nn.Linear(512, 1))
    batch = torch.randn(1024, 512)

    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    advice = advise(model, batch, "40MiB", loss=loss_of, disk="nvme", rounds=2)
    table = torch.randn(30_000, 256)
    with (
        offload.activations(model, budget=account) as offloader,
        unified.TieredFeatures(table, host="12MiB", budget=account, progress=False, disk=account.disk_bytes),
    ):
        loss_of(model, batch).backward()
        files = report.write_html(folder / "advice.html", advice, account, title="What to do, and who holds what")
    offloader.close()
    return files[0]


def _whole_page(folder: Path) -> Path:
    things = (*_steps(), _planned(), _trained(), _features())
    return report.write_html(folder / "all.html", *things, title="Everything at once", rated_bytes="600TB")[0]


PAGES: dict[str, tuple[Callable[[Path], Path], Sequence[Shot]]] = {
    "report-advice": (_advice_page, (LIGHT,)),  # first: what others hold in the process counts against its budget
    "report": (_whole_page, (Shot(name="", most_height=1000),)),
    "report-offload": (_offload_page, (LIGHT,)),
    "report-remat": (_remat_page, (DARK, PHONE)),
    "report-fleet": (_fleet_page, (LIGHT,)),
    "report-unified": (_unified_page, (LIGHT,)),
}
"""Names of pictures: what makes the page, and the ways in which it is shown."""


def size_of(page: Path, width: int) -> tuple[int, int]:
    """Return the pixels, width and height, of a page in a window of ``width``; a wider page scrolls sideways."""
    with tempfile.TemporaryDirectory() as folder:
        frame = _framed(page, Path(folder), width, 800)
        shown = _chromium("--dump-dom", "--hide-scrollbars", f"--window-size={max(width, 600)},900", frame.as_uri())
    match = re.search(r"<title>(\d+) (\d+)</title>", shown)
    if match is None:
        raise RuntimeError(f"Chromium did not show {page}: {shown[:300]}")
    return int(match[1]), int(match[2])


def screenshot(page: Path, png: Path, shot: Shot) -> tuple[int, int]:
    """Write a picture of the page, from its top; return its `size_of`."""
    from PIL import Image

    shown_width, full_height = size_of(page, shot.width)
    height = min(full_height, shot.most_height)
    with tempfile.TemporaryDirectory() as folder:
        frame, raw = _framed(page, Path(folder), shot.width, height), Path(folder) / "raw.png"
        options = ["--force-dark-mode"] if shot.is_dark else []
        size = f"--window-size={max(shot.width, 600)},{height + 200}"  # headless windows are at least 500 wide
        _chromium(*options, f"--screenshot={raw}", size, "--hide-scrollbars", frame.as_uri())
        with Image.open(raw) as image:
            image.convert("RGB").crop((0, 0, shot.width, height)).save(png, optimize=True)
    return shown_width, full_height


def _framed(page: Path, folder: Path, width: int, height: int) -> Path:
    """Return a page that shows ``page`` in a frame of that size, and that has its size as title."""
    frame = folder / "frame.html"
    style = ":root{color-scheme:light dark}body{margin:0}iframe{border:0;display:block}"
    script = (
        "onload=()=>{const e=document.querySelector('iframe').contentDocument.documentElement;"
        "document.title=e.scrollWidth+' '+e.scrollHeight}"
    )
    inside = f'<iframe width="{width}" height="{height}" srcdoc="{html.escape(page.read_text())}"></iframe>'
    frame.write_text(
        f"<!doctype html><title></title><style>{style}</style>{inside}<script>{script}</script>", encoding="utf-8"
    )
    return frame


def _chromium(*options: str) -> str:
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("screenshots are taken by Chromium, which is not installed: apt-get install chromium")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    options = argparse.ArgumentParser(description="Pictures for the docs.")
    options.add_argument("--out", type=Path, default=OUT)
    options.add_argument("--only", action="append", choices=list(PAGES), help="may be repeated")
    settings = options.parse_args(arguments)
    out = settings.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory(dir=".") as folder, contextlib.chdir(folder):
        tempfile.tempdir = str(Path.cwd())
        for name in settings.only or PAGES:
            make, shots = PAGES[name]
            page = make(Path.cwd())
            for shot in shots:
                png = out / f"{name}{shot.name}.png"
                screenshot(page, png, shot)
                if png.stat().st_size > MOST_BYTES:
                    raise SystemExit(
                        f"{png} has {png.stat().st_size:,} bytes, more than {MOST_BYTES:,}: make it shorter"
                    )
                print(f"wrote {png} ({png.stat().st_size:,} bytes)", flush=True)
                written.append(png)
        tempfile.tempdir = None
    return written


if __name__ == "__main__":
    main()
