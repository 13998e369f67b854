"""Sizes, rates and durations, to and from text.

``6GiB`` is 6 x 2**30 bytes and ``6GB`` is 6 x 10**9 bytes, as in IEC 80000-13. Everything inside Penstock is a plain
``int`` of bytes or ``float`` of seconds; text exists only in input and output.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["format_bytes", "format_duration", "format_fields", "format_rate", "parse_bytes"]

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Return the bytes in ``size``: an ``int``, or text such as ``"6GiB"`` (2**30), ``"6GB"`` (10**9) or ``"1500000"``.

    Raises ``ValueError`` for text that is not a size or a negative number, ``TypeError`` for any other type.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(
            f"a size must be an int of bytes or a string such as '6GiB', got {type(size).__name__} {size!r}"
        )
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a size cannot be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{size!r} is not a size. Write a number and a unit: '6GiB' (6 x 2**30 bytes), '6GB' (6 x 10**9 bytes), "
            "'512MiB', '1.5TiB', or a plain number of bytes."
        )
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_bytes(size_bytes: float) -> str:
    """Return a size as text, in the largest binary unit below it: ``format_bytes(6 * 2**30) == "6.0 GiB"``."""
    magnitude = abs(size_bytes)
    for unit, factor in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def format_rate(bandwidth_bytes_per_s: float) -> str:
    """Return a bandwidth as text, in decimal units, as devices are sold (``"2.1 GB/s"``)."""
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth_bytes_per_s >= factor:
            return f"{bandwidth_bytes_per_s / factor:.1f} {unit}"
    return f"{bandwidth_bytes_per_s:.0f} B/s"


def format_duration(duration_s: float) -> str:
    """Return a duration as text: ``"1.3 ms"``, ``"15.6 s"``, ``"2 h 05 min"``, ``"3.2 years"``."""
    if duration_s < 1:
        return f"{duration_s * 1e3:.1f} ms"
    if duration_s < 120:
        return f"{duration_s:.1f} s"
    if duration_s < 7200:
        return f"{duration_s / 60:.0f} min"
    if duration_s < 2 * 86400:
        return f"{int(duration_s // 3600)} h {int(duration_s % 3600 // 60):02d} min"
    if duration_s < 2 * 365 * 86400:
        return f"{duration_s / 86400:.0f} days"
    return f"{duration_s / (365 * 86400):.1f} years"


def format_fields(record: Any, *properties: str) -> str:  # any: whatever dataclass
    """Return a dataclass as a table with a line per field, and per named property, that has a value.

    The unit of a number is that of its name: ``_bytes``, ``_s``, or none.
    """
    names = [field.name for field in dataclasses.fields(record)] + list(properties)
    lines: list[tuple[str, str]] = []
    for name in names:
        value = getattr(record, name)
        if isinstance(value, Mapping):
            label = _label(name)
            lines += [(f"{label}, {key}", _format_value(name, item)) for key, item in value.items()]
        elif value is not None and value != "":
            lines.append((_label(name), _format_value(name, value)))
    width = max((len(label) for label, _ in lines), default=0)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def _label(name: str) -> str:
    for prefix in ("num_", "is_"):
        name = name.removeprefix(prefix)
    for suffix in ("_bytes", "_s"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _format_value(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s"):
        return format_duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
