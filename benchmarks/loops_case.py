"""One case of the loops: a loop through a door, next to plain PyTorch in the same process, and its verdict."""

import contextlib
import functools
import math
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from benchmarks.coverage_case import named_bytes
from benchmarks.loops_door import (
    DOORS,
    TRACING,
    Array,
    ByAotEager,
    Door,
    FleetFailure,
    Inapplicable,
    Loop,
    Results,
    in_fleet,
    plain_job,
    run_once,
)
from penstock import probe
from penstock.errors import BudgetNotKeptWarning, PenstockWarning

VERDICTS = ("CRASH", "DIFFERENT", "RAW", "TIMEOUT", "OVER", "PYTORCH", "refused", "told", "equal", "none", "PLAIN")
"""From worst to best; a row has the worst of its runs."""
BUDGETS = ("generous", "tight")
SLACK = 1.01
"""A peak up to this share of the budget counts as kept."""
GENEROUS = 4
"""The generous budget as a multiple of plain's peak."""
SHARES = {"activations": 0.6, "compile": 0.7, "string": 0.7}
"""The tight budget: this share of what plain needs above what stands at the start of a step."""
SHARE_OF_ALL = 0.6
"""The tight budget of the doors that move parameters and states, too: this share of plain's peak."""
MOST_ATTEMPTS = 5
STEP_UP = 1.3
"""What a user multiplies a budget by if its refusal names no number of bytes."""
ROUNDING = 1e-5

Tell = Callable[[dict[str, Any]], None]
"""Takes the row as far as it is."""


def case(
    which: Loop, door: str, folder: Path, tell: Tell = lambda _: None, budgets: Sequence[str] = BUDGETS
) -> dict[str, Any]:
    """Run a loop plainly and through a door within two budgets, and return its row."""
    row: dict[str, Any] = {"name": which.name, "theme": which.theme, "door": door, "parts": []}
    run: Callable[[int], Results]
    plainly: Callable[[], Results]
    if door == "fleet":
        if which.job is None:
            return row | {"verdict": "none", "message": "no form as a job"}
        job = which.job()
        plainly = lambda: plain_job(job)  # noqa: E731
        run = lambda budget: in_fleet(job, budget)  # noqa: E731
    else:
        plainly = lambda: run_once(which, Door(0, folder))  # noqa: E731
        run = lambda budget: run_once(which, DOORS[door](budget, folder))  # noqa: E731
    expected = plainly()
    peak_bytes, standing_bytes = expected.peak_bytes, expected.standing_bytes
    if not peak_bytes:  # no meter is preloaded
        peak_bytes = probe.peak_bytes(plainly, device="cpu").peak_bytes
        standing_bytes = peak_bytes // 2
    tight = int(SHARE_OF_ALL * peak_bytes)
    if door in SHARES:
        tight = standing_bytes + int(SHARES[door] * (peak_bytes - standing_bytes))
    row |= {"plain_peak_bytes": peak_bytes, "standing_bytes": standing_bytes}
    sizes = {"generous": GENEROUS * peak_bytes, "tight": tight}
    for kind in budgets if door not in TRACING else ("tight",):
        budget_bytes = sizes[kind]
        part: dict[str, Any] = {"budget": kind, "verdict": "CRASH", "message": "", "budget_bytes": budget_bytes}
        row["parts"].append(part)
        tell(row)
        part |= _attempts(run, expected, budget_bytes, door)
        if part["message"].startswith("BudgetError") and part["budget_bytes"] >= peak_bytes:
            part["message"] += f" (within {part['budget_bytes']}, while plain PyTorch takes {peak_bytes})"
        if part["verdict"] == "DIFFERENT" and (control := difference(expected.values, plainly().values)) is not None:
            return row | {"verdict": "PLAIN", "message": f"plain PyTorch does not repeat itself: {control}"}
        if part["verdict"] in ("DIFFERENT", "RAW") and door in TRACING:
            part |= _beside_pytorch(which, expected, part, folder)
        tell(row)
        if part["verdict"] == "none":
            break
    return row | summary(row["parts"])


