"""Small files that somebody may have changed: pipes, folders, and text that is no JSON."""

import os

import pytest

from penstock import remat, unified
from penstock.cli._sweep import read_sweep
from penstock.files import check_is_file, parse_json, read_json, read_text
from penstock.relational import RelationalGraph, read_id_file, read_ntriples


def test_what_is_no_file_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    readers = (
        check_is_file, read_text, read_json, remat.RematProblem.load, RelationalGraph.load, read_ntriples, read_id_file,
        unified.from_file, unified.TieredFeatures, unified.check, read_sweep,
    )  # fmt: skip
    for reader in readers:
        with pytest.raises(ValueError, match="pipe must be a file, not a pipe, a socket or a device"):
            reader(pipe)
    for reader in readers:
        with pytest.raises(IsADirectoryError, match=str(tmp_path)):
            reader(tmp_path)


@pytest.mark.parametrize("raw", [b"\xff\xfe{}", b"[" * 100_000, b"9" * 5000, b"", b"{'a': 1}"])
def test_text_that_is_no_json(tmp_path, raw):
    path = tmp_path / "x.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x\.json") as caught:
        read_json(path)
    assert type(caught.value) is ValueError
    assert parse_json("[1]", "nothing") == [1]
