"""The choice between several options."""

from collections.abc import Sequence

from penstock.advisor._advice import Option
from penstock.arguments import checked

_AS_FAST = 1.03
"""Factor within which options count as equally fast, since measurements are not more precise than that."""
_SIMPLEST = ("plain", "checkpoint", "offload", "remat", "training")


@checked("penstock.advisor.choose(advice.options)")
def choose(options: Sequence[Option]) -> Option | None:
    """Return the fastest option that is not refused; among equally fast ones the simplest, then the lowest peak.

    Options without a ratio come last. Returns ``None`` if all are refused.
    """
    taken = [one for one in options if not one.is_refused]
    if not taken:
        return None
    known = [one for one in taken if one.ratio is not None] or taken
    fastest = min(one.ratio or 0.0 for one in known)
    as_fast = [one for one in known if (one.ratio or 0.0) <= _AS_FAST * fastest]
    return min(as_fast, key=_effort)


def _effort(option: Option) -> tuple[int, int]:
    rank = _SIMPLEST.index(option.name) if option.name in _SIMPLEST else len(_SIMPLEST)
    return rank, option.peak_bytes or 0
