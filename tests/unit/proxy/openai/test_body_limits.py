"""Whatever a body holds in any of its fields, a valid call is bounded, and reading it costs what it holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.hostile.bodies import Place, body_with
from support.hostile.body_growth import ALLOWED, LISTS, PLACES, name, read
from support.hostile.calls import BESIDE_TEXT, refused_later, weight
from triptych.base.errors import RequestError
from triptych.base.request import MAX_TEXT, MAX_TOKEN_IDS
from triptych.proxy.openai.chat.endpoint import CallEndpoint

TESTS = Path(__file__).parents[3]
#: Entries of lists whose types name no limit, above all that there are.
MANY = MAX_TOKEN_IDS + 1


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


@pytest.fixture(scope="module")
def growths() -> dict[str, float]:
    """How many times as long each place's body takes with twice the entries, by the place's name."""
    command = [sys.executable, "-m", "support.hostile.body_growth"]
    done = subprocess.run(command, cwd=TESTS, stdout=subprocess.PIPE, check=True, timeout=200)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", LISTS, ids=name)
def test_twice_the_entries_cost_at_most_twice_and_a_half(
    case: tuple[CallEndpoint[Any], Place], growths: dict[str, float]
) -> None:
    assert growths[name(case)] <= ALLOWED
