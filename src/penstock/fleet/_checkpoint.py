"""Checkpoints of jobs: safetensors and JSON in a folder that appears complete or not at all.

``checkpoints/step-00000120`` holds a file per group of tensors, a file per group of optimizer state, and `state.json`:
position in the data, random states, scheduler, loss scale, losses. It is written under another name, synchronized and
renamed. Nothing is ever unpickled. Frozen parameters are not stored: the job's factories make them again.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.checkpoints import DAMAGE, check_whole, decode, drafted, encode, unusable, unwritable
from penstock.errors import CheckpointError, JobResumedWarning
from penstock.files import check_is_file, read_json
from penstock.fleet import _whole_state as whole
from penstock.fleet._feed import Position
from penstock.fleet._life import JobRun
from penstock.fleet._memory import DeviceMemory, Item
from penstock.fleet._packed import Packed
from penstock.fleet._training import JobTraining
from penstock.stepping import is_own
from penstock.tensorfiles import TensorFiles

FORMAT = 1
_STATE = "state.json"
_WHOLE = "optimizer.safetensors"
_FIELDS = ("accumulate", "clip_norm", "precision", "seed")
"""Fields of a job that a checkpoint holds, so that one who continues with others is told."""
_COPIES = 5
"""Attempts to copy a checkpoint that may be deleted meanwhile."""
Json = dict[str, Any]  # any: what JSON holds


def latest(folder: Path, kind: str = "checkpoints") -> Path | None:
    """Return the newest complete checkpoint in a job's folder; ``kind="best"``: that of its best validation."""
    paths = sorted(path for path in (folder / kind).glob("step-*") if (path / _STATE).is_file())
    return paths[-1] if paths else None


def save(run: JobRun, memory: DeviceMemory, folder: Path, *, keep: int, kind: str = "checkpoints") -> Path:
    """Write a checkpoint of a job that is between two steps, and delete all but the newest ``keep`` of its ``kind``.

    Raises ``CheckpointError`` if it could not be written; earlier checkpoints are then intact.
    """
    training, parent = run.training, folder / kind
    target = parent / f"step-{training.position.step:08}"
    for item in training.items():
        if item.pending is not None:
            item.pending.finish()  # its errors are not this checkpoint's
    try:
        for old in parent.glob(".step-*.draft"):  # left by a process that was killed
            shutil.rmtree(old, ignore_errors=True)
        with drafted(target) as draft:
            state = state_of(training, wants_validation=run.milestones.wants_validation)
            for name, tensors in _files(training, memory):
                save_file(tensors, draft / f"{name}.safetensors")
            if training.cuts.uncut_because:
                state["whole"], kept = whole.stored(training.optimizer.master, warns=not training.is_done())
                save_file(kept, draft / _WHOLE)
            (draft / _STATE).write_text(json.dumps(state))
        for old in sorted(parent.glob("step-*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError, TypeError) as error:
        what = f"job {run.job.name!r}: no checkpoint could be written to {parent}"
        raise unwritable(what, error, "the last complete checkpoint is untouched") from error
    return target


def restore(run: JobRun, path: Path, *, warm: bool = False) -> Callable[[], None]:
    """Load a checkpoint into a job that was just built.

    Return a function that puts its optimizer state onto the device.

    ``warm`` loads only parameters and buffers, for a clone that begins its own training there. Raises
    ``CheckpointError`` for files that are damaged or belong to another job.
    """
    training = run.training
    try:
        state = read_state(path)
        check_whole(path)
        tensors = TensorFiles(sorted(path.glob("tensors*.safetensors")))
        if training.cuts.uncut_because:  # whoever refers to the tensors must find the values
            _fill(training.weights.tensors, tensors)
        for key, tensor in {} if training.cuts.uncut_because else tensors.items():
            if key in training.weights.originals:
                training.weights.put(key, _like(tensor, training.weights.originals[key], key))
            elif not key.startswith("constant."):
                raise ValueError(f"it has a tensor {key!r}, but the job's model does not")
        if warm:
            return lambda: None
        changed = _differences(training, state)
        _load_state(training, state)
        run.milestones.wants_validation = bool(state.get("wants_validation", False))
    except DAMAGE as error:
        raise unusable(path, error) from error
    if changed:
        warnings.warn(
            f"job {run.job.name!r} continues from a checkpoint of a job that differed: {'; '.join(changed)}. A job "
            "with another name begins anew; fleet.clone(..., warm=True) begins with the weights",
            JobResumedWarning,
            stacklevel=2,
        )
    return lambda: _restore_states(run, path)


def read_state(path: Path) -> Json:
    """Return what a checkpoint holds in addition to tensors. Raise ``CheckpointError`` if it is damaged."""
    try:
        state = read_json(path / _STATE)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            stored = state.get("format") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"its format is {stored!r}, but this version of Penstock reads {FORMAT}")
        if not all(isinstance(state.get(key), list) for key in ("losses", "validations")):
            raise ValueError("it has no lists of losses and validations")
        for loss in state["losses"]:
            float(loss)
        for validation in state["validations"]:
            int(validation["step"])
    except DAMAGE as error:
        raise unusable(path, error) from error
    return state


def load_model(path: Path, model: torch.nn.Module) -> torch.nn.Module:
    """Fill a module that the job's factory made with a checkpoint's parameters and buffers.

    Raises ``CheckpointError`` for files that are damaged or belong to another job.
    """
    check_whole(path)
    try:
        return fill_model(model, TensorFiles(sorted(path.glob("tensors*.safetensors"))))
    except DAMAGE as error:
        raise unusable(path, error) from error


def fill_model(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Fill a module that the job's factory made with parameters and buffers, as a checkpoint holds them."""
    _fill({**dict(model.named_parameters()), **dict(model.named_buffers())}, tensors)
    return model


def copy_newest(folder: Path, origin: Path, name: str) -> None:
    """Copy the newest checkpoint of ``name`` to ``origin``, complete or not at all.

    The original is deleted when the job writes its next one, so a copy may have to be repeated. Raises ``ValueError``
    if there is no checkpoint.
    """
    for attempt in range(_COPIES):
        path = latest(folder)
        if path is None:
            raise ValueError(
                f"job {name!r} has no checkpoint yet, so a warm clone has nothing to start from; clone it cold "
                "(warm=False), or later"
            )
        draft = origin.with_name(f"{origin.name}-draft")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            shutil.copytree(path, draft / path.name)
            if not path.is_dir():
                raise FileNotFoundError(f"{path} was deleted while it was copied")
        except (OSError, shutil.Error):
            if path.is_dir() or attempt == _COPIES - 1:
                raise
            continue
        shutil.rmtree(origin, ignore_errors=True)
        draft.rename(origin)
        return


def forget_best_after(folder: Path, last: Path | None) -> None:
    """Delete checkpoints of validations that come after a job's last checkpoint, or all if it begins anew."""
    for path in (folder / "best").glob("step-*"):
        if last is None or path.name > last.name:
            shutil.rmtree(path, ignore_errors=True)


def forget_after(path: Path, step: int) -> None:
    """Delete a file's metrics of steps after the checkpoint: those steps will run again."""
    if not path.exists() and not path.is_symlink():
        return
    try:
        check_is_file(path)
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if _step_of(line) <= step]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"metrics cannot be written to {path}: {error}. Move it away") from error


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf  # a line that a killed process did not finish


