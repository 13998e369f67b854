"""Loading weights from files into a model that is still on the ``meta`` device, one tensor at a time."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from penstock.arguments import checked, must_be
from penstock.devices import backend_of, used_device
from penstock.errors import CheckpointError
from penstock.files import read_json
from penstock.tensorfiles import TensorFiles
from penstock.training._checkpoint import shown

_CALL = "penstock.offload.load(model, 'llama/model.safetensors')"
_Model = TypeVar("_Model", bound=nn.Module)


@checked(_CALL)
def load(
    model: _Model,
    path: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    strict: bool = True,
) -> _Model:
    """Give a model that was made on the ``meta`` device its values, one tensor at a time; return it.

    Inside the function that `training` is given, loaded tensors leave the device as more come, so that neither the
    device nor main memory ever holds the whole model:

    >>> def model():  # doctest: +SKIP
    ...     with torch.device("meta"):
    ...         made = Llama(config)
    ...     return penstock.offload.load(made, "llama/")
    >>> training = penstock.offload.training(model, AdamW, budget="22GiB", disk="/nvme")  # doctest: +SKIP

    Values are cast to the dtype that the model has. Tied parameters stay tied; one of their names in the files is
    enough.

    Args:
        model: any module; parameters and buffers that are not on ``meta`` keep their places and are filled.
        path: a .safetensors file, or a folder with several, with or without an index, as on the Hugging Face Hub.
            ``None``: each module initializes itself (``reset_parameters``, or the ``_init_weights`` of transformers).
        device: where the values go; by default the accelerator that this process uses, else the CPU.
        strict: raise an error if the files lack a tensor of the model, or have one that the model lacks. Otherwise
            modules whose tensors are missing initialize themselves, and superfluous tensors are ignored.

    Raises ``FileNotFoundError`` if there is no such file, ``CheckpointError`` for damaged files and for names or shapes
    that differ, and ``ValueError`` for a module that has no values and cannot initialize itself.
    """
    if not isinstance(model, nn.Module):
        raise must_be("model", "a torch.nn.Module, made inside of torch.device('meta')", model, _CALL)
    where = used_device() if device is None else backend_of(device).device
    try:
        files = TensorFiles([]) if path is None else _opened(Path(path))
        tensors = list(_tensors(model))
        known = [next((name for name in names if name in files), None) for names, _, _ in tensors]
        _check(tensors, known, files, hint=_hint(model), strict=strict and path is not None)
        placed: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            _initialise(model, tensors, known, where, placed)
            for (_, tensor, owners), name in zip(tensors, known, strict=True):
                if name is not None:
                    _place(tensor, owners, where, placed).copy_(files[name])
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return model


def _opened(path: Path) -> TensorFiles:
    try:
        return TensorFiles(_files(path))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


_Owners = list[tuple[nn.Module, str]]
_Tensor = tuple[list[str], torch.Tensor, _Owners]
"""All names of a parameter or buffer, the tensor, and the modules that have it. Buffers not in ``state_dict`` have no
name.
"""


def _tensors(model: nn.Module) -> Iterator[_Tensor]:
    by_identity: dict[int, _Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            names, _, owners = by_identity.setdefault(id(tensor), ([], tensor, []))
            owners.append((module, name))
            if name not in module._non_persistent_buffers_set:
                names.append(f"{prefix}.{name}" if prefix else name)
    yield from by_identity.values()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"`path` must be a .safetensors file or a folder of them, got {path}. Convert a file of another kind "
                "with safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
            )
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            return [path / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there is no .safetensors file in {path}: {_CALL}")
    return files


def _hint(model: nn.Module) -> str:
    if hasattr(model, "_init_weights") and hasattr(model, "config"):
        return (
            "transformers may store tensors of this model under other names or in other shapes, which from_pretrained "
            "converts: penstock.offload.training(lambda: Model.from_pretrained(path), ...)"
        )
    return "load(model, path, strict=False) loads the tensors that both have"


def _check(tensors: list[_Tensor], known: list[str | None], files: TensorFiles, *, hint: str, strict: bool) -> None:
    if strict:
        missing = [names[0] for (names, _, _), name in zip(tensors, known, strict=True) if names and name is None]
        surplus = [*files.keys() - {name for names, _, _ in tensors for name in names}]
        for label, names in (("the files lack", missing), ("the model has no", surplus)):
            if names:
                raise CheckpointError(f"{label} {shown(names)}; {hint}")
    for (_, tensor, _), name in zip(tensors, known, strict=True):
        if name is not None and files.entries[name].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} is {files.entries[name].shape} in the file, and {tuple(tensor.shape)} in the model"
            )


def _place(
    tensor: torch.Tensor, owners: _Owners, device: torch.device, placed: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Return the tensor to fill; give one on ``meta`` memory, and replace it in all modules that have it."""
    if not tensor.is_meta:
        return tensor
    if id(tensor) not in placed:
        is_expanded = any(size > 1 and not step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
        order = torch.empty(tensor.shape, device="meta").stride() if is_expanded else tensor.stride()
        result = torch.empty_strided(tensor.size(), order, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            result = nn.Parameter(result, requires_grad=tensor.requires_grad)
        result.__dict__.update(tensor.__dict__)
        placed[id(tensor)] = result
        for module, name in owners:
            (module._parameters if name in module._parameters else module._buffers)[name] = result  # type: ignore[assignment]
    return placed[id(tensor)]


def _initialise(
    model: nn.Module,
    tensors: list[_Tensor],
    known: list[str | None],
    device: torch.device,
    placed: dict[int, torch.Tensor],
) -> None:
    """Let modules initialize the tensors that the files lack, one module after the other.

    The files' values are written afterwards.
    """
    owners_of = {id(tensor): owners for _, tensor, owners in tensors}
    lacking = [tensor for tensor, name in zip(tensors, known, strict=True) if name is None and tensor[1].is_meta]
    for module in dict.fromkeys(owner for _, _, owners in lacking for owner, _ in owners):
        fields = {field: tensor for _, tensor, owners in lacking for owner, field in owners if owner is module}
        for tensor in _own_tensors(module):
            if tensor.is_meta:
                _place(tensor, owners_of[id(tensor)], device, placed)
        for tensor in fields.values():
            placed[id(tensor)].fill_(_mark(tensor.dtype))
        new = set(map(id, placed.values()))
        kept = [(tensor, tensor.clone()) for tensor in _own_tensors(module) if id(tensor) not in new]
        for initialise in _initialisers(model, module):
            initialise()
            for tensor, before in kept:
                tensor.copy_(before)  # values from before the call are kept
            fields = {field: value for field, value in fields.items() if _is_marked(placed[id(value)])}
            if not fields:
                break
        if fields:
            name = next(name for name, other in model.named_modules() if other is module)
            raise ValueError(
                f"{name or type(module).__name__} ({type(module).__name__}) has no values for {', '.join(fields)}, and "
                "no reset_parameters() that initializes them. Create the model, or at least its buffers, outside of "
                "torch.device('meta'): with accelerate.init_empty_weights(): ..."
            )


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _initialisers(model: nn.Module, module: nn.Module) -> Iterator[Callable[[], object]]:
    of_model, own = getattr(model, "_init_weights", None), getattr(module, "reset_parameters", None)
    if of_model is not None:
        yield lambda: of_model(module)
    if own is not None:
        yield own


def _mark(dtype: torch.dtype) -> float:
    """Return the value that marks elements which nothing has been written to."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _is_marked(tensor: torch.Tensor) -> bool:
    mark = _mark(tensor.dtype)
    if tensor.dtype is torch.bool:
        return not bool(tensor.any())
    return bool((tensor.isnan() if math.isnan(mark) else tensor == mark).any())
