"""A tracker that writes a fleet's metrics as TensorBoard event files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.arguments import checked
from penstock.fleet import Job, JobState

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """A `fleet.Tracker` with one run per job, in a folder of the job's name in ``folder``. Scalars are stored as
    float32.

    The job's tags, and its final state, are texts. A fleet that is resumed continues in the same folders; what came
    after the checkpoint is hidden. Raises ``ImportError`` without TensorBoard.

    ``fleet.run(jobs, trackers=[TensorBoardTracker("runs")])``, then ``tensorboard --logdir runs``.
    """

    @checked("TensorBoardTracker('runs')")
    def __init__(self, folder: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardTracker needs tensorboard: pip install 'penstock[fleet]'") from error
        self._make = SummaryWriter
        self._folder = Path(folder)
        self._writers: dict[str, SummaryWriter] = {}

    @checked("tracker.log(job, 10, {'loss': 0.5})")
    def log(self, job: Job, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars at ``step``."""
        writer = self._writer_of(job, step)
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)

    @checked("tracker.end(job, JobState.DONE)")
    def end(self, job: Job, state: JobState) -> None:
        """Write the job's state and close its file."""
        self._writer_of(job, None).add_text("state", state.value)
        self._writers.pop(job.name).close()

    def close(self) -> None:
        """Close the files of jobs that are not over."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer_of(self, job: Job, step: int | None) -> "SummaryWriter":
        writer = self._writers.get(job.name)
        if writer is None:
            writer = self._make(str(self._folder / job.name), purge_step=step)
            self._writers[job.name] = writer
            if job.tags:
                writer.add_text("tags", _table(job.tags))
        return writer


def _table(tags: Mapping[str, object]) -> str:
    """Return the tags as a Markdown table, which TensorBoard renders."""
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in tags.items()]
    return "\n".join(["| tag | value |", "|---|---|", *rows])


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
