"""Values are counted without parsing, as the parser would find them."""

from __future__ import annotations

import json

import pytest

from triptych.base.errors import TooLarge
from triptych.proxy.http import json_body
from triptych.proxy.http.json_body import check_values


@pytest.mark.parametrize(
    "body",
    [[{}] * 60, [[]] * 60, {str(n): 1 for n in range(60)}, [[[[[1] * 60]]]], list(range(60))],
    ids=["objects", "lists", "members", "depth", "numbers"],
)
def test_json_is_held_to_its_values(monkeypatch: pytest.MonkeyPatch, body: object) -> None:
    raw = json.dumps(body).encode()
    check_values(raw)
    monkeypatch.setattr(json_body, "MAX_VALUES", 50)
    with pytest.raises(TooLarge):
        check_values(raw)


def test_the_largest_body_that_is_served_passes() -> None:
    check_values(json.dumps({"tokens": list(range(1 << 18))}).encode())
