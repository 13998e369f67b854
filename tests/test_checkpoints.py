"""What the error for files that could not be written says. Writing and reading them is tested in fleet and offload."""

import errno

import pytest
from safetensors import SafetensorError

from penstock.checkpoints import unwritable

ERRORS = {
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), "Free some space"),
    "a full disk, said by safetensors": (SafetensorError("I/O error: No space left (os error 28)"), "Free some space"),
    "a directory of somebody else": (PermissionError(errno.EACCES, "Permission denied"), "may write there"),
    "a state that JSON cannot hold": (TypeError("a checkpoint cannot hold a socket"), "may keep tensors, numbers"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_advice_follows_the_error(name):
    error, advice = ERRORS[name]
    refusal = unwritable("no checkpoint could be written to /runs/1", error, "the last one is untouched")
    assert str(error) in str(refusal) and advice in str(refusal)
    assert str(refusal).startswith("no checkpoint could be written to /runs/1: ")
    assert str(refusal).endswith("; the last one is untouched")
    assert [advice for advice in {text for _, text in ERRORS.values()} if advice in str(refusal)] == [advice]
