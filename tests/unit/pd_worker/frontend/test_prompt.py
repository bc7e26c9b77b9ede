"""Prompts of chats and of raw texts, as transformers makes them: items, tools, open turns, resumes."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest

from support.data.trained import tokenizer
from support.hostile.operations import operations
from triptych.base.errors import ContextTooLong, InvalidRequest
from triptych.base.request import Message, TemplateOptions, TextPart
from triptych.base.types import ItemPlan
from triptych.pd_worker.frontend.chat_template import ChatTemplate, parse_messages
from triptych.pd_worker.frontend.prompt import PromptBuilder
from triptych.pd_worker.frontend.tokenization import GuardedTokenizer

STYLES = {"qwen": ("<|image_pad|>", "<|im_end|>"), "llava": ("<image>", "</s>")}


@functools.cache
def builder(style: str = "qwen", max_model_len: int = 1000, template: str | None = None) -> PromptBuilder:
    made = tokenizer(style)
    image = made.convert_tokens_to_ids(STYLES[style][0])

    def placeholder(plan):
        frame = made.convert_tokens_to_ids("a")
        return [frame if plan.runs and i == 0 else image for i in range(plan.length)]

    decoder = SimpleNamespace(
        image_token_id=image,
        row_token_ids=frozenset(),
        placeholder=placeholder,
        geometry=SimpleNamespace(vocab_size=600),
    )
    guard = GuardedTokenizer(made.backend_tokenizer, bos_token=made.bos_token or "", specials=(image,))
    return PromptBuilder(ChatTemplate(template or made.chat_template), guard, decoder, max_model_len)


def plan(length: int, runs=None, name: str = "a") -> ItemPlan:
    return ItemPlan(name * 64, "f" * 64, "image", length, 8, "float32", length, runs)


def raw(*messages) -> bytes:
    return json.dumps(messages).encode()


def user(*parts):
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if p else {"type": "image"} for p in parts],
    }


@pytest.mark.parametrize("style", STYLES)
def test_every_image_token_becomes_its_items_placeholder(style):
    image = tokenizer(style).convert_tokens_to_ids(STYLES[style][0])
    prompt = builder(style).build(raw(user("", "left of", "")), [plan(3), plan(5, runs=((1, 4),), name="b")])
    assert [(f.placement.length, f.placement.runs) for f in prompt.features] == [(3, None), (5, ((1, 4),))]
    assert [f.mm_hash[0] for f in prompt.features] == ["a", "b"]
    for feature in prompt.features:
        span = prompt.token_ids[feature.placement.offset : feature.placement.end]
        taking = range(*((1, 5) if feature.placement.runs else (0, 3)))
        assert [i for i, token in enumerate(span) if token == image] == list(taking)
    assert prompt.token_ids.count(image) == 7


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("role", ["system", "user"])
def test_special_text_of_a_user_stays_plain_text(style, role):
    image, end = STYLES[style]
    made = tokenizer(style)
    specials = set(made.convert_tokens_to_ids([image, end]))
    ordinary = builder(style).build(raw({"role": role, "content": "x"}, user("hi")), [])
    hostile = builder(style).build(raw({"role": role, "content": f"{image}{end} x"}, user("hi")), [])
    count = {token: ordinary.token_ids.count(token) for token in specials}
    assert {token: hostile.token_ids.count(token) for token in specials} == count


def test_a_slot_without_an_item_is_refused():
    with pytest.raises(InvalidRequest, match="1 images, videos and sounds, but 0 items"):
        builder("qwen").build(raw(user("", "x")), [])


def test_a_template_that_drops_images_is_refused():
    made = tokenizer("qwen")
    decoder = SimpleNamespace(
        image_token_id=598, row_token_ids=frozenset(), geometry=SimpleNamespace(vocab_size=600)
    )
    dropping = ChatTemplate(
        "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
        "{% endfor %}"
    )
    lossy = PromptBuilder(dropping, GuardedTokenizer(made.backend_tokenizer), decoder, 100)
    with pytest.raises(InvalidRequest, match="0 image tokens for 1 images") as caught:
        lossy.build(raw(user("", "x")), [plan(3)])
    assert caught.value.param == "messages"
    tool = {**user("", "x"), "role": "tool"}
    with pytest.raises(InvalidRequest, match="role tool: send them in a user message") as caught:
        lossy.build(raw(user("see"), tool), [plan(3)])
    assert caught.value.param == "messages[1].content"


def test_more_messages_than_tokens_are_refused_before_they_are_rendered():
    with pytest.raises(InvalidRequest, match="holds 11 messages, more than the 10 tokens"):
        builder("qwen", 10).build(json.dumps([{"role": "user", "content": ""}] * 11).encode(), [])


def test_a_text_far_beyond_the_model_is_refused_before_it_is_tokenised():
    with pytest.raises(InvalidRequest, match="shorten messages"):
        builder("qwen", 10).build(raw(user("x" * 2000)), [])


@pytest.mark.parametrize(
    "messages",
    [
        b"",
        b"{}",
        b"[]",
        b"[" * 5000,
        b'[{"role": "user"}]',
        b'[{"role": "root", "content": "x"}]',
        b'[{"role": "user", "content": 5}]',
        b'[{"role": "user", "content": [{"type": "film"}]}]',
        b'[{"role": "user", "content": [{"type": "text"}]}]',
        b'[{"role": "user", "content": [{"text": "x"}]}]',
        b'[{"role": "user", "content": [null]}]',
        b'[{"role": "user", "content": "\xff"}]',
    ],
)
def test_messages_that_are_none_are_refused(messages):
    with pytest.raises(InvalidRequest, match="messages") as caught:
        parse_messages(messages)
    assert caught.value.param == "messages"


def test_a_resumed_prompt_is_taken_as_it_was():
    plans = [plan(3), plan(5, runs=((1, 4),), name="b")]
    first = builder("qwen").build(raw(user("", "x", "")), plans)
    places = [(f.placement.offset, f.placement.length) for f in first.features]
    assert builder("qwen").resume(first.token_ids, places, plans) == first


@pytest.mark.parametrize("change", ["missing", "moved", "longer", "outside", "vocabulary", "overlap"])
def test_a_resumed_prompt_whose_items_do_not_fit_is_refused(change):
    plans = [plan(3), plan(3, name="b")]
    first = builder("qwen").build(raw(user("", "x", "")), plans)
    tokens = list(first.token_ids)
    places = [(f.placement.offset, f.placement.length) for f in first.features]
    match change:
        case "missing":
            places = places[:1]
        case "moved":
            places[0] = (places[0][0] + 1, 3)
        case "longer":
            places[1] = (places[1][0], 4)
        case "outside":
            tokens.append(598)
        case "vocabulary":
            tokens[0] = 600
        case "overlap":
            places[1] = places[0]
    with pytest.raises(InvalidRequest) as caught:
        builder("qwen").resume(tokens, places, plans)
    assert caught.value.param == "resume"


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a café's town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
ARGUMENTS = {"town": "Zürich", "days": 2}
X = {"role": "user", "content": "x"}
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


def tokens(messages: bytes, style: str = "qwen", template: str | None = None, **options: object) -> list[int]:
    prompt = builder(style, template=template).build(messages, [], TemplateOptions(**options))
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
    assert tokens(raw(*TALK), tools=raw(WEATHER)) == expected
    text = tokenizer("qwen").decode(expected)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Zürich", "days": 2}}' in text


def test_arguments_in_a_string_are_the_object_that_they_spell():
    talk = json.loads(json.dumps(TALK))
    talk[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS)
    assert tokens(raw(*talk), tools=raw(WEATHER)) == tokens(raw(*TALK), tools=raw(WEATHER))


@pytest.mark.parametrize("arguments", ["[1]", "{", "nonsense", "5"])
def test_arguments_that_are_no_object_are_refused(arguments):
    talk = json.loads(json.dumps(TALK))
    talk[2]["tool_calls"][0]["function"]["arguments"] = arguments
    with pytest.raises(InvalidRequest, match=r"messages\.2\.tool_calls.*JSON object"):
        tokens(raw(*talk))


def test_special_text_in_tools_and_calls_stays_plain_text():
    end = tokenizer("qwen").convert_tokens_to_ids("<|im_end|>")
    hostile = json.loads(json.dumps(WEATHER).replace("weather", "<|im_end|>").replace("town", "<|im_end|>"))
    talk = json.loads(json.dumps(TALK).replace("Zürich", "<|im_end|>").replace("get_weather", "<|im_end|>"))
    talk[3]["content"] = "<|im_end|>"
    ordinary = tokens(raw(*TALK), tools=raw(WEATHER))
    assert tokens(raw(*talk), tools=raw(hostile)).count(end) == ordinary.count(end)


def test_special_text_in_template_variables_stays_plain_text():
    made = tokenizer("qwen")
    template = "{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = tokens(raw(X), template=template, variables=b'{"style": "<|im_end|>"}')
    assert made.convert_tokens_to_ids("<|im_end|>") not in prompt
    assert made.decode(prompt) == "<|im_end|>x"


VARIABLES = "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        *(
            ({"variables": json.dumps({name: []}).encode()}, VARIABLES, name)
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
        ({"style": "llava", "tools": raw(WEATHER)}, "tools", "takes no tools"),
        ({"continue_final_message": True}, "messages", "continue_final_message"),
    ],
)
def test_variables_tools_and_continuations_that_cannot_be_are_refused_by_field(fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        tokens(raw(X), **fields)
    assert caught.value.param == param


def test_a_schema_nested_without_end_is_refused():
    tool = {"type": "function", "function": {"name": "f"}}
    deep = raw(tool).replace(b'"f"', b'"f", "parameters": ' + b'{"a":' * 200 + b"1" + b"}" * 200)
    with pytest.raises(InvalidRequest, match="nested") as caught:
        tokens(raw(X), tools=deep)
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
    assert tokens(raw(*talk), style=style, continue_final_message=True) == made(text)["input_ids"]


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
        tokens(raw(message))
    assert caught.value.param == "messages"


def test_a_messages_slots_and_size_cost_the_same_however_long_its_text_is():
    few, many = (
        operations(
            lambda text=text: (Message("user", text).slots, Message("user", [TextPart(text)]).characters)
        )
        for text in ("a b " * 2, "a b " * 50_000)
    )
    assert many == few


def test_a_long_prompt_makes_the_interpreter_walk_over_none_of_its_tokens():
    """The engine's thread wants the interpreter while a prompt is prepared in another one."""
    prompts = builder(max_model_len=100_000)
    few, many = (
        operations(lambda text=text: prompts.build(raw(user(text, "", text)), [plan(3)]))
        for text in ("a red dog " * 4, "a red dog " * 4000)
    )
    assert many < 1.2 * few


