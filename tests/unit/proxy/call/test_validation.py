"""Rules that all front doors share: a form that says nothing is refused with its field and the remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.protos import common_pb2, proxy_pb2
from triptych.proxy.grpc.request import call_of
from triptych.proxy.openai.chat.request import parse_body
from triptych.proxy.openai.completions.request import parse_completion
from triptych.proxy.openai.messages.request import parse_messages
from triptych.proxy.openai.responses.request import parse_responses

HELLO = [{"role": "user", "content": "x"}]
NAMED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}


def chat(**body: Any) -> object:
    raw = json.dumps({"messages": HELLO, **body}).encode()
    return parse_body(raw, "r", max_images=1, timeout=5.0)


def completions(**body: Any) -> object:
    return parse_completion(json.dumps({"prompt": "x", **body}).encode(), "r", timeout=5.0)


def responses(**body: Any) -> object:
    raw = json.dumps({"input": "x", **body}).encode()
    return parse_responses(raw, "r", max_images=1, timeout=5.0)


def messages(**form: Any) -> object:
    raw = json.dumps({"messages": HELLO, "max_tokens": 3, "output_config": {"format": form}}).encode()
    return parse_messages(raw, "r", max_images=1, timeout=5.0)


def grpc(**form: Any) -> object:
    sampling = common_pb2.SamplingParams(output_format=common_pb2.OutputFormat(**form))
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="hi")])
    request = proxy_pb2.ChatRequest(messages=[message], sampling=sampling)
    return call_of(request, max_images=1, timeout=5.0, max_choices=1)


SCHEMA = "is missing: send a JSON schema, or the type json_object"
TYPE = "is missing: send text or json_object or json_schema"
CHOICES = "a list of 1 to 1024 texts, none of them empty: send what the answer may be, or leave it out"
ENTRIES = "takes at least 1 entries: send more, or leave it out"


@pytest.mark.parametrize(
    ("door", "body", "param", "remedy"),
    [
        *(
            case
            for door in (chat, completions)
            for case in (
                (door, NAMED, "response_format.json_schema.schema", SCHEMA),
                (door, {"response_format": {"name": "x"}}, "response_format.type", TYPE),
            )
        ),
        *(
            case
            for door in (chat, completions, responses)
            for case in (
                (door, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", CHOICES),
                (door, {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", CHOICES),
                (door, {"guided_choice": []}, "guided_choice", ENTRIES),
                (door, {"guided_json": ""}, "guided_json", SCHEMA),
            )
        ),
        (
            responses,
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "is missing: send it",
        ),
        (
            responses,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": None}}},
            "text.format.schema",
            SCHEMA,
        ),
        (responses, {"text": {"format": {"name": "x"}}}, "text.format.type", TYPE),
        (messages, {"type": "json_schema"}, "output_config.format.schema", "is missing: send it"),
        (grpc, {"json_schema": ""}, "output_format.json_schema", SCHEMA),
        (grpc, {"choices": common_pb2.TextChoices()}, "output_format.choices", CHOICES),
        (grpc, {"choices": common_pb2.TextChoices(texts=[""])}, "output_format.choices", CHOICES),
    ],
)
def test_a_form_that_says_nothing_is_refused_with_its_field_and_the_remedy(door, body, param, remedy):
    with pytest.raises(InvalidRequest) as refused:
        door(**body)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param in refused.value.message and remedy in refused.value.message
