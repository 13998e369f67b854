"""Nameless files: what they leave behind, who may read them, and what happens without O_DIRECT."""

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import directio
from penstock.directio import BLOCK_BYTES, SpillFile, memory_file_system

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CHILD = """
import os, sys
from penstock.directio import SpillFile
spill = SpillFile(sys.argv[1])
spill.grow(2**20)
spill.is_direct or spill.write(memoryview(bytes(2**20)), 0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spill(tmp_path):
    spill = SpillFile(tmp_path)
    yield spill
    spill.close()


def page(fill=b""):
    memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
    memory[: len(fill)] = fill
    return memory


def refuse(monkeypatch, refused_flags, code):
    """Lets the system refuse to open with any of these flags, as some file systems do."""
    real = os.open

    def opened(path, flags, *args, **kwargs):
        if any(flags & flag == flag for flag in refused_flags):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr("penstock.directio.os.open", opened)


def round_trip(spill):
    spill.grow(4 * BLOCK_BYTES)
    written, read = page(b"penstock" * 1024), page()
    assert spill.write(written, BLOCK_BYTES) == 2 * BLOCK_BYTES
    assert spill.read(read, BLOCK_BYTES) == 2 * BLOCK_BYTES
    assert bytes(read) == bytes(written)


@pytest.mark.parametrize("direct", [True, False])
def test_bytes_come_back(tmp_path, direct):
    spill = SpillFile(tmp_path, direct=direct)
    round_trip(spill)
    spill.close()


def test_the_file_has_no_name(spill, tmp_path):
    round_trip(spill)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in spill.name


def test_nobody_else_may_read_it(spill):
    mode = os.fstat(spill._descriptor).st_mode
    assert stat.S_ISREG(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_growing_takes_the_space_at_once_and_never_shrinks(spill):
    spill.grow(10 * BLOCK_BYTES)
    spill.grow(3 * BLOCK_BYTES)
    status = os.fstat(spill._descriptor)
    assert spill.size_bytes == status.st_size == 10 * BLOCK_BYTES
    assert status.st_blocks * 512 >= 10 * BLOCK_BYTES


def test_reading_past_the_end_brings_nothing(spill):
    spill.grow(BLOCK_BYTES)
    assert spill.read(page(), 4 * BLOCK_BYTES) == 0


def test_a_full_disk_says_so(spill, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.directio.os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space") as caught:
        spill.grow(BLOCK_BYTES)
    assert caught.value.errno == errno.ENOSPC
    assert spill.size_bytes == 0


def test_closing_twice_is_fine(spill):
    descriptor = spill._descriptor
    spill.close()
    spill.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_unknown_directory_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"mkdir -p {tmp_path}/nowhere"):
        SpillFile(tmp_path / "nowhere")


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file"):
        SpillFile(tmp_path / "file")


def test_no_permission_is_explained(tmp_path, monkeypatch):
    refuse(monkeypatch, [0], errno.EACCES)
    with pytest.raises(PermissionError, match=f"no permission to write in the spill directory {tmp_path}"):
        SpillFile(tmp_path)


def test_other_errors_pass_through(tmp_path, monkeypatch):
    refuse(monkeypatch, [0], errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files") as caught:
        SpillFile(tmp_path)
    assert caught.value.errno == errno.EMFILE


def test_without_direct_io_it_is_buffered(tmp_path, monkeypatch):
    refuse(monkeypatch, [os.O_DIRECT], errno.EINVAL)
    spill = SpillFile(tmp_path)
    assert not spill.is_direct
    round_trip(spill)
    assert list(tmp_path.iterdir()) == []
    spill.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR])
def test_without_nameless_files_the_name_is_gone_at_once(tmp_path, monkeypatch, code):
    refuse(monkeypatch, [os.O_TMPFILE], code)
    spill = SpillFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(spill._descriptor).st_mode) == 0o600
    round_trip(spill)
    spill.close()


def test_without_either_nothing_is_left_behind(tmp_path, monkeypatch):
    refuse(monkeypatch, [os.O_TMPFILE, os.O_DIRECT], errno.EINVAL)
    spill = SpillFile(tmp_path)
    assert not spill.is_direct
    assert list(tmp_path.iterdir()) == []
    spill.close()


def test_a_buffered_write_takes_any_length_and_address(tmp_path):
    spill = SpillFile(tmp_path, direct=False)
    spill.grow(BLOCK_BYTES)
    target = bytearray(9)
    assert spill.write(memoryview(b"nine byte"), 1) == 9
    assert spill.read(memoryview(target), 1) == 9
    assert target == b"nine byte"
    spill.close()


def test_a_killed_process_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_hold_the_space(spill):
    """The parent's file is closed in the child, and goes on working in the parent."""
    descriptor = spill._descriptor
    child = os.fork()
    if not child:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0 if spill._descriptor == -1 else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    round_trip(spill)


