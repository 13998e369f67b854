"""Checkpoints of a training: parameters, buffers and optimizer state in files, written and read a part at a time.

`model.safetensors` (several files with an index if it is large) uses the names of ``state_dict``, so that other tools
can read it. `optimizer-*.safetensors` holds ``place//field``, where the place is the number that PyTorch gives a
parameter in the optimizer. `training.json` holds everything else.
"""

import base64
import functools
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

from penstock.checkpoints import DAMAGE, check_whole, decode, drafted, encode, unusable, unwritable
from penstock.devices import backend_of
from penstock.errors import CheckpointError
from penstock.files import read_json
from penstock.tensorfiles import TensorFiles

FORMAT = 1
_STATE = "training.json"
_WEIGHTS = "model"
_OPTIMIZER = "optimizer"
_EXTRA = "extra"
_OWN_FILES = (".safetensors", "-*-of-*.safetensors", ".safetensors.index.json")
_HINT = "Go on from another checkpoint"
_SMALL_ELEMENTS = 64
"""Tensors of ``extra`` with at most this many elements are stored in JSON."""
_OWN = "parameter"
"""The field under which a parameter that the optimizer has but the model has not is stored."""


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, extra: Any, part_bytes: int
) -> None:
    """Write a checkpoint folder in files of about ``part_bytes``.

    Raises ``CheckpointError`` if it cannot be written; an older checkpoint at ``path`` is then untouched.
    """
    path = Path(os.path.realpath(path))  # a symbolic link to the newest checkpoint stays a link
    if path.exists() and not (path / _STATE).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists already and is not a checkpoint of a training; give another path")
    try:
        weights = _tensors_of(model)
        own, states, numbers = _split(optimizer, model)
        extras: dict[str, torch.Tensor] = {}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        content = {
            "format": FORMAT,
            "optimizer": type(optimizer).__name__,
            "parameters": _shapes(optimizer),
            "groups": encode(groups),
            "numbers": encode(numbers),
            "devices": _devices(states, numbers, device),
            "random": {kind: _to_text(state) for kind, state in _random_states(device).items()},
            "extra": encode(extra, functools.partial(_keep, extras)),
        }
    except TypeError as error:
        raise CheckpointError(f"no checkpoint was written to {path}: {error}") from error
    try:
        with drafted(path) as draft:
            _write_parts(draft, _WEIGHTS, weights, part_bytes)
            _write_parts(draft, _OPTIMIZER, {**own, **states}, part_bytes)
            _write_parts(draft, _EXTRA, extras, part_bytes)
            (draft / _STATE).write_text(json.dumps(content))
    except (OSError, SafetensorError) as error:
        raise unwritable(
            f"no checkpoint could be written to {path}", error, "what was there before is untouched"
        ) from error


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Callable[[], Any]:  # any: see `save`
    """Check a checkpoint folder; return a function that loads its contents and returns ``extra``.

    Raises ``CheckpointError`` for files that are damaged or belong to another model.
    """
    path = Path(os.path.realpath(path))
    if not path.exists() and (old := path.parent / f".{path.name}.old").exists():
        path = old  # the process was killed before the new checkpoint took its place
    if not (path / _STATE).is_file():
        raise CheckpointError(f"there is no checkpoint of a training in {path}: training.save(path) writes one")
    try:
        state = read_json(path / _STATE)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(f"this version of Penstock reads only format {FORMAT}")
        check_whole(path, _HINT)
        own, tensors = _tensors_of(model), _stored(path, _WEIGHTS)
        _check(tensors, own)
        optimized, trained = _stored(path, _OPTIMIZER), _numbered(optimizer)
        if state["optimizer"] != type(optimizer).__name__:
            raise ValueError(
                f"its optimizer is {state['optimizer']}, and that of this training is {type(optimizer).__name__}"
            )
        if state["parameters"] != _shapes(optimizer):
            raise ValueError("its optimizer has other parameter groups, or parameters of other shapes")
        groups, numbers = decode(state["groups"]), decode(state["numbers"])
        devices = {key: torch.device(name) for key, name in state["devices"].items()}
        random = {kind: _to_tensor(text) for kind, text in state["random"].items()}
        extra = decode(state["extra"], _stored(path, _EXTRA))
    except DAMAGE as error:
        raise unusable(path, error, _HINT) from error

    def put() -> Any:
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
            _put_states(optimizer, trained, optimized, numbers, lambda key: devices.get(key, device))
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
        _put_random_states(device, random)
        return extra

    return put


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    """Return the shapes of the parameters of each group."""
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _devices(states: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], device: torch.device) -> dict[str, str]:
    """Return the devices of states that are not at the usual place: tensors on ``device``, all else in main memory."""
    elsewhere = {key: str(state.device) for key, state in states.items() if state.device != device}
    for key, value in numbers.items():
        elsewhere |= {key: str(leaf.device) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}  # noqa: B035
    return elsewhere


def _keep(kept: dict[str, torch.Tensor], tensor: torch.Tensor) -> str | None:
    """Put a tensor of ``extra`` aside for a file of its own, unless it is small; return its name there."""
    if tensor.numel() <= _SMALL_ELEMENTS and not tensor.is_complex():
        return None
    name = str(len(kept))
    kept[name] = tensor
    return name


def _stored(path: Path, stem: str) -> TensorFiles:
    """Open the files of one kind, and no others whose names begin alike."""
    return TensorFiles(sorted(file for rest in _OWN_FILES[:2] for file in path.glob(f"{stem}{rest}")))


