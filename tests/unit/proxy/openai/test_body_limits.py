"""Whatever a body holds in any of its fields, a valid call is bounded, and reading it costs what it holds."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from support.hostile.bodies import Place, body_with, places
from support.hostile.calls import BESIDE_TEXT, refused_later, weight
from triptych.base.errors import RequestError
from triptych.base.request import MAX_TEXT, MAX_TOKEN_IDS
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
#: Entries of lists whose types name no limit, above all that there are.
MANY = MAX_TOKEN_IDS + 1


def name(case: tuple[CallEndpoint[Any], Place]) -> str:
    return f"{case[0].body.__name__}: {case[1].path} ({case[1].of})"


def read(reader: CallEndpoint[Any], raw: bytes) -> Any:
    """What is left of a body once it is read; the error where it is refused."""
    try:
        return reader.parse("r")(raw)
    except RequestError as error:
        return error


@pytest.mark.parametrize("case", PLACES, ids=name)
async def test_a_field_that_is_larger_than_any_call_is_refused_or_leaves_no_trace(
    case: tuple[CallEndpoint[Any], Place],
) -> None:
    reader, place = case
    small = read(reader, msgspec.json.encode(body_with(reader.body, place, 1)))
    if isinstance(small, RequestError):
        # Not served, or nothing that fits the rest of the body: it must be this field that is named.
        assert place.path.startswith(re.sub(r"\[\d+\]", "[]", small.param or "-")), small.message
        return
    size = place.most + 1 if place.most else MAX_TEXT + 1 if place.kind != "list" else MANY
    large = read(reader, msgspec.json.encode(body_with(reader.body, place, size)))
    if isinstance(large, RequestError) or await refused_later(large):
        return
    assert weight(large) < BESIDE_TEXT, f"{place.path} needs a limit: see triptych/base/request.py"


#: Growth is measured where there may be so many entries: fewer are read in no time.
ENOUGH = 1024
ALLOWED = 2.5


def growth(read: Callable[[bytes], object], half: bytes, whole: bytes) -> float:
    """How many times the thread time of `half` reading `whole` takes: the best of five each, and no more
    rounds than it needs."""
    least = {half: float("inf"), whole: float("inf")}
    # A full collection walks over the whole test process, and falls into the larger body.
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            for raw in least:
                before = time.thread_time()
                read(raw)
                least[raw] = min(least[raw], time.thread_time() - before)
            if least[whole] <= ALLOWED * least[half]:
                break
    finally:
        gc.enable()
    return least[whole] / least[half]


def lists(reader: CallEndpoint[Any], place: Place) -> bool:
    return place.kind != "str" and (place.most is None or place.most >= ENOUGH)


@pytest.mark.parametrize("case", [case for case in PLACES if lists(*case)], ids=name)
def test_twice_the_entries_cost_at_most_twice_and_a_half(case: tuple[CallEndpoint[Any], Place]) -> None:
    reader, place = case
    size = min(place.most or 1 << 15, 1 << 15)
    half, whole = (msgspec.json.encode(body_with(reader.body, place, n)) for n in (size // 2, size))
    # A busy machine gets a second and a third try; what grows with the square fails them as well.
    assert any(growth(lambda raw: read(reader, raw), half, whole) <= ALLOWED for _ in range(3))