def state_of(training: JobTraining, *, wants_validation: bool) -> Json:
    """Return the part of a job's state that is not stored as tensors.

    ``wants_validation`` says that a validation is due before the next batch.
    """
    master, scheduler = training.optimizer.master, training.optimizer.scheduler
    scale = training.open_step.scale
    return {
        "format": FORMAT,
        "job": {name: getattr(training.job, name) for name in _FIELDS},
        "position": asdict(training.position),
        "random": training.randomness.state(),
        "epoch_random": training.feed.epoch_random,
        "seen": training.feed.seen,
        "losses": training.history.losses,
        "validations": training.history.validations,
        "wants_validation": wants_validation,
        "scale": None if scale is None else [scale.value, scale.num_good],
        "numbers": encode(training.states.numbers),
        "groups": encode(
            [{key: value for key, value in group.items() if key != "params"} for group in master.param_groups]
        ),
        "scheduler": None if scheduler is None else encode(scheduler.state_dict()),
    }


def group_views(group: Any) -> Callable[[list[torch.UntypedStorage]], dict[str, torch.Tensor]]:  # any: a Group
    """Return the function that `Packed.views` is, for a group's one storage."""
    return lambda storages: group.views(storages[0])


def tensors_of(run: JobRun, memory: DeviceMemory) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a job in main memory, as a checkpoint would hold them."""
    files = _files(run.training, memory)
    return {key: tensor for name, tensors in files if name.startswith("tensors") for key, tensor in tensors.items()}


def _files(training: JobTraining, memory: DeviceMemory) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield names of files and the tensors that belong there, in main memory."""
    if training.cuts.uncut_because:
        own = {name: part for name, tensor in training.weights.tensors.items() for name, part in _parts(name, tensor)}
        yield "tensors", {name: part.detach().cpu().contiguous().clone() for name, part in own.items()}
    for index, group in enumerate(training.groups):
        if group.kind == "frozen" or group.item is None:
            continue
        yield f"tensors-{index:05}", _fetched(memory, group.item, group_views(group))
        packed = training.states.packed.get(group)
        if packed is not None:
            yield f"optimizer-{index:05}", _fetched(memory, packed.item, packed.views)


