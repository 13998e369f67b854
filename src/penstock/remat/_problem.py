"""The planning problem: the operators of one training step in order, and the storages between them.

A problem holds no tensor and no graph. It can be saved, sent elsewhere and planned there, also with the figures of
another device.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from penstock.arguments import check_fields, checked
from penstock.files import read_json

Method = Literal["hybrid", "recompute", "swap"]
"""The means that a plan may use."""
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the step. Views are not operators: they cost nothing and belong to their readers."""

    name: str
    """Its name in the captured graph."""
    target: str
    """Its function, such as ``"aten.addmm.default"``."""
    inputs: tuple[int, ...]
    """Storages that it reads and that this graph made. The graph's own inputs always exist and are not listed."""
    outputs: tuple[int, ...]
    """Storages that it makes."""
    duration_s: float
    """Seconds on the device."""
    workspace_bytes: int = 0
    """Bytes that it takes in addition to its outputs while it runs."""
    must_run_once: str = ""
    """The reason why it must not be recomputed; empty if it may."""
    module: str = ""
    """The module to whose forward it belongs, or the user's line of code."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "Operator(name='exp', target='aten.exp.default', inputs=(0,), outputs=(1,), duration_s=1e-3)",
            duration_s=0,
            workspace_bytes=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The bytes behind one or more tensors of the graph."""

    name: str
    """Name of the value that made it."""
    size_bytes: int
    """Its size on the device."""
    producer: int
    """Index of the operator that makes it."""
    is_output: bool = False
    """Whether the step returns it (the loss, a gradient) or its caller keeps it. It then lives to the end."""
    must_stay: bool = False
    """Whether it cannot be swapped, since it is not a tensor but what an operator that is captured whole keeps."""

    def __post_init__(self) -> None:
        check_fields(self, "Storage(name='exp', size_bytes=2**20, producer=0)", size_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RematProblem:
    """One training step: forward operators, then backward operators."""

    operators: tuple[Operator, ...]
    """The operators, in the order in which they run."""
    num_forward: int
    """Number of forward operators."""
    storages: tuple[Storage, ...]
    """Storages made by the operators."""
    static_bytes: int = 0
    """Device bytes held all the time: parameters, buffers, the batch, existing gradients, optimizer state."""
    out_bandwidth_bytes_per_s: float = 0.0
    """Bandwidth of the lane out of the device; 0 if there is no tier for swaps."""
    in_bandwidth_bytes_per_s: float = 0.0
    """Bandwidth of the lane back."""
    swap_page_bytes: int = 0
    """On a CPU, the block size of direct I/O.

    A storage swapped from main memory leaves its unaligned edges there until its last use: at most a page, plus what
    its size exceeds whole pages by. It comes back into memory that is larger by a page, with the same offset in a page.
    """

    def __post_init__(self) -> None:
        check_fields(
            self,
            "RematProblem.load('problem.json')",
            num_forward=0, static_bytes=0, out_bandwidth_bytes_per_s=0, in_bandwidth_bytes_per_s=0, swap_page_bytes=0,
        )  # fmt: skip
        if self.num_forward > len(self.operators):
            raise ValueError(f"`num_forward` must be at most {len(self.operators)} operators, got {self.num_forward}")
        places, num_storages = range(len(self.operators)), len(self.storages)
        for index, operator in enumerate(self.operators):
            if not all(0 <= number < num_storages for number in (*operator.inputs, *operator.outputs)):
                raise ValueError(
                    f"`inputs` and `outputs` of operator {index} must be numbers of the {num_storages} storages, got "
                    f"{operator.inputs} and {operator.outputs}"
                )
        for index, storage in enumerate(self.storages):
            if storage.producer not in places:
                raise ValueError(
                    f"`producer` of storage {index} must be one of {len(places)} operators, got {storage.producer}"
                )

    @property
    def step_s(self) -> float:
        """Seconds of all operators."""
        return sum(operator.duration_s for operator in self.operators)

    @property
    def can_swap(self) -> bool:
        """Whether there is a tier for swaps."""
        return self.out_bandwidth_bytes_per_s > 0 and self.in_bandwidth_bytes_per_s > 0

    @checked("problem.scaled(durations=0.5, out=2e9, back=2e9)", durations=0, out=0, back=0)
    def scaled(self, *, durations: float = 1.0, out: float | None = None, back: float | None = None) -> Self:
        """Return the same step on another device: ``durations`` times as long, with other lanes in bytes per second."""
        return replace(
            self,
            operators=tuple(
                replace(operator, duration_s=operator.duration_s * durations) for operator in self.operators
            ),
            out_bandwidth_bytes_per_s=self.out_bandwidth_bytes_per_s if out is None else out,
            in_bandwidth_bytes_per_s=self.in_bandwidth_bytes_per_s if back is None else back,
        )

    @checked("problem.save('problem.json')")
    def save(self, file: str | Path) -> None:
        """Write the problem as JSON."""
        Path(file).write_text(json.dumps({"format": _FORMAT, **asdict(self)}))

    @classmethod
    @checked("RematProblem.load('problem.json')")
    def load(cls, file: str | Path) -> Self:
        """Read what ``save`` wrote. Raise ``ValueError`` for anything else."""
        try:
            content: dict[str, Any] = read_json(Path(file))
            if content.pop("format") != _FORMAT:
                raise ValueError("it was written by another version")
            operators = tuple(
                Operator(**{**operator, "inputs": tuple(operator["inputs"]), "outputs": tuple(operator["outputs"])})
                for operator in content.pop("operators")
            )
            storages = tuple(Storage(**storage) for storage in content.pop("storages"))
            problem = cls(operators=operators, storages=storages, **content)
            _check(problem)
            return problem
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{file} is not a saved problem ({error}); write one with problem.save({str(file)!r})"
            ) from error


