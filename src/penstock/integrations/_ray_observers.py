"""The user's trackers and stopper, called in the driver's process."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.errors import TrackerWarning
from penstock.fleet import Job, JobState, Stopper, Tracker


class Observers:
    """Trackers and a stopper, which hear of each step once, even if a loss makes nodes repeat it."""

    def __init__(self, stopper: Stopper | None, trackers: Sequence[Tracker]):
        self._stopper, self._trackers = stopper, list(trackers)
        self._logged: dict[tuple[str, bool], int] = {}
        """Last step whose metrics trackers have, by job, of training (``False``) and of validation (``True``)."""
        self._verdicts: dict[tuple[str, int], bool | str] = {}
        """The stopper's verdicts by job and step; a text is the error with which it failed."""

    def log(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics, except those of steps that are repeated after a loss."""
        key = (job.name, any(name.startswith("validation/") for name in metrics))
        if step > self._logged.get(key, -1):
            self._logged[key] = step
            self._tell(lambda tracker: tracker.log(job, step, metrics))

    def catch_up(self, job: Job, file: Path) -> None:
        """Log what a lost node recorded and did not report, since steps up to the checkpoint are not repeated."""
        for line in file.read_text().splitlines() if file.is_file() else ():
            with suppress(ValueError):  # a line that was not finished
                metrics = json.loads(line)
                step = int(metrics.pop("step"))
                del metrics["time_s"]
                self.log(job, step, metrics)

    def verdict(self, job: Job, step: int, metrics: Mapping[str, float]) -> bool | str:
        """Return the stopper's verdict, asking once per validation even if a loss makes it come again."""
        assert self._stopper is not None
        key = (job.name, step)
        if key not in self._verdicts:
            try:
                self._verdicts[key] = bool(self._stopper(job, step, metrics))
            except Exception as error:
                self._verdicts[key] = f"{type(error).__name__}: {error}"
        return self._verdicts[key]

    def end(self, job: Job, state: JobState) -> None:
        """Tell the trackers that a job is over."""
        self._tell(lambda tracker: tracker.end(job, state))

    def close(self) -> None:
        """Close the trackers."""
        self._tell(lambda tracker: tracker.close())

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        """Call all trackers. One that raises is not called again, as in a local fleet."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                text = (
                    f"{type(tracker).__name__} raised {type(error).__name__}: {error}, and receives no further updates."
                )
                warnings.warn(f"{text} Training goes on.", TrackerWarning, stacklevel=4)