def _fetched(
    memory: DeviceMemory, item: Item, views: Callable[[list[torch.UntypedStorage]], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    memory.make_room(item.size_bytes - item.held_bytes(), [item], f"a checkpoint of {item.label}")
    return {key: view.detach().contiguous().cpu() for key, view in views(memory.get(item)).items()}


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a file holds of a tensor: of a sparse one its values, and in COO their places."""
    if tensor.layout is torch.strided:
        yield name, tensor
        return
    if tensor.layout is torch.sparse_coo:
        yield f"{name}//places", tensor._indices()
    yield f"{name}//values", tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


@torch.no_grad()
def _fill(own: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    """Copy stored values into the tensors of a model, in place. Those that are not stored stay as they are."""
    for name, tensor in own.items():
        if name in stored:
            tensor.copy_(_like(stored[name], tensor, name))
        elif f"{name}//places" in stored:
            places, values = stored[f"{name}//places"], stored[f"{name}//values"]
            tensor.copy_(torch.sparse_coo_tensor(places, values, tensor.shape, is_coalesced=tensor.is_coalesced()))
        elif f"{name}//values" in stored:
            tensor.values().copy_(stored[f"{name}//values"])


def _like(tensor: torch.Tensor, own: torch.Tensor, key: str) -> torch.Tensor:
    if tensor.shape != own.shape or tensor.dtype != own.dtype:
        raise ValueError(
            f"{key} is {tuple(tensor.shape)} {tensor.dtype} in the checkpoint but {tuple(own.shape)} {own.dtype} in "
            "the model"
        )
    return tensor


def _differences(training: JobTraining, state: Json) -> list[str]:
    """Return what differs between a job and the one that a checkpoint is of, and which of both counts from now on."""
    told, stored = [], state.get("job") or {}  # older checkpoints have none
    for name in _FIELDS:
        now = getattr(training.job, name)
        if name in stored and stored[name] != now:
            told.append(f"{name}={now!r} from now on, {stored[name]!r} before")
    master, scheduler = training.optimizer.master, training.optimizer.scheduler
    scheduled = set() if scheduler is None else {"lr", "betas", "momentum"}
    groups = zip(master.param_groups, decode(state["groups"]), strict=False)
    for group, before in groups if is_own(master) else ():  # others may change their settings by themselves
        for key, value in before.items():
            is_shown = isinstance(value, int | float | str | tuple) and key in group and key not in scheduled
            if is_shown and group[key] != value:
                told.append(f"{key}={value!r} of the checkpoint counts, and not {group[key]!r}")
    return list(dict.fromkeys(told))


def _load_state(training: JobTraining, state: Json) -> None:
    master = training.optimizer.master
    training.history.losses = [float(loss) for loss in state["losses"]]
    training.history.validations = [dict(validation) for validation in state["validations"]]
    scale = training.open_step.scale
    if scale is not None and state["scale"] is not None:
        scale.value, scale.num_good = float(state["scale"][0]), int(state["scale"][1])
    training.states.numbers = decode(state["numbers"])
    for group, settings in zip(master.param_groups, decode(state["groups"]), strict=True):
        group.update(settings)
    if training.optimizer.scheduler is not None:
        training.optimizer.scheduler.load_state_dict(decode(state["scheduler"]))
    training.position = Position(**state["position"])
    if not training.feed.skip_to(training.position, state["epoch_random"], state.get("seen", ())):
        warnings.warn(
            f"job {training.job.name!r} continues with other batches than it would have seen: its data has a state "
            "that neither a new pass nor all passes from the beginning bring back. Let data() return the same batches "
            "whenever it is called, such as a DataLoader that draws from PyTorch's own generator",
            JobResumedWarning,
            stacklevel=2,
        )
    training.randomness.load(state["random"])


def _restore_states(run: JobRun, path: Path) -> None:
    training, home = run.training, run.home
    assert home is not None
    memory = home.memory
    try:
        known = read_state(path).get("whole")
        if (known is None) is bool(training.cuts.uncut_because):
            raise ValueError("the job was cut when it was written and now is not, or the other way round")
        if known is not None:
            whole.load(training.optimizer.master, known, TensorFiles([path / _WHOLE]))
        tensors = dict(TensorFiles(sorted(path.glob("optimizer-*.safetensors"))))
    except DAMAGE as error:
        raise unusable(path, error) from error
    for group in training.groups:
        if group.kind != "trained":
            continue
        mine = {key: tensor for key, tensor in tensors.items() if key.rpartition("//")[0] in group.layouts}
        if mine:
            size_bytes = sum(tensor.nbytes for tensor in mine.values())
            memory.make_room(2 * size_bytes, (), f"optimizer state of job {run.job.name!r}")
            packed = Packed.of(
                f"{run.job.name}: optimizer state of shard {group.owner}",
                {key: tensor.to(memory.device, copy=True) for key, tensor in mine.items()},
            )
            training.states.packed[group] = packed
            memory.add(packed.item)
