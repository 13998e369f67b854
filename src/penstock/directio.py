"""Nameless files and direct I/O: the system calls under the disk tier and under the bandwidth probe.

A spill file has no name (``O_TMPFILE``, else unlinked at once), so that a killed process leaves nothing behind, and
mode 0600. Its I/O goes straight between the disk and the caller's memory (``O_DIRECT``) where the file system allows
it. Address, length and offset of each request are then multiples of ``BLOCK_BYTES``. Where it does not, the same calls
go through the page cache, which is told to drop the pages (``posix_fadvise(DONTNEED)``). A directory may also be main
memory (tmpfs), whose files newer kernels open with ``O_DIRECT`` too: `memory_file_system` tells.

``os.pwritev`` and ``os.preadv`` release the GIL. They reach the rate of the disk with two to four Python threads
(docs/design/disk-io.md has the figures), so that no compiled code is needed here.
"""

import ctypes
import errno
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from penstock.errors import TierDegradedWarning
from penstock.forks import renewed_in_child

BLOCK_BYTES = 4096
"""Alignment of direct requests. 512 is enough for some disks, 4096 for all."""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
"""The kernel's numbers of file systems without a disk (linux/magic.h); devtmpfs has that of tmpfs or of ramfs."""
_OVERLAY = 0x794C7630
_STATFS_BYTES = 256
"""Size of a buffer that exceeds the C structure, whose first word is the number."""


def memory_file_system(directory: str | os.PathLike[str]) -> str:
    """Return the kind of file system if a directory is main memory, such as ``"tmpfs"``; empty for a disk.

    An overlay counts as the directory that takes its writes. Where that cannot be seen, as from inside a container, it
    counts as a disk.
    """
    number = _file_system_number(directory)
    if number == _OVERLAY:
        upper = _upper_directory(os.stat(directory).st_dev)
        number = _file_system_number(upper) if upper is not None else 0
    return _IN_MEMORY.get(number, "")


def warn_of_memory(directories: Iterable[str | os.PathLike[str]], *, stacklevel: int) -> None:
    """Warn once if directories of a disk tier are main memory."""
    kinds = {str(directory): kind for directory in directories if (kind := memory_file_system(directory))}
    if kinds:
        shown = ", ".join(f"{directory} ({kind})" for directory, kind in kinds.items())
        warnings.warn(
            f"`disk` names main memory, not a disk: {shown}. What moves there still takes memory of this machine, and "
            "does not count as written to a disk. Give a directory on an SSD; `penstock probe --disk DIRECTORY` "
            "shows what a directory is on.",
            TierDegradedWarning,
            stacklevel=stacklevel + 1,
        )


def refuse_memory(directories: Iterable[str | os.PathLike[str]]) -> None:
    """Raise ``ValueError`` for directories that are main memory, below a device that is main memory itself."""
    for directory in directories:
        if kind := memory_file_system(directory):
            raise ValueError(
                f"`disk` must be on a disk, got {directory}, which is main memory ({kind}): on a CPU the "
                "device is main memory too, so nothing would leave it. Give a directory on an SSD; "
                "`penstock probe --disk DIRECTORY` shows what a directory is on"
            )


