"""Where the bytes of one handle are, or will be, in a tier."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import TierReadError
from penstock.probe import ledger
from penstock.tiers._tier import Extent, Piece, Tier


@dataclass(slots=True, eq=False)
class Room:
    """An extent that was reserved for one handle, and what belongs to its bytes."""

    tier: Tier
    """The tier that has them."""
    extent: Extent
    """Where there."""
    edges: tuple[bytes, bytes] = (b"", b"")
    """The first and the last bytes, where the tier takes whole blocks at aligned addresses only."""
    checksums: list[int] = field(default_factory=list)
    """CRC-32 of each piece as it was written, where fetches are verified."""
    lender: object = None
    """The handle whose room this is, where it was borrowed. It lives as long as this does."""

    def __post_init__(self) -> None:
        if self.lender is None:
            ledger.charge(self.edge_bytes)

    @property
    def edge_bytes(self) -> int:
        """Bytes of the edges, which stay in main memory."""
        return len(self.edges[0]) + len(self.edges[1])

    def pieces(self, start: int = 0) -> Sequence[tuple[int, int, Piece]]:
        """For each piece its number, where its bytes begin, the first at ``start``, and itself."""
        found, at = [], start
        for number, piece in enumerate(self.extent.pieces):
            found.append((number, at, piece))
            at += piece.size_bytes
        return found

    def check(self, piece: Piece, number: int, view: memoryview) -> None:
        """Raises ``TierReadError`` where ``view``, read from that piece, is not what was written there."""
        if zlib.crc32(view) != self.checksums[number]:
            raise TierReadError(
                tier=self.tier.name,
                file=self.tier.file_name(piece),
                offset=piece.offset,
                size_bytes=piece.size_bytes,
                reason="the bytes differ from those written (CRC-32)",
            )

    def give_back(self) -> None:
        """The handle and its last copy are done with it."""
        if self.lender is None:
            ledger.charge(-self.edge_bytes)
            self.tier.release(self.extent)
        self.lender = None
