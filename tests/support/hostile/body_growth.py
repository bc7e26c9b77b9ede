"""How the time of reading a body grows with what one of its fields holds, measured in a process that does
nothing else: `python -m support.hostile.body_growth` writes the ratios of all places as JSON.

In a process that has run thousands of tests a look for garbage walks over all that they left, and takes
longer than the bodies.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec

from support.hostile.bodies import Place, body_with, places
from triptych.base.errors import RequestError
from triptych.proxy.openai.app import ENDPOINTS
from triptych.proxy.openai.audio.request import TranscriptionForm
from triptych.proxy.openai.chat.endpoint import ApiLimits, CallEndpoint

_PARTS: Any = SimpleNamespace(parsers=None)
#: One endpoint for each type of body. A form's fields are counted and measured while it is read.
READERS: list[CallEndpoint[Any]] = [
    endpoint(_PARTS, None, ApiLimits(8, 16, 64 << 20, 10.0, False))  # type: ignore[arg-type]
    for endpoint in {endpoint.body: endpoint for endpoint in ENDPOINTS.values()}.values()
    if endpoint.body is not TranscriptionForm
]
PLACES = [(reader, place) for reader in READERS for place in places(reader.body)]
#: Growth is measured where there may be so many entries: fewer are read in no time.
ENOUGH = 1024
#: Twice the entries may take so many times as long.
ALLOWED = 2.5


def name(case: tuple[CallEndpoint[Any], Place]) -> str:
    return f"{case[0].body.__name__}: {case[1].path} ({case[1].of})"


def lists(place: Place) -> bool:
    return place.kind != "str" and (place.most is None or place.most >= ENOUGH)


LISTS = [(reader, place) for reader, place in PLACES if lists(place)]


def read(reader: CallEndpoint[Any], raw: bytes) -> Any:
    """What is left of a body once it is read; the error where it is refused."""
    try:
        return reader.parse("r")(raw)
    except RequestError as error:
        return error


def _growth(reader: CallEndpoint[Any], half: bytes, whole: bytes) -> float:
    """How many times the thread time of `half` reading `whole` takes: the best of five each, and no more
    rounds than it needs."""
    least = {half: float("inf"), whole: float("inf")}
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            for raw in least:
                before = time.thread_time()
                read(reader, raw)
                least[raw] = min(least[raw], time.thread_time() - before)
            if least[whole] <= ALLOWED * least[half]:
                break
    finally:
        gc.enable()
    return least[whole] / least[half]


def growth(reader: CallEndpoint[Any], place: Place) -> float:
    """The least of up to three measurements: a busy machine spoils one; what grows with the square, none."""
    size = min(place.most or 1 << 15, 1 << 15)
    half, whole = (msgspec.json.encode(body_with(reader.body, place, n)) for n in (size // 2, size))
    least = float("inf")
    for _ in range(3):
        least = min(least, _growth(reader, half, whole))
        if least <= ALLOWED:
            break
    return least


if __name__ == "__main__":
    gc.freeze()
    json.dump({name(case): growth(*case) for case in LISTS}, sys.stdout)
