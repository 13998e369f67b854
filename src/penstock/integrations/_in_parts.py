"""Saving by the Trainer, a part at a time, for a model whose parameters are not on the device."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.offload import Training
from penstock.storages import storage_id


@contextlib.contextmanager
def saving_in_parts(model: nn.Module, training: Training) -> Iterator[None]:
    """Make ``model.save_pretrained`` keep the budget inside the block, as ``torch.save`` always does.

    For a model with adapters only the adapters are saved, and they are on the device meanwhile. A model whose files
    have other tensors than itself (such as experts that are one parameter in memory) is on the device as a whole.
    """
    from transformers import PreTrainedModel

    if hasattr(model, "peft_config"):
        with training.whole(nn.ParameterList(_adapted(model))):
            yield
    elif isinstance(model, PreTrainedModel) and not _is_stored_otherwise(model):
        save = model.save_pretrained
        model.save_pretrained = functools.partial(_save_pretrained, model, training, save)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del model.save_pretrained
    else:
        with training.whole():
            yield


def _adapted(model: Any) -> list[nn.Parameter]:
    """Return the parameters that the files of the adapters hold: all adapters, and the base layers that they change."""
    from peft import get_peft_model_state_dict

    wanted = {
        storage_id(tensor)
        for name in model.peft_config
        for tensor in get_peft_model_state_dict(model, adapter_name=name).values()
    }
    return [parameter for parameter in model.parameters() if parameter.requires_grad or storage_id(parameter) in wanted]


def _save_pretrained(model: Any, training: Training, save: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """Save the model's configuration and code by ``save``, and its tensors by the training."""
    save(path, **{**options, "state_dict": {}})  # its file of weights has no tensors, and is replaced below
    if not options.get("is_main_process", True):
        return
    for old in Path(path).glob("model*.safetensors*"):
        old.unlink()
    training.save_weights(path, names=_saved_names(model))


def _saved_names(model: Any) -> set[str]:
    """Return the names that its own ``save_pretrained`` would store; of tied parameters, the one others are tied to."""
    ignored = set(model._keys_to_ignore_on_save or ())
    tied = set(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ())
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in ignored:
            names.setdefault(id(tensor), []).append(name)
    return {next((name for name in same if name not in tied), same[0]) for same in names.values()}


def _is_stored_otherwise(model: Any) -> bool:
    """Return whether its files have other names or tensors than its ``state_dict``."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5
        return False
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    own = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    stored = revert_weight_conversion(model, dict(own))
    return stored.keys() != own.keys() or any(stored[name].shape != tensor.shape for name, tensor in own.items())
