"""Tools, tool calls, template variables, open turns and raw prompts, as transformers makes them."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest

from support.data.trained import tokenizer
from triptych.base.errors import InvalidRequest
from triptych.base.request import TemplateOptions
from triptych.pd_worker.frontend.chat_template import ChatTemplate
from triptych.pd_worker.frontend.prompt import PromptBuilder
from triptych.pd_worker.frontend.tokenization import GuardedTokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a café's town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
ARGUMENTS = {"town": "Zürich", "days": 2}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "And tomorrow?"},
]


@functools.cache
def builder(style: str = "qwen", template: str | None = None) -> PromptBuilder:
    made = tokenizer(style)
    image = made.convert_tokens_to_ids("<|image_pad|>" if style == "qwen" else "<image>")
    decoder = SimpleNamespace(
        image_token_id=image, row_token_ids=frozenset(), geometry=SimpleNamespace(vocab_size=600)
    )
    guard = GuardedTokenizer(made.backend_tokenizer, bos_token=made.bos_token or "", specials=(image,))
    return PromptBuilder(ChatTemplate(template or made.chat_template), guard, decoder, 1000)


def raw(value: object) -> bytes:
    return json.dumps(value).encode()


def user(text: str) -> bytes:
    return raw([{"role": "user", "content": text}])


def tokens(messages: bytes, style: str = "qwen", template: str | None = None, **options: object) -> list[int]:
    prompt = builder(style, template).build(messages, [], TemplateOptions(**options))
    return list(prompt.token_ids)


def reference(messages: list, style: str = "qwen", **options: object) -> list[int]:
    # transformers' own loaders give parts, and an empty string for what is not said.
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] and style == "qwen" else ""}
        for m in messages
    ]
    made = tokenizer(style)
    text = made.apply_chat_template(parts, tokenize=False, **options)
    return made(text)["input_ids"]


def test_tools_and_calls_are_written_as_transformers_writes_them():
    expected = reference(TALK, tools=[WEATHER], add_generation_prompt=True)
    assert tokens(raw(TALK), tools=raw([WEATHER])) == expected
    text = tokenizer("qwen").decode(expected)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Zürich", "days": 2}}' in text


def test_arguments_in_a_string_are_the_object_that_they_spell():
    talk = json.loads(json.dumps(TALK))
    talk[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS)
    assert tokens(raw(talk), tools=raw([WEATHER])) == tokens(raw(TALK), tools=raw([WEATHER]))


@pytest.mark.parametrize("arguments", ["[1]", "{", "nonsense", "5"])
def test_arguments_that_are_no_object_are_refused(arguments):
    talk = json.loads(json.dumps(TALK))
    talk[2]["tool_calls"][0]["function"]["arguments"] = arguments
    with pytest.raises(InvalidRequest, match=r"messages\.2\.tool_calls.*JSON object"):
        tokens(raw(talk))


def test_special_text_in_tools_and_calls_stays_plain_text():
    end = tokenizer("qwen").convert_tokens_to_ids("<|im_end|>")
    hostile = json.loads(json.dumps(WEATHER).replace("weather", "<|im_end|>").replace("town", "<|im_end|>"))
    talk = json.loads(json.dumps(TALK).replace("Zürich", "<|im_end|>").replace("get_weather", "<|im_end|>"))
    talk[3]["content"] = "<|im_end|>"
    ordinary = tokens(raw(TALK), tools=raw([WEATHER]))
    assert tokens(raw(talk), tools=raw([hostile])).count(end) == ordinary.count(end)


def test_special_text_in_template_variables_stays_plain_text():
    made = tokenizer("qwen")
    template = "{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = tokens(user("x"), template=template, variables=raw({"style": "<|im_end|>"}))
    assert made.convert_tokens_to_ids("<|im_end|>") not in prompt
    assert made.decode(prompt) == "<|im_end|>x"


VARIABLES = "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        *(
            ({"variables": raw({name: []})}, VARIABLES, name)
            for name in ("messages", "tools", "add_generation_prompt", "raise_exception", "range")
        ),
        *(
            ({"variables": variables}, VARIABLES, VARIABLES)
            for variables in (b"[]", b"{", b'{"a b": 1}', b'{"__class__": 1}', b"[" * 9000)
        ),
        *(
            ({"tools": tools}, "tools", "tools")
            for tools in (b"{}", b"[1]", b'[{"type": "function"}]', b"[" * 9000)
        ),
        ({"style": "llava", "tools": raw([WEATHER])}, "tools", "takes no tools"),
        ({"continue_final_message": True}, "messages", "continue_final_message"),
    ],
)
def test_variables_tools_and_continuations_that_cannot_be_are_refused_by_field(fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        tokens(user("x"), **fields)
    assert caught.value.param == param


def test_a_schema_nested_without_end_is_refused():
    tool = {"type": "function", "function": {"name": "f"}}
    deep = raw([tool]).replace(b'"f"', b'"f", "parameters": ' + b'{"a":' * 200 + b"1" + b"}" * 200)
    with pytest.raises(InvalidRequest, match="nested") as caught:
        tokens(user("x"), tools=deep)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("style", ["qwen", "llava"])
@pytest.mark.parametrize("start", ["Once upon", "Once upon ", "a <|im_"])
def test_a_last_message_can_be_continued(style, start):
    parts = [{"type": "text", "text": start}]
    talk = [{"role": "user", "content": "tell"}, {"role": "assistant", "content": parts}]
    made = tokenizer(style)
    shaped = [{"role": "user", "content": [{"type": "text", "text": "tell"}]}, talk[1]]
    text = made.apply_chat_template(shaped, tokenize=False, continue_final_message=True)
    assert text.endswith(start)
    assert tokens(raw(talk), style=style, continue_final_message=True) == made(text)["input_ids"]


@pytest.mark.parametrize("style", ["qwen", "llava"])
def test_a_raw_text_is_tokenised_as_the_tokenizer_does_it(style):
    text = "<|im_start|>user\nGrüße 你好<|im_end|></s>"
    assert list(builder(style).build_text(text).token_ids) == tokenizer(style)(text)["input_ids"]


@pytest.mark.parametrize(("style", "image"), [("qwen", "<|image_pad|>"), ("llava", "<image>")])
def test_a_raw_text_never_holds_an_image_token(style, image):
    made = tokenizer(style)
    prompt = builder(style).build_text(f"a {image} b").token_ids
    assert made.convert_tokens_to_ids(image) not in prompt
    assert image in made.decode(prompt)


@pytest.mark.parametrize("ids", [[], [600], [1, 2**32 - 1], ["image"]])
def test_token_ids_that_cannot_be_are_refused(ids):
    image = tokenizer("qwen").convert_tokens_to_ids("<|image_pad|>")
    with pytest.raises(InvalidRequest) as caught:
        builder().build_token_ids([image if token == "image" else token for token in ids])
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "x", "tool_calls": TALK[2]["tool_calls"]},
        {"role": "assistant", "tool_calls": [{"id": "a"}]},
        {"role": "assistant", "tool_calls": [{"type": "other", "function": {"name": "f"}}]},
    ],
)
def test_a_message_without_what_its_role_needs_is_refused(message):
    with pytest.raises(InvalidRequest, match="messages") as caught:
        tokens(raw([message]))
    assert caught.value.param == "messages"
