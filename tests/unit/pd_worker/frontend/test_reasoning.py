"""A model's reasoning: found in its template, held to a budget, and free of the answer's grammar."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer

from support.data.reasoning import reasoning_checkpoint
from triptych.base.errors import ConfigError
from triptych.base.types import OutputFormat
from triptych.pd_worker.frontend.chat_template import read_template
from triptych.pd_worker.frontend.grammar import GrammarCompiler
from triptych.pd_worker.frontend.reasoning import Reasoning, ReasoningMask, ReasoningPhase, find_reasoning
from triptych.pd_worker.frontend.tokenization import MarkerDecoder

FORM = OutputFormat("json_schema", json.dumps({"enum": ["red", "teal"]}))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder = reasoning_checkpoint(tmp_path_factory.mktemp("reasons"), special=request.param)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def reasoning(tokenizer) -> Reasoning:
    return find_reasoning("auto", "{{ '</think>' }}", tokenizer)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("prompt", "phase"),
    [
        ("<|im_start|>assistant\n<think>\n", ReasoningPhase.REASONING),
        ("<|im_start|>assistant\n<think>", ReasoningPhase.REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningPhase.ANSWER),
        ("<|im_start|>assistant\n", ReasoningPhase.OPEN),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", ReasoningPhase.OPEN),
        ("", ReasoningPhase.OPEN),
    ],
)
def test_the_end_of_the_prompt_says_where_the_output_begins(tokenizer, reasoning, prompt, phase):
    assert reasoning.phase(ids(tokenizer, prompt)) is phase


@pytest.mark.parametrize(
    ("parser", "template", "found"),
    [
        ("auto", "{{ '</think>' }}", True),
        ("auto", "no markers", False),
        ("none", "{{ '</think>' }}", False),
        ("think", "no markers", True),
        ("qwen3", "no markers", True),
    ],
)
def test_the_parser_is_named_or_found_in_the_template(tokenizer, parser, template, found):
    assert (find_reasoning(parser, template, tokenizer) is not None) is found


@pytest.mark.parametrize(("parser", "named"), [("mistral", r"\[THINK\]"), ("o1", "must be one of auto")])
def test_a_parser_that_cannot_be_is_refused(tokenizer, parser, named):
    with pytest.raises(ConfigError, match=named):
        find_reasoning(parser, "", tokenizer)


def test_markers_stay_in_the_text_and_other_special_tokens_do_not(tokenizer, reasoning):
    output = [*ids(tokenizer, "<think>I see.</think>Red."), *ids(tokenizer, "<|im_end|>")]
    assert MarkerDecoder(tokenizer, reasoning.tokens).decode(output) == "<think>I see.</think>Red."


def write(tokenizer: Tokenizer, mask: ReasoningMask, seed: int) -> list[int]:
    """An output of uniformly drawn tokens that the mask allows, up to the first end that it allows."""
    draw, output = random.Random(seed), list[int]()
    eos = tokenizer.token_to_id("<|im_end|>")
    letters = ids(tokenizer, "I see a colour")
    while len(output) < 200:
        allowed = mask.allowed(output)
        if allowed is not None and allowed[eos]:
            return output
        free = allowed is None or allowed.sum() > 100
        output.append(draw.choice(letters if free else allowed.nonzero()[0].tolist()))
        assert mask.error is None
    raise AssertionError("the output had no end")


@pytest.mark.parametrize("seed", range(5))
def test_reasoning_ends_at_its_budget_and_the_answer_fits_its_form(tokenizer, reasoning, seed):
    eos = (tokenizer.token_to_id("<|im_end|>"),)

    def mask() -> ReasoningMask:
        grammar = GrammarCompiler(tokenizer, eos).state(FORM)
        return ReasoningMask(reasoning, ReasoningPhase.REASONING, grammar, 4, eos)

    output = write(tokenizer, mask(), seed)
    assert output.index(reasoning.end) == 4
    assert json.loads(tokenizer.decode(output[5:])) in ("red", "teal")
    for received in range(len(output)):
        resumed = mask()
        assert resumed.follow(output[:received]), "another attempt goes on where the first one stood"
        allowed = resumed.allowed(output[:received])
        assert allowed is None or allowed[output[received]]


def test_a_form_forbids_the_end_of_the_output_while_it_reasons(tokenizer, reasoning):
    eos = tokenizer.token_to_id("<|im_end|>")
    mask = ReasoningMask(
        reasoning, ReasoningPhase.REASONING, GrammarCompiler(tokenizer, (eos,)).state(FORM), None, (eos,)
    )
    allowed = mask.allowed([])
    assert not allowed[eos]
    assert allowed.sum() == len(allowed) - 1


def test_a_model_that_may_reason_begins_with_the_form_or_with_the_marker(tokenizer, reasoning):
    eos = tokenizer.token_to_id("<|im_end|>")
    grammar = GrammarCompiler(tokenizer, (eos,))
    allowed = ReasoningMask(reasoning, ReasoningPhase.OPEN, grammar.state(FORM), None, (eos,)).allowed([])
    plain = grammar.state(FORM).allowed([])
    assert set(allowed.nonzero()[0]) == {*plain.nonzero()[0], reasoning.start}
    straight = ReasoningMask(reasoning, ReasoningPhase.OPEN, grammar.state(FORM), 0, (eos,))
    assert straight.follow(ids(tokenizer, '"red"'))
    assert not straight.follow(ids(tokenizer, '"red"x'))


def test_the_template_of_a_checkpoint_is_enough(tmp_path):
    folder = reasoning_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert find_reasoning("auto", read_template(folder), tokenizer) is not None
