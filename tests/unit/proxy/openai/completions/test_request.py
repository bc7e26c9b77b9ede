from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.proxy.openai.completions.request import MAX_PROMPTS, CompletionRequest, parse_completion


def _parsed(**body: Any) -> CompletionRequest:
    return parse_completion(json.dumps(body).encode(), "r1", timeout=9.0, max_choices=4)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("hello", ("hello",)), ([1, 2], ((1, 2),)), (["a", "b"], ("a", "b")), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_all_four_forms_of_a_prompt_are_taken(prompt: Any, prompts: Any):
    request = _parsed(prompt=prompt)
    assert request.options.prompts == prompts
    assert tuple(call.prompt for call in request.calls) == prompts
    assert all(call.messages == () for call in request.calls)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ({"prompt": "hi"}, ("hi",)),
        ({"prompt_token_ids": [1, 2]}, ((1, 2),)),
        ([{"prompt": "a"}, {"prompt": "b"}], ("a", "b")),
    ],
)
def test_a_prompt_may_be_an_object(prompt: Any, prompts: Any):
    assert _parsed(prompt=prompt).options.prompts == prompts


def test_every_prompt_is_a_call_of_its_own_with_the_same_sampling():
    request = _parsed(prompt=["a", "b"], n=3, seed=5, temperature=0.5, max_tokens=7, cache_salt="s")
    first, second = request.calls
    assert (first.label, second.label) == ("r1", "r1#p1")
    assert first.sampling == second.sampling
    assert (first.sampling.seed, first.sampling.max_tokens, first.n, first.cache_salt) == (5, 7, 3, "s")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1 << 32]]}, "prompt[0]"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "n": 5}, "n"),
        ({"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
        ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as refused:
        _parsed(**body)
    assert refused.value.param == param
    assert param.split("[")[0] in refused.value.message
