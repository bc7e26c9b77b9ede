from __future__ import annotations

import json
from typing import Any

import pytest
from openapi_spec_validator import validate

from support.openapi.document import FORM_OPERATIONS, OPERATIONS, make_openapi, openapi_text
from triptych.base.errors import InvalidRequest
from triptych.proxy.openai.chat.request import parse_body
from triptych.proxy.openai.completions.request import parse_completion
from triptych.proxy.openai.fields.sampling import UnservedBody
from triptych.proxy.openai.messages.request import parse_messages
from triptych.proxy.openai.responses.request import parse_responses
from triptych.proxy.page.endpoint import OPENAPI, STATIC

PARSERS = {
    "/v1/chat/completions": lambda raw: parse_body(raw, "r", max_images=4, timeout=1.0, max_choices=16),
    "/v1/completions": lambda raw: parse_completion(raw, "r", timeout=1.0, max_choices=16),
    "/v1/responses": lambda raw: parse_responses(raw, "r", max_images=4, timeout=1.0),
    "/v1/messages": lambda raw: parse_messages(raw, "r", max_images=4, timeout=1.0),
}
GENERATING = [operation for operation in OPERATIONS if operation.path in PARSERS]


def _properties(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["schemas"][name]["properties"]
    return found


def test_the_file_that_is_served_is_what_the_code_makes():
    assert (STATIC / OPENAPI).read_text(encoding="utf-8") == openapi_text(), "write it with `make openapi`"


def test_the_document_is_valid():
    validate(make_openapi())


#: Fields that are refused, or have another name in that body.
HIDDEN = {
    "EmbeddingBody": {"truncate_prompt_tokens", "prompt_embeds", "add_special_tokens"},
    "PoolingBody": {"truncate_prompt_tokens", "prompt_embeds", "add_special_tokens"},
    "RerankBody": {"truncate_prompt_tokens", "prompt_embeds"},
    "ScoreBody": {"truncate_prompt_tokens", "prompt_embeds"},
    "CompletionBody": {"best_of", "suffix"},
    "TokenizeBody": {"return_token_strs"},
    "ResponsesBody": {
        "background",
        "conversation",
        "max_tokens",
        "previous_response_id",
        "prompt",
        "response_format",
    },
}


def test_every_field_of_a_request_is_described_but_for_those_that_are_refused():
    document = make_openapi()
    for operation in OPERATIONS:
        if operation.body is None:
            continue
        name = operation.body.__name__
        hidden = HIDDEN.get(name, set())
        if issubclass(operation.body, UnservedBody):
            served = {"echo", "add_special_tokens"} if name == "CompletionBody" else set()
            hidden = hidden | set(UnservedBody.__struct_fields__) - served
        fields = _properties(document, name)
        assert all(field["description"] for field in fields.values())
        assert fields.keys() == set(operation.body.__struct_fields__) - hidden


@pytest.mark.parametrize("translates", [False, True])
def test_every_field_of_a_form_is_described_but_for_the_one_that_is_refused(translates: bool):
    operation = FORM_OPERATIONS[int(translates)]
    fields = _properties(make_openapi(), operation.body.__name__)
    assert all(field["description"] for field in fields.values())
    assert operation.body.__name__ == ("TranslationForm" if translates else "TranscriptionForm")
    assert fields.keys() == set(operation.body.__struct_encode_fields__) - {"include"}


def _limits(field: dict[str, Any]) -> dict[str, Any]:
    """The part of a field's schema that has a range; empty where none has."""
    return next((kind for kind in (field, *field.get("anyOf", ())) if "maximum" in kind), {})


def _edges(limits: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Values that are just inside and just outside of a field's limits."""
    step = 1 if limits.get("maximum", 0) > 16 else 0.25
    inside = [limits.get("minimum", limits.get("exclusiveMinimum", 0) + step), limits["maximum"]]
    outside = [limits["maximum"] + 1]
    outside.append(limits["minimum"] - 1 if "minimum" in limits else limits["exclusiveMinimum"])
    return inside, outside


RANGES = [
    (operation, name)
    for operation in GENERATING
    for name, field in _properties(make_openapi(), operation.body.__name__).items()
    if _limits(field)
]


@pytest.mark.parametrize(
    ("operation", "name"), RANGES, ids=[f"{operation.path} {name}" for operation, name in RANGES]
)
def test_every_range_is_the_parsers_own(operation: Any, name: str):
    fields = _properties(make_openapi(), operation.body.__name__)
    inside, outside = _edges(_limits(fields[name]))
    parse = PARSERS[operation.path]
    base = {**next(iter(operation.examples.values())), "n": None}
    for key in ("max_tokens", "max_output_tokens") if "min_tokens" in fields else ():
        base.pop(key, None)
    if name == "top_logprobs":
        base |= {"logprobs": True, "include": ["message.output_text.logprobs"]}
    for value in inside:
        also = {"max_tokens": value} if name == "min_tokens" and value else {}
        if "max_tokens" not in fields:
            also = {"max_output_tokens": value} if also else {}
        parse(json.dumps({**base, **also, name: value}).encode())
    for value in outside:
        with pytest.raises(InvalidRequest) as refused:
            parse(json.dumps({**base, name: value}).encode())
        assert refused.value.param == name
