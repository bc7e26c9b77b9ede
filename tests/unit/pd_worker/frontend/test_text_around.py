"""Ordinary text that an item has around its placeholder is tokenised with what stands beside it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from triptych.base.errors import ConfigError
from triptych.base.types import ItemPlan
from triptych.pd_worker.frontend.chat_template import ChatTemplate
from triptych.pd_worker.frontend.prompt import PromptBuilder, _written_token
from triptych.pd_worker.frontend.tokenization import GuardedTokenizer

TEMPLATE = (
    "{% for m in messages %}user\n{% for p in m.content %}"
    "{% if p.type == 'image' %}<start>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
NEWLINES, SOFT, START, END = 1, 60, 61, 62


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Letters; one, two and three newlines are a token each, and special tokens of pictures."""
    letters = "\nabcdefghijklmnopqrstuvwxyz ?W"
    vocab = {letter: index for index, letter in enumerate(letters, NEWLINES)} | {"\n\n": 50, "\n\n\n": 51}
    return Tokenizer(models.BPE(vocab, [("\n", "\n"), ("\n\n", "\n")]))


def add_special(made: Tokenizer) -> Tokenizer:
    spec = json.loads(made.to_str())
    spec["model"]["vocab"] |= {"<soft>": SOFT, "<start>": START, "<end>": END}
    again = Tokenizer.from_str(json.dumps(spec))
    again.add_special_tokens([AddedToken(text, special=True) for text in ("<soft>", "<start>", "<end>")])
    return again


def builder(made: Tokenizer, head: list[int], tail: list[int]) -> PromptBuilder:
    middle = [START, SOFT, SOFT, END]
    decoder: Any = SimpleNamespace(
        image_token_id=SOFT,
        row_token_ids=frozenset({SOFT}),
        placeholder=lambda plan: middle,
        text_around=lambda plan: (head, tail),
        geometry=SimpleNamespace(vocab_size=70),
    )
    guard = GuardedTokenizer(made, specials=(SOFT, START))
    return PromptBuilder(
        ChatTemplate(TEMPLATE), guard, decoder, 100, image_token_id=START,
        decode=lambda ids: made.decode(list(ids), skip_special_tokens=False).replace(" ", ""),
    )  # fmt: skip


PLAN = ItemPlan("a" * 64, "f" * 64, "image", 2, 8, "float32", 4, ((1, 2),))
MESSAGES = json.dumps(
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat?"}]}]
).encode()


def test_newlines_of_the_template_the_item_and_the_user_merge(tokenizer: Tokenizer) -> None:
    made = add_special(tokenizer)
    prompt = builder(made, [50], [50]).build(MESSAGES, [PLAN])
    (feature,) = prompt.features
    at = feature.placement.offset
    assert prompt.token_ids[at - 1] == 51 and prompt.token_ids[at + 4] == 51
    assert prompt.token_ids[at : at + 4] == (START, SOFT, SOFT, END)
    plain = builder(made, [], []).build(MESSAGES, [PLAN])
    assert plain.token_ids[at - 1] == NEWLINES and plain.token_ids[at + 4] == NEWLINES


def test_the_token_that_a_template_writes_for_an_image_is_found_by_a_trial(tokenizer: Tokenizer) -> None:
    made = add_special(tokenizer)
    assert _written_token(ChatTemplate(TEMPLATE), made, SOFT) == START
    own = ChatTemplate(TEMPLATE.replace("<start>", "<start><soft><end>"))
    assert _written_token(own, made, SOFT) == SOFT
    with pytest.raises(ConfigError, match="2 special tokens for an image"):
        _written_token(ChatTemplate(TEMPLATE.replace("<start>", "<start><end>")), made, SOFT)
