"""Errors of transfers: what they carry, and that they travel."""

import errno
import pickle

import pytest

from penstock import errors

WHERE = {"tier": "disk", "file": "/nvme/<nameless spill file>", "offset": 4096, "size_bytes": 8192, "reason": "broken"}


@pytest.mark.parametrize("kind", [errors.TierReadError, errors.TierWriteError])
@pytest.mark.parametrize("code", [errno.EIO, None])
def test_a_transfer_error_carries_what_it_says(kind, code):
    error = kind(**WHERE, errno=code)
    assert (error.tier, error.file, error.offset, error.size_bytes) == tuple(WHERE.values())[:4]
    assert error.errno == code
    assert isinstance(error, OSError)
    assert all(part in str(error) for part in ("'disk'", "/nvme/", "4096", "8192", "broken"))


@pytest.mark.parametrize("kind", [errors.TierReadError, errors.TierWriteError])
@pytest.mark.parametrize("code", [errno.EIO, None])
def test_a_transfer_error_travels_between_processes(kind, code):
    """As it must from a data loader's worker, or in Ray."""
    error = kind(**WHERE, errno=code)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == str(error)
    assert (copied.tier, copied.offset, copied.errno) == (error.tier, error.offset, code)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_name_is_an_error_or_a_warning_of_ours(name):
    base = errors.PenstockWarning if name.endswith("Warning") else errors.PenstockError
    assert issubclass(getattr(errors, name), base)
    assert getattr(errors, name).__doc__
