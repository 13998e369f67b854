"""Checkpoint folders of safetensors and JSON, which appear as a whole or not at all.

A folder is written under another name, with a checksum of each of its files, synchronized and renamed. Nothing is ever
unpickled.
"""

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from penstock.errors import CheckpointError
from penstock.files import check_is_file, read_json

__all__ = ["DAMAGE", "check_whole", "decode", "drafted", "encode", "synchronize", "unusable", "unwritable"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHECKSUMS = "checksums.json"
_CHUNK_BYTES = 2**20
_BEFORE = "Delete that folder to continue from the checkpoint before it, or use another run_dir"
DAMAGE = (
    OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError, StopIteration,
    SafetensorError, CheckpointError,
)  # fmt: skip
"""Exceptions that damaged files may cause."""


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """Yield a folder to write into, which then becomes ``target`` as a whole; an older ``target`` is replaced.

    Other files that somebody has put into the older folder are copied to the new one. If the block raises, everything
    in the new folder is removed, and the older one is untouched.
    """
    draft, old = (target.parent / f".{target.name}.{suffix}" for suffix in ("draft", "old"))
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
    draft.mkdir(parents=True)
    try:
        yield draft
        checksums = json.dumps({path.name: _checksum(path) for path in sorted(draft.iterdir())})
        (draft / _CHECKSUMS).write_text(checksums)
        _keep_others(target, draft)
        for path in draft.iterdir():
            synchronize(path)
        synchronize(draft)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        draft.rename(target)
        synchronize(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _keep_others(older: Path, draft: Path) -> None:
    """Copy files that the older folder's checksums do not name. Without checksums it has none."""
    try:
        noted = read_json(older / _CHECKSUMS)
    except (OSError, ValueError):
        return
    for path in older.iterdir():
        if path.name != _CHECKSUMS and path.name not in noted and not (draft / path.name).exists():
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, draft / path.name)


def check_whole(path: Path, hint: str = _BEFORE) -> None:
    """Compare the checksums of all files of a folder. Raises ``CheckpointError``; old folders have no checksums."""
    try:
        if not path.is_dir():
            raise FileNotFoundError("the folder no longer exists")
        if not (path / _CHECKSUMS).exists():
            return
        noted = read_json(path / _CHECKSUMS)
        files = {file.name: file for file in path.iterdir() if file.name != _CHECKSUMS}
        if not isinstance(noted, dict) or not noted.keys() <= files.keys():
            raise ValueError("some of its files are missing")
        for name, checksum in noted.items():
            if _checksum(files[name]) != checksum:
                raise ValueError(f"{name} differs from what was written")
    except DAMAGE as error:
        raise unusable(path, error, hint) from error


def unusable(path: Path, error: BaseException, hint: str = _BEFORE) -> CheckpointError:
    """Return the error for a folder that cannot be used."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"the checkpoint {path} cannot be used: {error}. {hint}")


def unwritable(what: str, error: BaseException, rest: str = "") -> CheckpointError:
    """Return the error for files that could not be written: what happened, what to do about it, and ``rest``."""
    is_full = getattr(error, "errno", None) in _FULL or any(f"os error {number})" in str(error) for number in _FULL)
    if is_full:
        advice = "Free some space there"
    elif isinstance(error, TypeError):
        advice = "Optimizers and schedulers may keep tensors, numbers, text, and lists and dicts of them"
    else:
        advice = "Check that this process may write there, or give another directory"
    return CheckpointError("; ".join([f"{what}: {error}. {advice}", *([rest] if rest else [])]))


def synchronize(path: Path) -> None:
    """Wait until a file or folder would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode(
    value: Any, store: Callable[[torch.Tensor], str | None] | None = None
) -> Any:  # any: what optimizers and schedulers keep, and JSON
    """Return a value in a form that JSON can hold. Raises ``TypeError``, which names what cannot be held.

    ``store`` may keep a tensor elsewhere. It returns the name by which `decode` asks for the tensor, or ``None`` if it
    does not keep it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), store)
    if isinstance(value, torch.Tensor):
        name = None if store is None else store(value)
        if name is not None:
            return {"": "stored", "name": name}
        return {"": "tensor", "dtype": str(value.dtype), "shape": list(value.shape), "values": value.flatten().tolist()}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return {"": kind, "items": [encode(item, store) for item in value]}
    if hasattr(value, "items"):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {"": kind, "items": [[encode(key, store), encode(item, store)] for key, item in value.items()]}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r}")


def decode(value: Any, stored: Mapping[str, torch.Tensor] | None = None) -> Any:  # any: as above
    """Return the value that `encode` was given; ``stored`` has the tensors that were kept elsewhere."""
    if not isinstance(value, dict):
        return value
    kind = value[""]
    if kind == "stored":
        return (stored or {})[value["name"]]
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"].removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']!r} is not a dtype")
        return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
    if kind in ("dict", "Counter"):
        mapping = {decode(key, stored): decode(item, stored) for key, item in value["items"]}
        return Counter(mapping) if kind == "Counter" else mapping
    items = [decode(item, stored) for item in value["items"]]
    return tuple(items) if kind == "tuple" else items


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    check_is_file(path)
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