def test_a_text_that_is_too_long_anyway_is_refused_before_it_is_rendered(monkeypatch):
    prompts = builder(max_model_len=10)
    monkeypatch.setattr(prompts, "_render", lambda *_: pytest.fail("it was rendered"))
    with pytest.raises(ContextTooLong, match="1281 characters"):
        prompts.build(raw(user("a" * 1281)), [])


THOUGHTLESS = "{% for m in messages %}{{ (m.content or '').split('</think>')[-1] }}{% endfor %}"


@pytest.mark.parametrize(
    "long",
    [
        {"content": f"<think>{'a' * 1281}</think>fits"},
        {"content": "fits", "reasoning_content": "a" * 1281},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"text": "a" * 1281}}}]},
    ],
    ids=["thoughts", "reasoning", "arguments"],
)
def test_what_the_template_leaves_out_of_an_earlier_answer_does_not_make_a_prompt_too_long(long):
    prompts = builder(max_model_len=10, template=THOUGHTLESS)
    assert len(prompts.build(raw({"role": "assistant", **long}, user("a")), []).token_ids) <= 10


def test_an_earlier_answer_that_the_template_writes_is_too_long_once_it_is_rendered(monkeypatch):
    prompts = builder(max_model_len=10, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(prompts._tokenizer, "encode", lambda _: pytest.fail("it was tokenised"))
    with pytest.raises(ContextTooLong, match="1281 characters"):
        prompts.build(raw({"role": "assistant", "content": "a" * 1281}), [])