_MOST_BYTES = 2**60


def _check(problem: RematProblem) -> None:
    """Raise ``ValueError`` for an impossible step, so that planners, some of them in C, need not check."""
    operators, storages = problem.operators, problem.storages
    _check_count("num_forward", problem.num_forward, len(operators))
    for index, storage in enumerate(storages):
        _check_count(f"size_bytes of storage {index}", storage.size_bytes)
        _check_count(f"producer of storage {index}", storage.producer, len(operators) - 1)
        if not isinstance(storage.name, str) or not isinstance(storage.is_output, bool):
            raise ValueError(
                f"`name` of storage {index} must be a string and `is_output` a bool, got {storage.name!r} and "
                f"{storage.is_output!r}"
            )
    outputs: list[int] = []
    for index, operator in enumerate(operators):
        if not all(
            isinstance(text, str) for text in (operator.name, operator.target, operator.must_run_once, operator.module)
        ):
            raise ValueError(f"`name`, `target`, `must_run_once` and `module` of operator {index} must be strings")
        _check_count(f"workspace_bytes of operator {index}", operator.workspace_bytes)
        _check_rate(f"duration_s of operator {index}", operator.duration_s)
        for number in (*operator.inputs, *operator.outputs):
            _check_count(f"a storage number of operator {index}", number, len(storages) - 1)
        if any(storages[number].producer >= index for number in operator.inputs):
            raise ValueError(f"operator {index} must not read a storage that no earlier operator makes")
        if any(storages[number].producer != index for number in operator.outputs):
            raise ValueError(f"operator {index} must not have an output whose `producer` is another operator")
        outputs += operator.outputs
    if sorted(outputs) != list(range(len(storages))):
        raise ValueError("every storage must be an output of exactly one operator")
    for name in ("static_bytes", "swap_page_bytes"):
        _check_count(name, getattr(problem, name))
    for name in ("out_bandwidth_bytes_per_s", "in_bandwidth_bytes_per_s"):
        _check_rate(name, getattr(problem, name))
    if sum(storage.size_bytes for storage in storages) > _MOST_BYTES:
        raise ValueError(f"the storages must have at most {_MOST_BYTES} bytes together")


def _check_count(name: str, value: object, most: int = _MOST_BYTES) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}, got {value!r}")


def _check_rate(name: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
