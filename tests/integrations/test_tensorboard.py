"""Event files of TensorBoard: every loss, and the end of each job."""

import sys

import numpy as np
import pytest
from tracked import job_of, run

from penstock.integrations import TensorBoardTracker

pytestmark = pytest.mark.usefixtures("one_thread")


def events_of(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def text_of(events, tag):
    [event] = events.Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_tensorboard_has_every_loss_and_what_became_of_each_job(tmp_path):
    pytest.importorskip("tensorboard")
    results = run(TensorBoardTracker(tmp_path / "runs"))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(results)
    for name, result in results.items():
        events = events_of(tmp_path / "runs" / name)
        assert text_of(events, "state") == result.state.value
        if not result.losses:
            continue
        steps = [(event.step, event.value) for event in events.Scalars("loss")]
        assert steps == [(step, np.float32(loss)) for step, loss in enumerate(result.losses, start=1)]
        assert "| lr | 0.1 |\n| a\\|b | c d |" in text_of(events, "tags")
    validations = [
        (event.step, event.value) for event in events_of(tmp_path / "runs" / "done").Scalars("validation/loss")
    ]
    assert validations == [
        (validation["step"], np.float32(validation["loss"])) for validation in results["done"].validations
    ]
    assert len(results["stopped"].losses) == 5 and len(results["failed"].losses) == 2
    assert events_of(tmp_path / "runs" / "done").Scalars("lr")[0].value == np.float32(0.1)


def test_tensorboard_hides_what_came_after_the_checkpoint_of_a_resumed_job(tmp_path):
    pytest.importorskip("tensorboard")
    job = job_of("a")
    for steps in (range(1, 7), range(4, 9)):
        tracker = TensorBoardTracker(tmp_path)
        for step in steps:
            tracker.log(job, step, {"loss": float(step + 10 * steps.start)})
        tracker.close()
    values = {event.step: event.value for event in events_of(tmp_path / "a").Scalars("loss")}
    assert values == {1: 11, 2: 12, 3: 13, 4: 44, 5: 45, 6: 46, 7: 47, 8: 48}


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"penstock\[fleet\]"):
        TensorBoardTracker("runs")