def test_a_file_that_is_forgotten_gives_its_space_back(tmp_path, collected):
    spill = SpillFile(tmp_path)
    descriptor = spill._descriptor
    inode = os.fstat(descriptor).st_ino
    del spill
    try:
        left = os.fstat(descriptor).st_ino
    except OSError:
        return
    if left == inode:
        os.close(descriptor)
    assert left != inode, "the descriptor, and with it the disk space, outlived its file"


SHARED = "/dev/shm"
needs_shared = pytest.mark.skipif(not Path(SHARED).is_dir(), reason="no /dev/shm on this machine")


@needs_shared
def test_memory_is_told_from_a_disk(tmp_path):
    assert memory_file_system(SHARED) == "tmpfs"
    assert memory_file_system(tmp_path) == ""
    assert memory_file_system(tmp_path / "missing") == ""


@needs_shared
@pytest.mark.parametrize(
    "number, kind", [(0x01021994, "tmpfs"), (0x858458F6, "ramfs"), (0x958458F6, "hugetlbfs"), (0xEF53, ""), (0, "")]
)
def test_kinds_are_known_by_the_kernels_numbers(monkeypatch, tmp_path, number, kind):
    monkeypatch.setattr(directio, "_file_system_number", lambda _: number)
    assert memory_file_system(tmp_path) == kind


@needs_shared
@pytest.mark.parametrize("upper, kind", [(SHARED, "tmpfs"), (None, ""), ("/not/reachable/from/here", "")])
def test_an_overlay_is_what_takes_its_writes(monkeypatch, tmp_path, upper, kind):
    told = directio._file_system_number
    monkeypatch.setattr(
        directio, "_file_system_number", lambda path: directio._OVERLAY if path == tmp_path else told(path)
    )
    monkeypatch.setattr(directio, "_upper_directory", lambda _: upper)
    assert memory_file_system(tmp_path) == kind


@needs_shared
def test_the_upper_directory_is_read_from_the_mounts(monkeypatch):
    lines = (
        "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "40 27 0:33 / /mnt rw shared:2 master:1 - overlay overlay rw,lowerdir=/a:/b,upperdir=/c=d/upper,workdir=/w\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda _: lines)
    assert directio._upper_directory(os.makedev(0, 33)) == "/c=d/upper"
    assert directio._upper_directory(os.makedev(254, 0)) is None
    assert directio._upper_directory(os.makedev(9, 9)) is None


@needs_shared
def test_a_file_in_memory_is_no_direct_io():
    spill = SpillFile(SHARED)
    assert (spill.memory_kind, spill.is_direct) == ("tmpfs", False)
    spill.close()


AT_EXIT = """
import sys
from penstock.directio import SpillFile
from penstock.tiers import DiskTier
sys.kept = SpillFile(sys.argv[1]), DiskTier(sys.argv[1])  # freed when the modules' names are gone
"""


def test_files_that_live_until_the_end_end_without_a_word(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", AT_EXIT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""


def test_a_file_that_could_not_be_made_ends_without_a_word(tmp_path, recwarn):
    with pytest.raises(TypeError):
        SpillFile(3)
    assert not recwarn.list