def summary(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the verdict and message of a row: those of the worst of its runs."""
    worst = min(parts, key=lambda part: VERDICTS.index(part["verdict"]))
    message = f"{worst['budget']}: {worst['message']}" if worst["message"] else ""
    return {"verdict": worst["verdict"], "message": message}


def _attempts(run: Callable[[int], Results], expected: Results, budget_bytes: int, door: str) -> dict[str, Any]:
    """Run within a budget, then within the one that the error names, until no error names one."""
    part: dict[str, Any] = {}
    tried: list[int] = []
    while len(tried) < MOST_ATTEMPTS:
        tried.append(budget_bytes)
        part = {"budget_bytes": budget_bytes, "tried": tried}
        with _hearing() as heard:
            try:
                result = run(budget_bytes)
            except Inapplicable as error:
                return part | {"verdict": "none", "message": str(error)}
            except BaseException as error:
                part |= failed(error)
            else:
                part |= judged(expected, result, door)
                part["peak_bytes"] = result.peak_bytes
        part |= {"said": heard}
        named = named_bytes(part.get("text", ""))
        if part["verdict"] != "refused" or not part["message"].startswith("BudgetError"):
            break
        if named is not None and named <= budget_bytes:
            break  # it named what it got
        budget_bytes = named if named is not None else int(budget_bytes * STEP_UP)
    return part if part["verdict"] != "equal" else part | _within(part)


def _within(part: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on an equal run by its peak and what was said."""
    said, ratio = part["said"], part["peak_bytes"] / part["budget_bytes"]
    is_told = any(text.startswith(BudgetNotKeptWarning.__name__) for text in said)
    if ratio > SLACK and not is_told:
        return {"verdict": "OVER", "message": f"peak is {ratio:.2f} of the budget"}
    return {"verdict": "told", "message": said[0]} if said else {}


def _beside_pytorch(which: Loop, expected: Results, part: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return another verdict if PyTorch's own tracing does the same."""
    with _hearing():
        try:
            theirs = judged(expected, run_once(which, ByAotEager(0, folder)), "aot_eager")
        except BaseException as error:
            theirs = failed(error)
    if theirs["verdict"] != part["verdict"]:
        return {"aot_eager": theirs["verdict"]}
    return {"verdict": "PYTORCH", "message": f"aot_eager too: {theirs['message']}", "own": part["message"]}


@contextlib.contextmanager
def _hearing() -> Any:
    """Yield a list that is filled with Penstock's warnings at the end."""
    heard: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield heard
    for warning in caught:
        text = f"{warning.category.__name__}: {warning.message}"
        if issubclass(warning.category, PenstockWarning) or _is_our_file(warning.filename):
            heard.append(text[:400])


def judged(expected: Results, result: Results, door: str) -> dict[str, Any]:
    """Return the verdict on results."""
    apart = difference(expected.values, result.values)
    if apart is None:
        return {"verdict": "equal", "message": ""}
    name, amount = apart
    if door in (*TRACING, "aot_eager") and amount <= ROUNDING:
        return {"verdict": "equal", "message": "", "apart": amount}
    return {"verdict": "DIFFERENT", "message": f"{name} is apart by {amount:.2g}"}


def difference(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> tuple[str, float] | None:
    """Return the first value that differs and the largest difference of all; ``None`` if all bits are equal."""
    missing = sorted(expected.keys() ^ actual.keys())
    if missing:
        return f"{missing[0]} is missing or new, and", float("inf")
    apart = [
        (name, _relative(array, actual[name]))
        for name, array in expected.items()
        if (array.shape, array.dtype) != (actual[name].shape, actual[name].dtype)
        or array.tobytes() != actual[name].tobytes()
    ]
    apart.sort(key=lambda pair: pair[0] == "random state")
    return (apart[0][0], max(amount for _, amount in apart)) if apart else None


def _relative(ours: Array, other: Array) -> float:
    if ours.shape != other.shape:
        return float("inf")
    if not ours.size or np.array_equal(ours, other, equal_nan=ours.dtype.kind == "f"):
        return 0.0
    mine, others = ours.astype(np.float64), other.astype(np.float64)
    apart = float(np.abs(mine - others).max() / max(np.abs(mine).max(), 1e-6))
    return float("inf") if math.isnan(apart) else apart


def failed(error: BaseException) -> dict[str, Any]:
    """Return the verdict on an error of a door: ours by its class, or raised and phrased in Penstock."""
    while getattr(error, "inner_exception", None) is not None:
        error = error.inner_exception  # type: ignore[attr-defined]
    text, kind = str(error), f"{type(error).__module__}.{type(error).__name__}".removeprefix("builtins.")
    if isinstance(error, FleetFailure):
        kind, _, text = text.partition(": ")
    line = text.strip().split("\n", 1)[0]
    is_ours = kind.startswith("penstock.errors.") and not kind.endswith(".InternalError")
    if not is_ours and kind in ("TypeError", "ValueError"):
        is_ours = phrased_here(line) and (isinstance(error, FleetFailure) or _is_raised_here(error))
    return {
        "verdict": "refused" if is_ours else "RAW",
        "message": f"{kind.removeprefix('penstock.errors.')}: {line}"[:500],
        "text": text[:2000],
        "trace": "" if is_ours else "".join(traceback.format_exception(error))[-4000:],
    }


def _is_raised_here(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_our_file(frames[-1].filename)


def _is_our_file(name: str) -> bool:
    return Path(penstock.__file__).parent in Path(name).parents


@functools.cache
def _phrases() -> str:
    source = "".join(file.read_text() for file in sorted(Path(penstock.__file__).parent.rglob("*.py")))
    return _words(re.sub(r"\"\s*\n\s*f?\"", "", source))


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def phrased_here(line: str) -> bool:
    """Return whether five words of a message stand in Penstock's source."""
    words = _words(line).split()
    windows = [" ".join(words[at : at + 5]) for at in range(max(1, len(words) - 4))]
    return any(f" {window} " in _phrases() for window in windows if window)
