"""Replay of a recorded load: one JSON object a line.

    {"time": 0.25, "text_tokens": 400, "output_tokens": 150,
     "images": [{"id": "a", "width": 640, "height": 480}]}

all in one line. `time` is in seconds from the start; pictures with one id are the same picture; `images`
may be missing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from triptych.base.errors import ConfigError
from triptych.goodput.load.workload import Picture, PlannedRequest

Side = Annotated[int, msgspec.Meta(ge=1, le=16384)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Image(msgspec.Struct):
    id: str
    width: Side
    height: Side


class _Line(msgspec.Struct):
    time: Annotated[float, msgspec.Meta(ge=0)]
    text_tokens: Count
    output_tokens: Count
    images: list[_Image] = []


def read_trace(path: Path, speed: float = 1.0, seed: int = 0) -> list[tuple[float, PlannedRequest]]:
    """Times and requests by time; `speed` 2 replays twice as fast. ConfigError names the line."""
    decoder = msgspec.json.Decoder(_Line)
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--trace {path} line {number}: {error}") from error
        found.append((entry.time / speed, _planned(entry, number, seed)))
    if not found:
        raise ConfigError(f"--trace {path} holds no request")
    return sorted(found, key=lambda pair: pair[0])


def _planned(entry: _Line, number: int, seed: int) -> PlannedRequest:
    pictures = tuple(Picture(_seed_of(image.id, seed), image.width, image.height) for image in entry.images)
    return PlannedRequest(seed * 1_000_003 + number, entry.text_tokens, entry.output_tokens, pictures)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
