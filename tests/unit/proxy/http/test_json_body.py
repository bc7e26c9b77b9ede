"""Values are counted without parsing, as the parser would find them."""

from __future__ import annotations

import json

import pytest

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.proxy.http import json_body
from triptych.proxy.http.json_body import check_values, convert_field
from triptych.proxy.openai.chat.request import MessageBody


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


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("audio", "sound is not a part here (chats take it as input_audio or audio_url)"),
        ("file", "files are not read here"),
        ("x", "Invalid value 'x'"),
    ],
)
def test_a_part_that_is_not_served_is_named_with_those_that_are(kind: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match="send text or .*image_url") as caught:
        convert_field({"role": "user", "content": [{"type": kind}]}, MessageBody, "messages[0]")
    assert caught.value.param == "messages[0].content[0].type"
    assert named in caught.value.message
