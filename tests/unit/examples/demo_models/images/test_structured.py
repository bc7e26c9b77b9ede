"""What training makes of answers in JSON: tokens, weights, and names that are kept from it."""

from __future__ import annotations

import json
import random

from transformers import AutoTokenizer

from examples.demo_models.images.batches import Encoder, TokenSequence
from examples.demo_models.images.samples import random_sample
from examples.demo_models.images.structured import (
    NAMES,
    SENTENCE,
    TOOLS,
    TRAINED_NAMES,
    TRAINED_TOOLS,
    UNKNOWN,
    VALUE,
    WRITTEN,
    drawn_fields,
    json_text,
    value_of,
    weighed_json,
)
from examples.demo_models.images.tokens import JSON_TOKENS, TEMPLATE, corpus, make_tokenizer
from triptych.apps.launch.model_path import DEMO_MODEL


def test_the_stored_tokenizer_and_template_are_the_scripts() -> None:
    stored, made = AutoTokenizer.from_pretrained(DEMO_MODEL), make_tokenizer()
    assert stored.get_vocab() == made.get_vocab()
    assert (DEMO_MODEL / "chat_template.jinja").read_text() == TEMPLATE == stored.chat_template
    lines = [*corpus(1, 50), json_text({"shape_color": "red", "items": [{"n": 2}, {"place": "top left"}]})]
    assert [stored.encode(line) for line in lines] == [made.encode(line) for line in lines]


def test_a_word_or_mark_of_json_is_one_token_and_text_gives_itself_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for word in JSON_TOKENS:
        assert len(tokenizer.tokenize(word)) == 1, word
    for line in corpus(2, 50):
        assert tokenizer.decode(tokenizer.encode(line)) == line


def test_what_the_model_decides_weighs_and_what_the_grammar_writes_hardly() -> None:
    value = {"paint": "red", "items": [{"form": "cross"}, {"form": "square"}], "n": 12, "text": "None."}
    text, weights = weighed_json(value)
    assert text == json_text(value) and len(weights) == len(text)

    def of(part: str) -> set[float]:
        start = text.index(part)
        return set(weights[start : start + len(part)])

    assert of("paint") == of('":') == of("form") == of("items") == {WRITTEN}
    assert of('red"') == of('cross"') == of("12") == {VALUE}
    assert of('None."') == {SENTENCE}
    assert weights[text.index("},{") + 1] == weights[text.index("]")] == VALUE  # whether the list goes on
    assert weights[text.index("12") + 2] == SENTENCE  # the number's end


def test_in_every_fourth_answer_a_text_begins_behind_a_mark_of_its_own() -> None:
    tokenizer = make_tokenizer().backend_tokenizer
    encoder, answer = Encoder(tokenizer), weighed_json({"n": 1, "text": "There is no image."})
    marks = []
    for _ in range(8):
        sequence = TokenSequence()
        encoder.add_json(sequence, *answer)
        assert tokenizer.decode(sequence.ids) == answer[0]
        tokens = [tokenizer.id_to_token(each) for each in sequence.ids]
        start = tokens.index("There")
        assert sequence.weights[start] == SENTENCE
        marks.append(tokens[start - 1])
        if marks[-1] == '"':
            assert tokens[start - 2] == '":' and sequence.weights[start - 2] == 0  # never to be learnt
    assert marks == ['":"', '":"', '":"', '"'] * 2


def test_the_name_of_a_tool_weighs_where_the_model_chooses_it() -> None:
    call = {"name": "say", "arguments": {"n": 1}}
    for chosen, weight in ((True, VALUE), (False, WRITTEN)):
        text, weights = weighed_json(call, chosen)
        assert text == json.dumps(call, separators=(",", ":"))
        assert weights[text.index("say")] == weight
        assert weights[text.index("1")] == VALUE


def test_names_that_are_kept_from_training_are_in_no_sample_of_it() -> None:
    kept = {names[-1] for names in (*NAMES.values(), *TOOLS.values())} | set(UNKNOWN[-3:])
    trained = {name for group in (TRAINED_NAMES, TRAINED_TOOLS) for names in group.values() for name in names}
    assert not kept & trained
    rng = random.Random(0)
    seen: set[str] = set()
    for _ in range(300):
        sample = random_sample(rng, "train", rng.choice((1, 2)), 1)
        turn = sample.turns[0]
        fields = drawn_fields(rng, turn.query, sample.scenes, turn.answer, "train")
        seen |= set(value_of(fields))
    assert not kept & seen and len(seen) > 60