def _file_system_number(directory: str | os.PathLike[str]) -> int:
    """Return the number that ``statfs`` reports; 0 if it fails."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).statfs(os.fsencode(directory), buffer):
        return 0
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def _upper_directory(device: int) -> str | None:
    """Return where the overlay ``device`` keeps what is written, if that can be reached from here."""
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == name:
            options = dict(option.partition("=")[::2] for option in after.split()[-1].split(","))
            return options.get("upperdir")
    return None


class SpillFile:
    """A nameless file in ``directory``, grown in preallocated steps and closed with ``close``.

    Raises ``FileNotFoundError``, ``NotADirectoryError`` or ``PermissionError`` for a directory that cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], *, direct: bool = True):
        self.directory = Path(directory)
        self.size_bytes = 0
        self.is_direct = False
        self.memory_kind = ""
        """Kind of file system if the directory is main memory, such as ``"tmpfs"``; else empty."""
        self._descriptor = -1
        self._descriptor = self._open(direct)
        self._all_open.add(self)

    def __del__(self) -> None:
        self.close()

    @property
    def open_path(self) -> str:
        """A path under which this process can open the nameless file again."""
        return f"/proc/self/fd/{self._descriptor}"

    @property
    def name(self) -> str:
        """The file's name in errors, since it has no path of its own."""
        return f"{self.directory}/<nameless spill file>"

    def grow(self, size_bytes: int) -> None:
        """Preallocate the file up to ``size_bytes``. Raises ``OSError`` (``ENOSPC``) if the disk is full."""
        if size_bytes > self.size_bytes:
            os.posix_fallocate(self._descriptor, self.size_bytes, size_bytes - self.size_bytes)
            self.size_bytes = size_bytes

    def write(self, view: memoryview, offset: int) -> int:
        """Write bytes of ``view`` at ``offset``; return how many, which may be fewer than given."""
        written = os.pwritev(self._descriptor, [view], offset)
        if not self.is_direct:
            os.fdatasync(self._descriptor)  # the page cache cannot drop dirty pages
            os.posix_fadvise(self._descriptor, offset, written, os.POSIX_FADV_DONTNEED)
        return written

    def read(self, view: memoryview, offset: int) -> int:
        """Read into ``view`` from ``offset``; return how many bytes came, 0 at the end of the file."""
        count = os.preadv(self._descriptor, [view], offset)
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def close(self) -> None:
        """Close the file; the system frees its space at once. May be called again."""
        if self._descriptor >= 0:
            self._close(self._descriptor)
            self._descriptor = -1

    _close = staticmethod(os.close)  # when the process ends, files may go after the module's names

    _all_open = renewed_in_child(close)  # otherwise the parent's disk space would be freed only when the child ends

    def _open(self, direct: bool) -> int:
        if not self.directory.exists():
            raise FileNotFoundError(
                f"the spill directory {self.directory} does not exist. Create it first (mkdir -p {self.directory}), "
                "on the SSD that should hold the bytes."
            )
        if not self.directory.is_dir():
            raise NotADirectoryError(f"{self.directory} is a file; give a directory")
        self.memory_kind = memory_file_system(self.directory)
        # newer kernels open files of tmpfs with O_DIRECT too, although there is no disk to reach directly
        for flag in (os.O_DIRECT, 0) if direct and not self.memory_kind else (0,):
            try:
                descriptor = self._open_nameless(flag)
            except PermissionError as error:
                raise PermissionError(
                    f"no permission to write in the spill directory {self.directory}; give one that this user owns"
                ) from error
            except OSError as error:
                if flag and error.errno in _NO_DIRECT:
                    continue
                raise OSError(
                    error.errno,
                    f"no file can be made in the spill directory {self.directory} ({error.strerror}); give a directory "
                    "on an SSD",
                ) from error
            self.is_direct = bool(flag)
            return descriptor
        raise AssertionError("unreachable: the last flag either opens or raises")

    def _open_nameless(self, flag: int) -> int:
        try:
            return os.open(self.directory, os.O_TMPFILE | os.O_RDWR | flag, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        descriptor, path = tempfile.mkstemp(prefix=".penstock-", dir=self.directory)  # mkstemp uses mode 0600
        try:
            return os.open(path, os.O_RDWR | flag)
        finally:
            os.close(descriptor)
            os.unlink(path)


class DeviceFile:
    """A spill file that a CUDA device reads and writes itself, by GPUDirect Storage (``torch.cuda.gds``).

    Calls block until the bytes are there, and ignore streams: whatever produced the bytes, or used the memory before,
    must have finished. Raises ``RuntimeError`` or ``OSError`` if the machine cannot do it; use
    ``penstock.probe.gpu_direct_storage`` to find out.
    """

    def __init__(self, spill: SpillFile):
        self._file: torch.cuda.gds.GdsFile | None = torch.cuda.gds.GdsFile(spill.open_path, os.O_RDWR)
        self._all_open.add(self)

    def write(self, storage: torch.UntypedStorage, offset: int) -> None:
        """Write all bytes of a device storage at ``offset``."""
        with torch.cuda.device(storage.device):
            self._opened().save_storage(storage, offset)  # type: ignore[arg-type]

    def read(self, storage: torch.UntypedStorage, offset: int) -> None:
        """Fill a device storage from ``offset``."""
        with torch.cuda.device(storage.device):
            self._opened().load_storage(storage, offset)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file = None  # its own finalizer deregisters and closes it

    def _opened(self) -> torch.cuda.gds.GdsFile:
        if self._file is None:
            raise OSError(errno.EBADF, "the file is closed")
        return self._file

    def _let_go_in_child(self) -> None:
        if self._file is not None:  # the finalizer closes this descriptor, so it must stay open for something
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), self._file.fd, inheritable=False)

    _all_open = renewed_in_child(_let_go_in_child)
