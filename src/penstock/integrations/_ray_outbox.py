"""The outbox of a node of a fleet on Ray: what device threads have for the driver, until a report takes it."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.fleet import Job, JobResult, JobState

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a job on this node."""

    name: str
    """Name of the job."""
    state: JobState | None
    """State of the job; ``None`` if it was released to continue elsewhere."""
    losses: tuple[float, ...] = ()
    """Losses, one per optimizer step."""
    validations: tuple[Metrics, ...] = ()
    """Metrics, one dict per validation."""
    error: str | None = None
    """The error with which it failed."""
    seconds_per_step: float = 0.0
    """Seconds that the units of one step took."""
    checkpoint: Path | None = None
    """Path of its last checkpoint."""


class Outbox:
    """The news of a node. It is the fleet's tracker and its stopper, whose methods device threads call.

    Its lock is held only for a moment, except where a thread waits: the driver's for news, and a device's for a
    verdict.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._metrics: list[tuple[str, int, Metrics]] = []
        self._questions: list[tuple[str, int, Metrics]] = []
        self._verdicts: dict[tuple[str, int], bool | str] = {}
        self._endings: list[Ending] = []
        self._releasing: set[str] = set()
        self._has_news = self._is_closing = False

    def wait(self, verdicts: Mapping[tuple[str, int], bool | str], timeout_s: float) -> None:
        """Pass on the stopper's verdicts; wait until there is news, the node closes or time is up."""
        with self._changed:
            self._verdicts.update(verdicts)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_news or self._is_closing, timeout=timeout_s)
            self._has_news = False

    def say(self) -> None:
        """Note that there is news."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def close_down(self) -> None:
        """Let nobody wait from now on; a validation without a verdict lets its job continue."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def release(self, name: str) -> None:
        """Note that a job which stops has not ended, but continues elsewhere."""
        with self._changed:
            self._releasing.add(name)

    def keep(self, name: str) -> None:
        """Undo ``release``, since the user stops the job."""
        with self._changed:
            self._releasing.discard(name)

    def fail(self, name: str, error: str) -> None:
        """Report that a job failed before it began."""
        with self._changed:
            self._endings.append(Ending(name=name, state=JobState.FAILED, error=error))
        self.say()

    def note_ending(self, name: str, result: JobResult) -> None:
        """Note a job's result for the next report."""
        with self._changed:
            is_released = name in self._releasing and result.state is JobState.STOPPED
            self._releasing.discard(name)
            self._endings.append(
                Ending(
                    name=name,
                    state=None if is_released else result.state,
                    losses=result.losses,
                    validations=result.validations,
                    error=result.error,
                    seconds_per_step=result.seconds_per_step,
                    checkpoint=result.checkpoint,
                )
            )

    def take_endings(self) -> tuple[Ending, ...]:
        """Return the endings since the last call."""
        with self._changed:
            endings, self._endings = tuple(self._endings), []
        return endings

    def take_logged(self) -> tuple[tuple[tuple[str, int, Metrics], ...], tuple[tuple[str, int, Metrics], ...]]:
        """Return the metrics and the validations that wait for a verdict, each since the last call."""
        with self._changed:
            metrics, self._metrics = tuple(self._metrics), []
            questions, self._questions = tuple(self._questions), []
        return metrics, questions

    # The fleet's tracker and stopper

    def log(self, job: Job, step: int, metrics: Metrics) -> None:
        """Keep metrics for the driver's trackers."""
        with self._changed:
            self._metrics.append((job.name, step, dict(metrics)))

    def end(self, job: Job, state: JobState) -> None:  # noqa: ARG002  # the protocol's
        """Note that there is an ending to report."""
        self.say()

    def close(self) -> None:
        """Do nothing, since nothing is open."""

    def stops(self, job: Job, step: int, metrics: Metrics) -> bool:
        """Wait for the verdict of the driver's stopper, and return it."""
        with self._changed:
            self._questions.append((job.name, step, dict(metrics)))
        self.say()
        with self._changed:
            self._changed.wait_for(lambda: (job.name, step) in self._verdicts or self._is_closing)
            verdict = self._verdicts.pop((job.name, step), False)
            if verdict is True:
                self._releasing.discard(job.name)
        if isinstance(verdict, str):
            raise RuntimeError(f"the stopper failed: {verdict}")
        return verdict
