"""Random numbers that belong to a job, although PyTorch's generators belong to the process.

A job draws from one stream, as a training script of its own would: model, data order, dropout. There are two ways:

- ``swapped_in`` replaces the process's state with the job's while a factory or a data iterator runs: PyTorch's CPU
  generator, ``random`` and numpy's. Only one job at a time can do so. It covers every call, also ``torch.manual_seed``.
- ``drawing`` is for units, which run in parallel. A dispatch mode swaps the state for single operators, those that
  PyTorch tags as drawing. An accelerator's generator is swapped for the whole unit, since only one thread uses it.
"""

import base64
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.devices import backend_of
from penstock.tiers import drawing_from, generators_held


class Randomness:
    """The random generators of a job.

    Only the job's worker uses them, and the process's own are restored after each use.
    """

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.cpu = generator.get_state()
        self.seed = seed
        self.cuda: torch.Tensor | None = None
        """State of the accelerator's generator; ``None`` before the first unit there."""
        self.python: Any = random.Random(seed).getstate()  # noqa: S311  # any: what `random` says; not a secret
        self.numpy: Any = np.random.RandomState(seed % 2**32).get_state()  # any: what numpy says
        self.num_draws = self.num_host_draws = 0
        """Numbers of operators that may have drawn in units, and of those that changed the CPU's generator."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the process's generators with the job's inside this context. Nobody else draws meanwhile."""
        with generators_held():
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()
            torch.set_rng_state(self.cpu)
            random.setstate(self.python)
            np.random.set_state(self.numpy)
            try:
                yield
            finally:
                self.cpu, self.python, self.numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
                torch.set_rng_state(before[0])
                random.setstate(before[1])
                np.random.set_state(before[2])

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore the generators of the process and of the job at the end of this context."""
        now = self.cpu, self.python, self.numpy
        try:
            with self.swapped_in():
                yield
        finally:
            self.cpu, self.python, self.numpy = now

    @contextmanager
    def drawing(self, device: torch.device, draws: "Draws | None" = None) -> Iterator[None]:
        """Let operators of this thread draw from the job.

        ``draws`` says which of them do, if a pilot has found out.
        """
        draws = Draws.ON_HOST if draws is None else draws
        if draws is Draws.NONE:
            yield
            return
        swapping = _Swapping(self) if draws is Draws.ON_HOST or device.type == "cpu" else nullcontext()
        with self._on(device), drawing_from(self), swapping:
            yield

    @contextmanager
    def drawing_anyhow(self, device: torch.device) -> Iterator[None]:
        """Let everything that this thread draws, with operators, ``random`` or numpy, come from the job.

        Nobody else draws meanwhile.
        """
        with self.swapped_in(), self._on(device):
            yield

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        """Replace the generator of an accelerator, which only this thread uses, with the job's."""
        if device.type == "cpu":
            yield
            return
        backend = backend_of(device)
        before = backend.random_state()
        if self.cuda is None:
            self.cuda = torch.Generator(device).manual_seed(self.seed).get_state()
        backend.set_random_state(self.cuda)
        try:
            yield
        finally:
            self.cuda = backend.random_state()
            backend.set_random_state(before)

    def get(self, device: str) -> torch.Tensor:
        """Return the state from which the next operator draws, as `tiers.Generators` defines it."""
        return self.cpu if device == "cpu" else backend_of(device).random_state()

    def put(self, state: torch.Tensor, device: str) -> None:
        """Let the next operator draw from ``state``."""
        if device == "cpu":
            self.cpu = state
        else:
            backend_of(device).set_random_state(state)

    def draws_since(self, num_draws: int, num_host_draws: int) -> "Draws":
        """Return the kind of draws since these counts were read.

        It includes operators that can draw but drew nothing this time.
        """
        if self.num_host_draws > num_host_draws:
            return Draws.ON_HOST
        return Draws.ON_DEVICE if self.num_draws > num_draws else Draws.NONE

    def mark(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the state from which units draw now, for ``replaying``. ``device`` is where they will run."""
        if self.cuda is None and device is not None and device.type != "cpu":
            self.cuda = torch.Generator(device).manual_seed(self.seed).get_state()
        return self.cpu, self.cuda

    def is_at(self, mark: tuple[torch.Tensor, torch.Tensor | None]) -> bool:
        """Whether nothing was drawn since ``mark``."""
        cpu, cuda = mark
        is_same = cuda is self.cuda or (cuda is not None and self.cuda is not None and torch.equal(cuda, self.cuda))
        return is_same and torch.equal(cpu, self.cpu)

    @contextmanager
    def replaying(self, mark: tuple[torch.Tensor, torch.Tensor | None]) -> Iterator[None]:
        """Repeat the random numbers drawn after ``mark`` inside this context.

        Afterwards the job continues where it was.
        """
        now = self.mark()
        self.cpu, self.cuda = mark
        try:
            yield
        finally:
            self.cpu, self.cuda = now

    def state(self) -> dict[str, Any]:  # any: JSON
        """Return the whole state as JSON values."""
        version, numbers, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "seed": self.seed,
            "cpu": _encode(self.cpu),
            "cuda": None if self.cuda is None else _encode(self.cuda),
            "python": [version, list(numbers), gauss],
            "numpy": [name, keys.tolist(), position, has_gauss, cached],
        }

    def load(self, state: dict[str, Any]) -> None:  # any: JSON
        """Continue from a ``state()``. Raise ``ValueError`` or ``KeyError`` if ``state`` is not one."""
        version, numbers, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        self.seed, self.cpu = int(state["seed"]), _decode(state["cpu"])
        self.cuda = None if state["cuda"] is None else _decode(state["cuda"])
        self.python = (version, tuple(numbers), gauss)
        self.numpy = (name, np.array(keys, dtype=np.uint32), position, has_gauss, cached)


class Draws(Enum):
    """Kinds of random draws of a shard's operators, ordered by the cost of drawing from the job."""

    NONE = "nothing"
    """No draws. Costs nothing."""
    ON_DEVICE = "from the accelerator's generator"
    """Draws from the accelerator only. Costs nothing per operator. Includes attention even without dropout."""
    ON_HOST = "from the CPU's generator too"
    """Draws from the CPU's generator, too. Costs a call of Python per operator."""


class _Swapping(TorchDispatchMode):
    """A dispatch mode that runs operators that draw from PyTorch's CPU generator with the job's state in it."""

    def __init__(self, randomness: Randomness):
        super().__init__()  # type: ignore[no-untyped-call]
        self._randomness = randomness

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return ``True``, so that Dynamo, in this thread or another, does not give up because of this mode."""
        return True

    # any: PyTorch's
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        randomness = self._randomness
        with generators_held():
            before = torch.get_rng_state()
            torch.set_rng_state(randomness.cpu)
            try:
                return func(*args, **kwargs)
            finally:
                drawn = torch.get_rng_state()
                with torch._C._DisableTorchDispatch():  # the mode of a running compilation rejects real tensors
                    randomness.num_host_draws += not torch.equal(drawn, randomness.cpu)
                randomness.num_draws += 1
                randomness.cpu = drawn
                torch.set_rng_state(before)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
