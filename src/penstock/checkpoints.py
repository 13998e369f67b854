"""Folders of safetensors and JSON that appear whole or not at all.

A folder is written under another name, with a checksum of each of its files, synchronised and renamed. Nothing is
unpickled, ever.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from penstock.errors import CheckpointError
from penstock.files import check_is_file, read_json

__all__ = ["DAMAGE", "check_whole", "decode", "drafted", "encode", "synchronize", "unusable"]

_CHECKSUMS = "checksums.json"
_CHUNK_BYTES = 2**20
DAMAGE = (
    OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError, StopIteration,
    SafetensorError, CheckpointError,
)  # fmt: skip
"""What damaged files may raise."""


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """A folder to write into, which is ``target`` afterwards, whole; an older ``target`` is replaced.

    Where the body raises, nothing of it is left and the older one is untouched.
    """
    draft, old = (target.parent / f".{target.name}.{suffix}" for suffix in ("draft", "old"))
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    draft.mkdir(parents=True)
    try:
        yield draft
        checksums = json.dumps({path.name: _checksum(path) for path in sorted(draft.iterdir())})
        (draft / _CHECKSUMS).write_text(checksums)
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


def check_whole(path: Path) -> None:
    """Compare the checksums of all files of a folder. Raises ``CheckpointError``; older ones have none."""
    try:
        if not (path / _CHECKSUMS).exists():
            return
        noted = read_json(path / _CHECKSUMS)
        found = {one.name: one for one in path.iterdir() if one.name != _CHECKSUMS}
        if not isinstance(noted, dict) or noted.keys() != found.keys():
            raise ValueError("its files are not those that were written")
        for name, one in found.items():
            if _checksum(one) != noted[name]:
                raise ValueError(f"{name} is not what was written")
    except DAMAGE as error:
        raise unusable(path, error) from error


def unusable(path: Path, error: BaseException) -> CheckpointError:
    """What to raise for a folder that cannot be used."""
    return CheckpointError(
        f"the checkpoint {path} cannot be used: {error}. Delete that folder to begin from the one before, or use "
        "another run_dir"
    )


def synchronize(path: Path) -> None:
    """Waits until a file or folder would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode(value: Any) -> Any:  # any: what optimizers and schedulers keep, and JSON
    """As JSON can hold it. Raises ``TypeError`` naming what cannot be held."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {"": "tensor", "dtype": str(value.dtype), "shape": list(value.shape), "values": value.flatten().tolist()}
    if isinstance(value, tuple | list):
        return {"": type(value).__name__, "items": [encode(one) for one in value]}
    if hasattr(value, "items"):
        return {"": "dict", "items": [[encode(key), encode(one)] for key, one in value.items()]}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r}")


def decode(value: Any) -> Any:  # any: as above
    """What `encode` was given."""
    if not isinstance(value, dict):
        return value
    kind = value[""]
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"].removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']!r} is no dtype")
        return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
    if kind == "dict":
        return {decode(key): decode(one) for key, one in value["items"]}
    items = [decode(one) for one in value["items"]]
    return tuple(items) if kind == "tuple" else items


def _checksum(path: Path) -> int:
    """CRC-32 of a file."""
    check_is_file(path)
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return found
