"""Damage to files: to their bytes, their text and JSON values, or by something else in a file's place."""

import json
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 100_000
ODD_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 255, 256, 4096, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64,
    10**30, -(2**31), -(2**63), 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
ODD_TEXTS = (
    "", "\0", "../../../escape", "/etc/passwd", "a/b", ".", "..", "\ud83d\ude00", "\ud800", "x" * 10_000, "NaN",
    "1e999",
    "<script>", "%s%n", "'; DROP TABLE jobs; --", "SOURCE", "float32", "torch.load", "__class__", "[link=x]", "[/]",
)  # fmt: skip


class Explosive:
    """An object whose unpickling executes code, which must never happen."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def payloads(canary: Path) -> dict[str, bytes]:
    """Return complete files of other kinds."""
    touch = f"touch '{canary}'"
    return {
        "nothing": b"",
        "zeros": bytes(8192),
        "high bytes": b"\xff" * 5000,
        "UTF-16": '{"format": 1}'.encode("utf-16"),
        "not UTF-8": b'{"format": "\xc3\x28\xa0\xa1"}',
        "pickle": pickle.dumps(Explosive(touch)),
        "numpy of objects": _objects(touch),
        "YAML of Python": f'job: !!python/object/apply:os.system ["{touch}"]\nsearch: grid\n'.encode(),
        "deep lists": b"[" * DEEP,
        "deep dictionaries": b'{"a":' * DEEP,
        "deep flow": b"a: " + b"{b: " * 3000,
        "deep minus": b"-" * DEEP + b"1",
        "deep sums": b"1+" * DEEP + b"1",
        "long number": b"9" * 5000,
        "a number in JSON": b"17",
        "a list in JSON": b"[1, 2, 3]",
        "text in JSON": b'"text"',
        "null in JSON": b"null",
        "laughs": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(
            f"{chr(98 + index)}: &{chr(98 + index)} [{','.join(['*' + chr(97 + index)] * 9)}]\n".encode()
            for index in range(12)
        ),
        "one line": b"<a> " * 100_000,
        "huge header": (2**63 - 1).to_bytes(8, "little") + b"{}",
        "header of its size": (2**40).to_bytes(8, "little") + b"{" * 64,
        "ELF": b"\x7fELF" + bytes(60),
        "SQLite": b"SQLite format 3\0" + bytes(84),
        "gzip": b"\x1f\x8b\x08\0" + bytes(20),
    }


def _objects(touch: str) -> bytes:
    import io

    import numpy as np

    file = io.BytesIO()
    np.save(file, np.array([Explosive(touch)], dtype=object), allow_pickle=True)
    return file.getvalue()


def damaged_bytes(raw: bytes, choices: random.Random) -> tuple[str, bytes]:
    """Apply one of many small damages, and return the bytes and its name."""
    size = len(raw)
    index = choices.choice(_interesting(raw, choices)) if size else 0
    match choices.choice(
        ("cut", "cut", "flip", "flip", "flips", "swap", "double", "drop", "insert", "number", "digits")
    ):
        case "cut":
            return f"cut at {index}", raw[:index]
        case "flip" if size:
            bit, copy = choices.randrange(8), bytearray(raw)
            index = min(index, size - 1)
            copy[index] ^= 1 << bit
            return f"bit {bit} of byte {index}", bytes(copy)
        case "flips" if size:
            copy = bytearray(raw)
            for _ in range(choices.randint(2, 40)):
                copy[choices.randrange(size)] = choices.randrange(256)
            return "some bytes", bytes(copy)
        case "swap" if size > 64:
            length = choices.randint(1, size // 4)
            first, two = sorted(choices.randrange(size - length) for _ in range(2))
            parts = (raw[:first], raw[two : two + length], raw[first + length : two], raw[first : first + length])
            return "chunks swapped", b"".join((*parts, raw[two + length :]))[:size]
        case "double":
            end = index + choices.randint(1, max(1, size // 4))
            return "chunk doubled", raw[:end] + raw[index:end] + raw[end:]
        case "drop":
            end = index + choices.randint(1, max(1, size // 8))
            return "chunk dropped", raw[:index] + raw[end:]
        case "insert":
            what = choices.choice((b"\0", b"\xff\xfe", b"[" * DEEP, b"\n", b"nan", b"-", "\u202e\U0001f600".encode()))
            return f"{what[:8]!r} inserted", raw[:index] + what + raw[index:]
        case "digits":
            result = list(re.finditer(rb"-?\d+(\.\d+)?", raw[:100_000]))
            if result:
                first, number = choices.choice(result), choices.choice((*ODD_NUMBERS, "9" * 5000, "1e999", "[]", '""'))
                return f"{first[0][:20]!r} is {str(number)[:20]}", raw[: first.start()] + str(number).encode() + raw[
                    first.end() :
                ]
    width = choices.choice((1, 2, 4, 8))
    number = choices.choice([number for number in ODD_NUMBERS if isinstance(number, int)])
    return f"{number} at {index}", raw[:index] + (number % 2 ** (8 * width)).to_bytes(width, "little") + raw[
        index + width :
    ]


def _interesting(raw: bytes, choices: random.Random) -> list[int]:
    size = len(raw)
    known = [0, 1, 4, 6, 7, 8, 9, 10, 12, 16, 100, 128, 511, 512, 4095, 4096, 4097, size // 2, size - 1, size]
    return [*(index for index in known if 0 <= index <= size), *(choices.randint(0, size) for _ in range(20))]


def damaged_json(value: Any, choices: random.Random) -> Any:
    """Return the value with one part replaced, left out, doubled or renamed."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    value = json.loads(json.dumps({"": value}))
    walk(value)
    parent, key = choices.choice(places[: 1 + len(places) // 4] if choices.random() < 0.5 else places)
    old = parent[key]
    match choices.randrange(7):
        case 0 if isinstance(parent, list) or parent is not value:
            del parent[key]
        case 1 if isinstance(parent, list):
            parent.insert(key, old)
        case 2 if isinstance(parent, dict) and parent is not value:
            parent[choices.choice(ODD_TEXTS)] = parent.pop(key)
        case 3:
            parent[key] = choices.choice(ODD_TEXTS)
        case 4:
            parent[key] = choices.choice((None, [], {}, [None], {"": 1}, True, [[]], [0] * 100))
        case 5 if isinstance(old, int | float) and not isinstance(old, bool):
            parent[key] = choices.choice((old + 1, -old, old - 1, old * 2, float(old), str(old)))
        case _:
            parent[key] = choices.choice(ODD_NUMBERS)
    return value[""]


def json_text(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", errors="surrogatepass")


def in_safetensors(raw: bytes, choices: random.Random) -> bytes:
    """Return the file with another header and the matching length."""
    length = int.from_bytes(raw[:8], "little")
    header = damaged_json(json.loads(raw[8 : 8 + length]), choices)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and "about" in metadata and choices.random() < 0.7:
        metadata["about"] = json.dumps(damaged_json(json.loads(str(metadata["about"])), choices))
    text = json_text(header)
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def in_rows(raw: bytes, choices: random.Random) -> bytes:
    """Return a file of aligned rows with another header and its checksum."""
    length = int.from_bytes(raw[8:12], "little")
    text = json_text(damaged_json(json.loads(raw[16 : 16 + length]), choices))[: 4096 - 16]
    if choices.random() < 0.1:
        text = b"[" * 4000
    head = raw[:8] + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    return head.ljust(4096, b"\0") + raw[4096:]


def in_json(raw: bytes, choices: random.Random) -> bytes:
    return json_text(damaged_json(json.loads(raw), choices))


def in_json_lines(raw: bytes, choices: random.Random) -> bytes:
    lines = raw.splitlines()
    index = choices.randrange(len(lines))
    lines[index] = json_text(damaged_json(json.loads(lines[index]), choices))
    return b"\n".join(lines) + b"\n"


def in_place_of(path: Path, choices: random.Random) -> str:
    """Replace the file by another one, or by something that is not a file."""
    kind = choices.choice(("folder", "pipe", "loop", "nowhere", "endless", "nothing"))
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "nowhere":
            path.symlink_to("../nowhere/at/all")
        case "endless":
            path.symlink_to("/dev/zero")
    return f"{kind} in its place"


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
