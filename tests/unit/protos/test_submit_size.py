"""A Submit without its items is bounded, whatever a valid call holds: every field of it has a bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.request import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICE_TEXTS,
    MAX_FORMAT,
    MAX_LANGUAGE,
    MAX_OPTIONS_BYTES,
    MAX_QUERY_VECTORS,
    MAX_SALT,
    MAX_SPOKEN_PROMPT,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_SUBMIT,
    MAX_TENANT_SALT,
    MAX_TEXT,
    MAX_TOKEN_ID,
    MAX_TOKEN_IDS,
    MAX_TOOLS_BYTES,
    check_lists,
    check_tools_size,
)
from triptych.base.types import SamplingParams
from triptych.protos import pd_pb2
from triptych.proxy.call.chat import ChatCall, ChatMessage, EncoderPrompt, Transcription
from triptych.proxy.call.output_formats import choice_format, regex_format, schema_format
from triptych.proxy.call.tools import tool_use
from triptych.proxy.call.validation import check_salt, check_sampling, template_options
from triptych.proxy.events import Fetched
from triptych.proxy.pd.wire import submit_message
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.splitter import SplitRequest, split
from triptych.proxy.workers import Binding

#: A character of four bytes; a token id of five.
CHAR, WIDE = "\U0001f600", MAX_TOKEN_ID
#: A name of a process or a request, a key, a trace header: at most, by the rules for each.
NAME = 4 * 256
_SCALAR = 12
#: Bytes of all texts of a call, which stand in for each other.
TEXT = {
    "messages": MAX_TEXT,
    "prompt.text": 4 * MAX_TEXT,
    "prompt.token_ids.ids": 5 * MAX_TOKEN_IDS,
    "encoder_prompt.text": 4 * MAX_TEXT,
    "encoder_prompt.token_ids.ids": 5 * MAX_TOKEN_IDS,
    "transcription.prompt": 4 * MAX_SPOKEN_PROMPT,
}
#: One of these, at most.
FORMS = {
    "sampling.output_format.json_schema": 4 * MAX_FORMAT,
    "sampling.output_format.regex": 4 * MAX_FORMAT,
    "sampling.output_format.choices.texts": 4 * MAX_FORMAT + 8 * MAX_CHOICE_TEXTS,
}
#: Bytes of what else a call may hold.
OTHERS = {
    **dict.fromkeys(("request_id", "proxy_id", "model_key", "adapter", "label", "tenant"), NAME),
    **dict.fromkeys(("traceparent", "tracestate"), NAME),
    "salt": 4 * MAX_TENANT_SALT,
    "template.tools": MAX_TOOLS_BYTES,
    # Measured before JSON escapes their characters.
    "template.variables": 6 * MAX_OPTIONS_BYTES,
    "transcription.language": 4 * MAX_LANGUAGE,
    "transcription.task": 4 * MAX_LANGUAGE,
    "pooling.method": NAME,
    "pooling.query": MAX_QUERY_VECTORS,
    "sampling.stop": MAX_STOP_STRINGS * (4 * MAX_STOP_CHARS + 8),
    "sampling.stop_token_ids": 5 * MAX_STOP_TOKEN_IDS,
    "sampling.bad_words": MAX_BAD_WORDS * (4 * MAX_BAD_WORD_CHARS + 8),
    "sampling.logit_bias": MAX_BIASES * (2 * _SCALAR),
}
#: What encoders say of items, and workers said of an earlier attempt: its entries are a prompt's tokens.
OF_WORKERS = {
    "items": ("plan", "source"),
    "resume": ("prompt_token_ids", "placements", "output_token_ids", "kv"),
}


def leaves(descriptor: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """The path of each field without fields of its own, and whether its type alone bounds its bytes."""
    for field in descriptor.fields:
        name = f"{path}.{field.name}" if path else field.name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from leaves(field.message_type, name)
        else:
            yield name, not field.is_repeated and field.type not in (field.TYPE_STRING, field.TYPE_BYTES)


def of_workers(path: str) -> bool:
    head, _, rest = path.partition(".")
    return rest.split(".")[0] in OF_WORKERS.get(head, ())


def test_every_field_of_a_submit_has_a_bound_and_their_sum_is_that_of_a_call() -> None:
    found = [leaf for leaf in leaves(pd_pb2.SubmitRequest.DESCRIPTOR) if not of_workers(leaf[0])]
    bounds = {**TEXT, **FORMS, **OTHERS}
    lacking = [path for path, bounded in found if not bounded and path not in bounds]
    assert lacking == [], "a new field without a bound: give it a limit in triptych/base/request.py"
    assert set(bounds) <= {path for path, _ in found}, "a row without its field"
    scalars = sum(_SCALAR for _, bounded in found if bounded)
    assert max(TEXT.values()) + max(FORMS.values()) + sum(OTHERS.values()) + scalars <= MAX_SUBMIT


def tool(size: int) -> dict[str, Any]:
    """A tool whose JSON, alone in a list, has so many bytes."""
    made: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": ""}}
    made["function"]["description"] = "x" * (size - len(msgspec.json.encode([made])))
    return made


def fullest() -> ChatCall:
    """A call that holds as much as it may, beside its text."""
    ids = tuple(range(MAX_TOKEN_ID - MAX_BIASES, MAX_TOKEN_ID))
    sampling = check_sampling(
        SamplingParams(
            stop=(CHAR * MAX_STOP_CHARS,) * MAX_STOP_STRINGS,
            stop_token_ids=(WIDE,) * MAX_STOP_TOKEN_IDS,
            bad_words=(CHAR * MAX_BAD_WORD_CHARS,) * MAX_BAD_WORDS,
            logit_bias=tuple((token, 0.1) for token in ids),
            output_format=regex_format(CHAR * MAX_FORMAT, "guided_regex"),
            seed=2**63,
        )
    )
    last = ChatMessage("user", "x")
    tools = tool_use([tool(MAX_TOOLS_BYTES)], None, None)
    assert len(tools.tools) == MAX_TOOLS_BYTES
    variables = {"a": "\0" * (MAX_OPTIONS_BYTES - 64)}
    template = template_options(
        last, tools=tools.tools, variables=variables, generation_prompt=None, continue_final_message=False
    )
    tenant = "t" * 256
    return ChatCall(
        "l" * 256, "m", (last,), sampling, 10.0, check_salt(CHAR * MAX_SALT), template=template, tenant=tenant
    )


def size_of(call: ChatCall, content: SplitRequest) -> int:
    request = InFlightRequest(call, 1, 10.0, binding=Binding("k" * 64, "n" * 64, "a" * 64), split=content)
    request.lifecycle.deliver(Fetched({}, 0.0))
    return submit_message(request, "p" * 64, 10.0).ByteSize()


def test_the_fullest_call_is_within_the_bound() -> None:
    call = fullest()
    assert size_of(call, SplitRequest(b"", (), ())) <= MAX_SUBMIT - 4 * MAX_TEXT
    assert size_of(call, SplitRequest(b"x" * MAX_TEXT, (), ())) <= MAX_SUBMIT
    assert size_of(replace(call, prompt=CHAR * MAX_TEXT), SplitRequest(b"", (), ())) <= MAX_SUBMIT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", (CHAR * (MAX_STOP_CHARS + 1),)),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop", ("",)),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
        ("bad_words", (CHAR * (MAX_BAD_WORD_CHARS + 1),)),
        ("bad_words", ("x",) * (MAX_BAD_WORDS + 1)),
        ("bad_words", (" ",)),
        ("logit_bias", tuple((token, 0.0) for token in range(MAX_BIASES + 1))),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((1, 101.0),)),
    ],
)
def test_both_ends_refuse_a_list_above_its_limit_by_name(field: str, value: Any) -> None:
    sampling = replace(SamplingParams(), **{field: value})
    for check in (check_sampling, check_lists):
        with pytest.raises(InvalidRequest, match=field) as caught:
            check(sampling)
        assert caught.value.param == field


def test_formats_tools_variables_and_spoken_prompts_above_their_limits_are_refused() -> None:
    last = ChatMessage("user", "x")
    options: dict[str, Any] = {"generation_prompt": None, "continue_final_message": False, "tools": b""}
    for above in (
        lambda: schema_format({"a": "x" * MAX_FORMAT}, "a"),
        lambda: schema_format(" " * (4 * MAX_FORMAT) + "{}", "a"),
        lambda: regex_format("x" * (MAX_FORMAT + 1), "a"),
        lambda: choice_format(["x" * MAX_FORMAT, "y"], "a"),
        lambda: choice_format([str(at) for at in range(MAX_CHOICE_TEXTS + 1)], "a"),
        lambda: tool_use([tool(MAX_TOOLS_BYTES + 1)], None, None),
        lambda: check_tools_size(MAX_TOOLS_BYTES + 1),
        lambda: template_options(last, variables={"a": "x" * MAX_OPTIONS_BYTES}, **options),
        lambda: check_salt("x" * (MAX_SALT + 1)),
        lambda: Transcription(prompt="x" * (MAX_SPOKEN_PROMPT + 1)),
        lambda: Transcription(language="x" * (MAX_LANGUAGE + 1)),
    ):
        with pytest.raises(InvalidRequest):
            above()


@pytest.mark.parametrize(
    ("encoder", "prompt"),
    [("x" * MAX_TEXT, "x"), ("x", "x" * MAX_TEXT), ("x" * MAX_TEXT, (1,)), ((1,) * 8, "x" * (MAX_TEXT - 15))],
)
async def test_two_prompts_have_together_what_one_may_have(encoder: Any, prompt: Any) -> None:
    call = ChatCall("r", "m", (), SamplingParams(), 10.0, prompt=prompt)
    given = replace(call, encoder=EncoderPrompt(encoder, "encoder_prompt"))
    with pytest.raises(InvalidRequest, match="encoder_prompt holds 83886"):
        await split(given, "n", None)  # type: ignore[arg-type]
