"""The place in a tier where the bytes of one handle are, or will be."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import TierReadError
from penstock.probe import ledger
from penstock.tiers._tier import Extent, Piece, Tier


@dataclass(slots=True, eq=False)
class Room:
    """An extent reserved for one handle, with the unaligned edges and checksums of its bytes."""

    tier: Tier
    """The tier that has the bytes."""
    extent: Extent
    """Their extent in the tier."""
    edges: tuple[bytes, bytes] = (b"", b"")
    """The first and the last bytes, if the tier takes only whole blocks at aligned addresses."""
    checksums: list[int] = field(default_factory=list)
    """CRC-32 of each piece as it was written, if fetches are verified."""
    lender: object = None
    """The handle that lent this extent, if it was borrowed; the reference keeps it alive."""

    def __post_init__(self) -> None:
        if self.lender is None:
            ledger.charge(self.edge_bytes)

    @property
    def edge_bytes(self) -> int:
        """Bytes of the edges, which stay in main memory."""
        return len(self.edges[0]) + len(self.edges[1])

    def pieces(self, start: int = 0) -> Sequence[tuple[int, int, Piece]]:
        """Return number, position of the bytes and piece, for each piece; the first position is ``start``."""
        pieces, position = [], start
        for number, piece in enumerate(self.extent.pieces):
            pieces.append((number, position, piece))
            position += piece.size_bytes
        return pieces

    def check(self, piece: Piece, number: int, view: memoryview) -> None:
        """Raise ``TierReadError`` if ``view``, read from that piece, differs from what was written there."""
        if zlib.crc32(view) != self.checksums[number]:
            raise TierReadError(
                tier=self.tier.name,
                file=self.tier.file_name(piece),
                offset=piece.offset,
                size_bytes=piece.size_bytes,
                reason="the bytes differ from those written (CRC-32)",
            )

    def give_back(self) -> None:
        """Release the extent, once the handle and its last copy no longer need it."""
        if self.lender is None:
            ledger.charge(-self.edge_bytes)
            self.tier.release(self.extent)
        self.lender = None