def save_weights(path: Path, model: nn.Module, names: Collection[str] | None, part_bytes: int) -> None:
    """Write parameters and buffers alone, in files of about ``part_bytes``.

    Raises ``ValueError`` for names that the model has not, and ``CheckpointError`` if the files cannot be written.
    """
    tensors = _tensors_of(model)
    if names is not None:
        every = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        if unknown := set(names) - every.keys():
            raise ValueError(f"`names` must name parameters or buffers of the model, got {shown(unknown)}")
        own = {id(tensor) for tensor in tensors.values()}
        tensors = {name: every[name] for name in names if id(every[name]) in own}
    draft = path / ".weights.draft"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write_parts(draft, _WEIGHTS, tensors, part_bytes)
        for rest in _OWN_FILES:
            for old in path.glob(f"{_WEIGHTS}{rest}"):
                old.unlink()
        for file in draft.iterdir():
            file.replace(path / file.name)
        draft.rmdir()
    except (OSError, SafetensorError) as error:
        raise unwritable(f"the weights could not be written to {path}", error) from error


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``; a shared tensor appears once."""
    extra = nn.Module.get_extra_state
    tensors: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not extra:
            raise TypeError(
                f"{type(module).__name__} has extra state (get_extra_state), which cannot be saved in parts. "
                "Save the whole model: with training.whole(): torch.save(model.state_dict(), path)"
            )
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set or id(tensor) in known:
                continue
            known.add(id(tensor))
            full = f"{prefix}.{name}" if prefix else name
            if hasattr(tensor, "__tensor_flatten__"):
                raise TypeError(
                    f"{full} is a {type(tensor).__name__}, which cannot be saved in parts. Save the whole model: "
                    "with training.whole(): torch.save(model.state_dict(), path)"
                )
            tensors[full] = tensor
    return tensors


def _write_parts(folder: Path, stem: str, tensors: Mapping[str, torch.Tensor], part_bytes: int) -> None:
    """Write safetensors files of about ``part_bytes`` each, named as other tools expect, with an index if there are
    several.
    """
    parts: list[list[str]] = []
    size_bytes = part_bytes
    for name, tensor in tensors.items():
        if not parts or size_bytes + tensor.nbytes > part_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1].append(name)
        size_bytes += tensor.nbytes
    if len(parts) == 1:
        save_file(_copied(parts[0], tensors), folder / f"{stem}.safetensors", {"format": "pt"})
        return
    files: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = f"{stem}-{number:05}-of-{len(parts):05}.safetensors"
        save_file(_copied(names, tensors), folder / file, {"format": "pt"})
        files |= dict.fromkeys(names, file)
    if parts:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": files}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _check(tensors: TensorFiles, own: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` unless names, shapes and dtypes are those of ``own``."""
    for label, names in (("the model has no", tensors.keys() - own.keys()), ("it lacks", own.keys() - tensors.keys())):
        if names:
            raise ValueError(f"{label} {shown(names)}")
    for name, entry in tensors.entries.items():
        mine = own[name]
        if (entry.shape, entry.dtype) != (tuple(mine.shape), mine.dtype):
            raise ValueError(
                f"{name} is {entry.shape} {entry.dtype} in the checkpoint, and {tuple(mine.shape)} {mine.dtype} in the "
                "model"
            )


def shown(names: Collection[str]) -> str:
    """Return up to five of the names, for a message."""
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


def _copied(names: list[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the tensors to host memory one by one, since a page may be emptied while others are fetched."""
    with torch.no_grad():
        return {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
            for name, tensor in ((name, tensors[name]) for name in names)
        }


def _numbered(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return its parameters by the numbers that its ``state_dict`` gives them."""
    return dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))


def _split(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:  # any: numbers
    """Return its parameters that are not the model's, its tensors of state, and the other entries of its states."""
    of_model = {id(parameter) for parameter in model.parameters()}
    own: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for place, parameter in _numbered(optimizer).items():
        if id(parameter) not in of_model:
            own[f"{place}//{_OWN}"] = parameter
        for field, value in optimizer.state.get(parameter, {}).items():
            (tensors if isinstance(value, torch.Tensor) and value.dim() else numbers)[f"{place}//{field}"] = value
    return own, tensors, numbers


def _put_states(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[int, torch.Tensor],
    tensors: TensorFiles,
    numbers: Mapping[str, Any],
    device_of: Callable[[str], torch.device],
) -> None:
    fields: dict[int, list[str]] = {}
    for key in (*tensors, *numbers):
        place, _, field = key.partition("//")
        fields.setdefault(int(place), []).append(field)
    for place, parameter in trained.items():
        known, state = optimizer.state.pop(parameter, {}), {}
        for field in fields.get(place, ()):
            key = f"{place}//{field}"
            value = numbers[key] if key in numbers else tensors[key]
            if field == _OWN:
                parameter.copy_(value)
            elif not isinstance(value, torch.Tensor):
                state[field] = _on(value, device_of(key)) if key in numbers else value
            elif _is_same(known.get(field), value):
                state[field] = known[field].copy_(value)
            else:
                order = parameter.stride() if value.shape == parameter.shape else value.stride()
                empty = torch.empty_strided(value.shape, order, dtype=value.dtype, device=device_of(key))
                state[field] = empty.copy_(value)
        if state:
            optimizer.state[parameter] = state


def _on(value: Any, device: torch.device) -> Any:  # any: numbers, and containers of tensors
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def _is_same(old: Any, value: torch.Tensor) -> bool:  # any: what a state holds
    return isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype)


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    return {backend.device.type: backend.random_state() for backend in map(backend_of, {torch.device("cpu"), device})}


def _put_random_states(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    for backend in map(backend_of, {torch.device("cpu"), device}):
        if backend.device.type in states:
            backend.set_random_state(states[backend.device.type])


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
