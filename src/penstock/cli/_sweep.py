"""The file of `penstock fleet run`: the function that makes jobs, their parameters, and settings of the fleet."""

import abc
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, ValidationError, model_validator

from penstock.cli._document import Document, Strict, message_of, read, say_renamed, to_bytes
from penstock.cli._fault import Misuse
from penstock.fleet import Device, SchedulerName

_TRIES = 200
_MOST_JOBS = 100_000
Parameters = dict[str, JsonValue]
Bytes = Annotated[int, BeforeValidator(to_bytes)]


def _unlike(values: list[Any]) -> list[Any]:
    """Raise ``ValueError`` for values that occur more than once."""
    for text, count in Counter(json.dumps(value, sort_keys=True) for value in values).items():
        if count > 1:
            raise ValueError(f"{text} stands there {count} times")
    return values


def _directories(given: object) -> object:
    """Return one directory, or a list of them, as a mapping of directories to limits."""
    if isinstance(given, str):
        return {given: None}
    return dict.fromkeys(given) if isinstance(given, list) and all(isinstance(item, str) for item in given) else given


def _device(name: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ValueError(f"a device is cpu or cuda:0, not {name!r}")
    return name


class DeviceSettings(Strict):
    """A device; in the file, a name or a mapping."""

    name: Annotated[str, AfterValidator(_device)]
    """``cpu`` or ``cuda:0``."""
    budget: Bytes | None = None
    """Budget in bytes; none: the fleet's."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU device; none: an equal share."""


class FleetSettings(Strict):
    """The key ``fleet``: options of `penstock.fleet.Fleet`. Directories are relative to the current one."""

    devices: (
        Annotated[
            list[
                Annotated[
                    DeviceSettings,
                    BeforeValidator(lambda device: {"name": device} if isinstance(device, str) else device),
                ]
            ],
            Field(min_length=1),
        ]
        | None
    ) = None
    """Devices to train on; none: all GPUs, or one CPU device if there are none."""
    budget: Bytes | None = None
    """Limit on peak bytes per device; none: the free memory."""
    host: Bytes | None = None
    """Limit on bytes of host memory for what is not on a device."""
    disk: Annotated[dict[str, Bytes | None], BeforeValidator(_directories)] | None = None
    """Directories to offload to: one, a list, or a mapping to the bytes that each may hold."""
    run_dir: str | None = None
    """Folder for checkpoints, metrics and state; none: a temporary one."""
    scheduler: SchedulerName = "fair"
    """The rule that chooses the next job for a device."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints of a job; none: a checkpoint every ten minutes."""
    keep: int = Field(default=1, ge=1)
    """Number of checkpoints kept per job."""
    verify: bool = False
    """Whether to check every fetch from disk and measure the memory of every unit, with one unit at a time."""

    @model_validator(mode="before")
    @classmethod
    def _accept_earlier_names(cls, given: Any) -> Any:  # any: what stands in the file
        if isinstance(given, dict) and "host_budget" in given and "host" not in given:
            say_renamed("host_budget", "host")
            return {"host" if key == "host_budget" else key: value for key, value in given.items()}
        return given

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `penstock.fleet.Fleet`."""
        settings = {key: getattr(self, key) for key in type(self).model_fields if key != "devices"}
        devices = None if self.devices is None else [Device(**device.model_dump()) for device in self.devices]
        return {"devices": devices, **settings}

    def overridden(self, **given: str | list[str] | None) -> "FleetSettings":
        """Return the settings with the options of the command line. Raises `Misuse`, which names the wrong option."""
        changes = {key: value for key, value in given.items() if value is not None}
        try:
            checked = FleetSettings.model_validate(changes)
        except ValidationError as error:
            faults = error.errors(include_url=False)
            lines = [
                f"--{str(fault['loc'][0]).replace('_', '-')}: {message_of(fault, FleetSettings)}" for fault in faults
            ]
            raise Misuse("\n".join(lines)) from None
        update = {key: getattr(checked, key) for key in changes}
        if "budget" in changes and "devices" not in changes and self.devices is not None:
            update["devices"] = [device.model_copy(update={"budget": None}) for device in self.devices]
        return self.model_copy(update=update)


class Sweep(Strict):
    """The keys that all kinds of sweeps share."""

    job: str
    """``file.py:function``, relative to the sweep's file, or ``package.module:function``; it returns a job."""
    fleet: FleetSettings = FleetSettings()
    """Settings of the fleet that trains the jobs."""

    @abc.abstractmethod
    def points(self) -> list[Parameters]:
        """Return the parameters of each job."""


class GridSweep(Sweep):
    """A sweep over all combinations; the last parameter changes fastest."""

    search: Literal["grid"] = "grid"
    """The kind of sweep."""
    parameters: dict[str, Annotated[list[JsonValue], Field(min_length=1), AfterValidator(_unlike)]] = {}
    """The values of each parameter."""

    def points(self) -> list[Parameters]:
        """Return all combinations of the values."""
        return [
            dict(zip(self.parameters, values, strict=True)) for values in itertools.product(*self.parameters.values())
        ]


class Distribution(Strict):
    """The distribution of a parameter: ``{low: 1e-5, high: 1e-3, log: true}`` or ``{choices: [4, 8]}``."""

    low: float | None = Field(default=None, allow_inf_nan=False)
    """The smallest value."""
    high: float | None = Field(default=None, allow_inf_nan=False)
    """The largest value."""
    log: bool = False
    """Whether the logarithm of the value, rather than the value, is uniformly distributed."""
    integer: bool = False
    """Whether values are rounded to whole numbers."""
    choices: list[JsonValue] | None = Field(default=None, min_length=1)
    """Values to choose from instead."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.choices is None) == (self.low is None or self.high is None):
            raise ValueError("give low and high, as in {low: 1e-5, high: 1e-3, log: true}, or {choices: [4, 8]}")
        if self.choices is not None and not {"low", "high", "log", "integer"}.isdisjoint(self.model_fields_set):
            raise ValueError("low, high, log and integer do not go with choices")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low is below high, not {self.low} and {self.high}")
        if self.log and self.low is not None and self.low <= 0:
            raise ValueError(f"with log: true, low is above 0, not {self.low}")
        return self

    def draw(self, source: random.Random) -> JsonValue:
        """Draw a value, rounded to six significant digits."""
        if self.choices is not None:
            return source.choice(self.choices)
        assert self.low is not None and self.high is not None
        if self.log:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = source.uniform(self.low, self.high)
        value = min(max(float(f"{value:.6g}"), self.low), self.high)
        return round(value) if self.integer else value


class RandomSweep(Sweep):
    """A sweep with parameters drawn independently. The same seed gives the same jobs, and no job occurs twice."""

    search: Literal["random"]
    """The kind of sweep."""
    parameters: dict[str, Distribution] = Field(min_length=1)
    """The distribution of each parameter."""
    num_jobs: int = Field(ge=1, le=_MOST_JOBS)
    """Number of jobs."""
    seed: int = 0
    """Seed of the draws."""

    def points(self) -> list[Parameters]:
        """Draw parameters for up to ``num_jobs`` different jobs."""
        source, points = random.Random(self.seed), dict[str, Parameters]()
        for _ in range(self.num_jobs * _TRIES):
            point = {name: distribution.draw(source) for name, distribution in self.parameters.items()}
            points.setdefault(json.dumps(point), point)
            if len(points) == self.num_jobs:
                break
        return list(points.values())


class ListSweep(Sweep):
    """A sweep that lists the parameters of each job."""

    search: Literal["list"]
    """The kind of sweep."""
    jobs: Annotated[list[Parameters], Field(min_length=1), AfterValidator(_unlike)]
    """The parameters of each."""

    def points(self) -> list[Parameters]:
        """Return the parameters as listed."""
        return self.jobs


_KINDS: dict[object, type[Sweep]] = {"grid": GridSweep, "random": RandomSweep, "list": ListSweep}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile:
    """A sweep that was read and checked."""

    document: Document
    """The file, for errors with line numbers."""
    sweep: Sweep
    """Its content."""
    points: Sequence[Parameters]
    """The parameters of each job."""

    def error_at(self, at: int, name: str | None, message: str) -> ValueError:
        """Return an error about the parameter ``name`` of the job with index ``at``, or about the whole job."""
        keys: tuple[str | int, ...] = ("jobs", at) if isinstance(self.sweep, ListSweep) else ("parameters",)
        return self.document.error(keys if name is None else (*keys, name), message)


def read_sweep(path: Path) -> SweepFile:
    """Read a sweep. Raises ``OSError``, and ``ValueError`` with the file, line and key of the fault."""
    document = read(path)
    kind = document.data.get("search", "grid") if isinstance(document.data, dict) else "grid"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise document.error(("search",), f"a search is grid, random or list, not {kind!r}")
    sweep = document.check(_KINDS[kind])
    if isinstance(sweep, GridSweep):
        num_jobs = math.prod(map(len, sweep.parameters.values()))
        if num_jobs > _MOST_JOBS:
            raise document.error(("parameters",), f"{num_jobs:,} combinations, and a sweep has {_MOST_JOBS:,} at most")
    points = sweep.points()
    if isinstance(sweep, RandomSweep) and len(points) < sweep.num_jobs:
        raise document.error(("num_jobs",), f"only {len(points)} different jobs were found, not {sweep.num_jobs}")
    return SweepFile(document=document, sweep=sweep, points=points)
