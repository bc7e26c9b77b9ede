"""Bad words as token ids, also where vLLM lets one through."""

from __future__ import annotations

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.types import SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import bad_word_ids, banned_ids, resolve

#: Texts of a tokenizer, in which a blank is part of the word behind it.
IDS = {
    "sea": [1],
    " sea": [2],
    "seaside": [1, 5],
    " seaside": [2, 5],
    "of": [6],
    " of": [7, 6],
    "x": [8],
    " x": [8],
    "circle": [3, 4],
    " circle": [9],
}


def encode(text: str) -> list[int]:
    return IDS.get(text, [])


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["sea"], ((1,), (2,))),
        (["  sea", "sea"], ((1,), (2,))),
        (["seaside"], ((1, 5), (2, 5))),
        (["of"], ((6,),)),
        (["circle"], ((3, 4), (9,))),
        (["x"], ((8,),)),
        ([], ()),
    ],
)
def test_a_word_is_banned_at_the_start_and_behind_a_blank(words, ids):
    assert bad_word_ids(words, encode) == ids


def test_a_word_without_tokens_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="bad_words"):
        bad_word_ids(["nothing"], encode)


def test_only_what_completes_a_word_is_banned():
    words = ((1,), (2, 5), (2, 2, 9))
    assert banned_ids(words, []) == [1]
    assert banned_ids(words, [2]) == [1, 5]
    assert banned_ids(words, [2, 2]) == [1, 5, 9]
    assert banned_ids(words, [2, 2, 4]) == [1]


@pytest.mark.parametrize("words", [("",), ("  ",), ("w" * 257,), ("w",) * 129])
def test_words_beyond_the_limits_are_refused_by_name(words):
    with pytest.raises(InvalidRequest) as refused:
        resolve(SamplingParams(bad_words=words), GenerationDefaults(eos_token_ids=(1,)), 1, 100)
    assert refused.value.param == "bad_words"
