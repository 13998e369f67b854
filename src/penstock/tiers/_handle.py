"""The receipt for a storage that was put into a tier."""

from typing import TYPE_CHECKING

import torch

from penstock.arguments import must_be
from penstock.tiers._host_work import HostWork, Settling
from penstock.tiers._record import HandleState, Record

if TYPE_CHECKING:
    from penstock.tiers._traffic import Traffic


class Handle:
    """The receipt for a storage that was put into a tier by ``Waterfall.park``.

    ``finish_out()`` waits for the copy out, ``prefetch()`` starts the copy back, ``get()`` returns the storage, and
    ``release()`` gives its space back. A handle that is garbage-collected is released. ``release`` may be called from
    any thread; all other methods belong to the computing thread, because it owns the memory that they allocate.
    """

    __slots__ = (
        "__weakref__",
        "_traffic",
        "address_remainder",
        "data_pointer",
        "label",
        "record",
        "size_bytes",
    )

    def __init__(self, traffic: "Traffic", storage: torch.UntypedStorage, label: str):
        self.size_bytes = storage.nbytes()
        self.label = label
        self.data_pointer = storage.data_ptr()
        self.address_remainder = self.data_pointer % 4096
        self.record = Record(storage)
        """Where the bytes are. It is the engine's own: read ``state``, ``is_settled`` and ``is_in_memory``."""
        self._traffic = traffic

    def __repr__(self) -> str:
        return f"<Handle {self.label!r} {self.size_bytes} bytes {self.record.state.value}>"

    def __del__(self) -> None:
        if hasattr(self, "record") and self.record.state is not HandleState.RELEASED:
            self._traffic.abandon(self)

    @property
    def state(self) -> HandleState:
        """Where the bytes are now."""
        return self.record.state

    @property
    def is_settled(self) -> bool:
        """Whether the bytes are in a tier and no copy touches them, so that ``Waterfall.borrow`` accepts the handle."""
        record = self.record
        return record.state is HandleState.PARKED and not record.num_moving and not record.missed_its_tier

    @property
    def is_in_memory(self) -> bool:
        """Whether the bytes are in host memory, or being copied there, to stay."""
        room = self.record.room
        is_there = self.record.state in (HandleState.LEAVING, HandleState.PARKED, HandleState.ARRIVING)
        return is_there and room is not None and room.tier.is_memory and not self.record.missed_its_tier

    @property
    def keeps_room(self) -> bool:
        """Whether `Waterfall.park` can put later bytes of the same storage into the space of these."""
        room = self.record.room
        is_there = self.record.state is HandleState.PARKED and room is not None and room.tier.is_memory
        return is_there and self._traffic.can_overwrite

    def host_tensor(self) -> torch.Tensor:
        """Return the bytes as a ``uint8`` tensor, without a copy. The handle must be settled and in host memory.

        Writing to it changes what ``get`` returns (`before_host_write`). It is valid as long as the handle.
        """
        if not self.is_settled:
            raise ValueError(f"the handle must be settled and in host memory, got {self!r}")
        return self.host_memory()

    def host_memory(self) -> torch.Tensor:
        """Return the same while copies may still touch the bytes (`settling`)."""
        room = self.record.room
        if room is None or not self.is_in_memory:
            raise ValueError(f"the handle must be settled and in host memory, got {self!r}")
        return room.tier.tensor(room.extent)[: self.size_bytes]

    def settling(self) -> Settling:
        """Return the copies that touch the bytes in host memory now. Any thread may wait for their end."""
        return self._traffic.settling(self)

    def before_host_write(self) -> None:
        """Let ``get`` copy the bytes in even if somebody still holds the storage as it was."""
        self._traffic.handles.renew(self)

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether somebody else still holds the storage as it was parked, so that parking it frees no memory."""
        return self.record.storage is None and self.record.alive(self.size_bytes) is not None

    @property
    def device_storage(self) -> torch.UntypedStorage | None:
        """The storage, while the handle itself holds it: kept, or being copied in either direction."""
        with self._traffic.handles.lock:
            return self.record.storage

    def finish_out(self) -> None:
        """Wait for the end of the copy out and drop the device copy. Call it when the computation needs the memory."""
        self._traffic.finish_out(self)

    def let_go(self) -> None:
        """Drop the device copy before the copy out has ended. Whoever gets its memory waits for the copy.

        On an accelerator the host does not wait. The bytes are then parked, and ``prefetch`` waits for the copy, too.
        """
        self._traffic.let_go(self)

    def prefetch(self, into: torch.UntypedStorage | None = None, *, after: HostWork | None = None) -> bool:
        """Start the copy back to the device, or keep bytes that are still being copied out.

        ``into`` is a storage of 0 bytes, such as the one that was parked. It is resized and filled if the bytes can be
        read into it directly. The copy begins when ``after`` has ended, which writes to the bytes in host memory; only
        `get` waits for it.

        Returns whether the bytes are on the device or being copied to it. ``False`` means that the device had no memory
        for them; ``get`` will try again.
        """
        return self._traffic.prefetch(self, _storage_or_none(into), after)

    def get(self, into: torch.UntypedStorage | None = None) -> torch.UntypedStorage:
        """Return the storage, byte for byte, after waiting for its copy if needed.

        The bytes stay in the tier until ``release``. ``into`` works as in ``prefetch``; the storage returned may still
        be another one.

        The handle keeps only a weak reference to the storage returned, so its memory is freed when the caller drops it.
        A second ``get`` before that returns the same storage. Raises ``TierReadError`` if the bytes could not be read
        back, and ``ValueError`` after ``release``.
        """
        return self._traffic.get(self, _storage_or_none(into))

    def before_write(self) -> None:
        """Make the device wait for a copy out that still reads the storage. Call it before you write to the storage.

        The copy in the tier is then out of date: ``release`` the handle.
        """
        self._traffic.before_write(self)

    def release(self) -> None:
        """Give the space in the tier back. Bytes on the device that somebody holds stay valid. Idempotent."""
        self._traffic.release(self)


def _storage_or_none(into: torch.UntypedStorage | None) -> torch.UntypedStorage | None:
    if into is not None and not isinstance(into, torch.UntypedStorage):
        raise must_be("into", "a torch.UntypedStorage", into, "handle.get(into=tensor.untyped_storage())")
    return into
