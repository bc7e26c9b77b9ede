from __future__ import annotations

import pytest

from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, RawPrompt
from triptych.proxy.pd.router import least_tokens, takes, too_long
from triptych.proxy.requests.instructions import ResumeState


def call(prompt: RawPrompt | None = None, max_tokens: int | None = None, param: str = "prompt") -> ChatCall:
    sampling = SamplingParams(max_tokens=max_tokens)
    return ChatCall("r", "m", (), sampling, 1.0, prompt=prompt, prompt_param=param)


def test_text_counts_nothing_and_the_output_one_token_at_least() -> None:
    assert least_tokens(call("a long text"), (), None) == 1
    assert least_tokens(call(), (), None) == 1
    assert least_tokens(call(max_tokens=7), (), None) == 7


def test_token_ids_and_items_are_known() -> None:
    assert least_tokens(call((1, 2, 3)), (), None) == 4
    assert least_tokens(call((1, 2, 3), 10), (), None) == 13
    assert least_tokens(call(max_tokens=2), (16, 16, 4), None) == 38


def test_a_resumed_request_is_known_whole() -> None:
    """One whose output fills the model length has only its end to be told."""
    resume = ResumeState((1,) * 20, (), (2,) * 5, 9)
    assert least_tokens(call("text"), (16,), resume) == 25
    assert least_tokens(call("text", 5), (16,), resume) == 25
    assert least_tokens(call("text", 50), (16,), resume) == 70


def test_a_limit_is_what_prompt_and_output_may_have_together() -> None:
    assert [takes(10, tokens) for tokens in (9, 10, 11)] == [True, True, False]
    assert takes(0, 10**9)


@pytest.mark.parametrize(
    ("asked", "tokens", "param", "words"),
    [
        (call(max_tokens=600), 600, "max_tokens", "max_tokens is 600"),
        (call((1,) * 500, 100), 600, "max_tokens", "the prompt has at least 500"),
        (call((1,) * 600, 8), 608, "prompt", "at least 600 tokens"),
        (call((1,) * 600, 8, "decoder_prompt"), 608, "decoder_prompt", "shorten decoder_prompt"),
        (call(), 513, "messages", "at least 512 tokens"),
    ],
)
def test_the_error_names_the_field_to_shorten_and_the_largest_limit(asked, tokens, param, words):
    error = too_long(asked, tokens, 512)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    assert words in error.message
    assert "the model takes 512" in error.message
