from __future__ import annotations

import dataclasses

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.types import GREEDY as OFF
from triptych.base.types import SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import bad_word_ids, banned_ids, resolve

NAN, INF = float("nan"), float("inf")
GREEDY = GenerationDefaults(eos_token_ids=(2,))
SAMPLED = GenerationDefaults(
    eos_token_ids=(2, 3), sampling=dataclasses.replace(OFF, temperature=0.7, top_p=0.8, top_k=20)
)


def test_a_silent_request_takes_the_checkpoints_defaults():
    resolved = resolve(SamplingParams(), SAMPLED, 10, 100)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.7, 0.8, 20)
    assert resolved.max_tokens == 90
    assert resolved.stop_token_ids == {2, 3}


def test_a_checkpoint_that_does_not_sample_is_greedy_for_a_silent_request():
    assert resolve(SamplingParams(), GREEDY, 10, 100).greedy


def test_a_clients_temperature_samples_though_the_checkpoint_does_not():
    resolved = resolve(SamplingParams(temperature=1.0), GREEDY, 10, 100)
    assert resolved.temperature == 1.0
    assert not resolved.greedy


def test_the_checkpoints_max_tokens_is_cut_to_the_room_left():
    defaults = dataclasses.replace(GREEDY, max_tokens=64)
    assert resolve(SamplingParams(), defaults, 10, 100).max_tokens == 64
    assert resolve(SamplingParams(), defaults, 90, 100).max_tokens == 10


def test_ignore_eos_leaves_only_the_clients_stop_tokens():
    resolved = resolve(SamplingParams(ignore_eos=True, stop_token_ids=(9,)), SAMPLED, 10, 100)
    assert resolved.stop_token_ids == {9}


def test_a_prompt_longer_than_the_model_names_both_numbers():
    with pytest.raises(InvalidRequest, match=r"120 tokens.*takes 100") as caught:
        resolve(SamplingParams(), GREEDY, 120, 100)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("max_tokens", SamplingParams(max_tokens=0)),
        ("max_tokens", SamplingParams(max_tokens=91)),
        ("min_tokens", SamplingParams(max_tokens=5, min_tokens=6)),
        ("min_tokens", SamplingParams(min_tokens=91)),
        ("temperature", SamplingParams(temperature=-0.1)),
        ("temperature", SamplingParams(temperature=NAN)),
        ("temperature", SamplingParams(temperature=INF)),
        ("presence_penalty", SamplingParams(presence_penalty=NAN)),
        ("frequency_penalty", SamplingParams(frequency_penalty=2.5)),
        ("frequency_penalty", SamplingParams(frequency_penalty=INF)),
        ("repetition_penalty", SamplingParams(repetition_penalty=0.0)),
        ("repetition_penalty", SamplingParams(repetition_penalty=NAN)),
        ("min_p", SamplingParams(min_p=1.5)),
        ("min_p", SamplingParams(min_p=NAN)),
        ("logprobs", SamplingParams(logprobs=21)),
        ("top_p", SamplingParams(top_p=0.0)),
        ("top_p", SamplingParams(top_p=1.5)),
        ("top_p", SamplingParams(top_p=NAN)),
        ("top_k", SamplingParams(top_k=-2)),
        ("stop", SamplingParams(stop=("",))),
        ("stop", SamplingParams(stop=("x",) * 17)),
        ("stop", SamplingParams(stop=("x" * 1025,))),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(field, params):
    with pytest.raises(InvalidRequest, match=field) as caught:
        resolve(params, GREEDY, 10, 100)
    assert caught.value.param == field


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


@pytest.mark.parametrize(("asked", "used"), [(0.0, 0.0), (5e-6, 0.0), (2e-5, 0.01), (0.01, 0.01), (0.3, 0.3)])
def test_a_temperature_close_to_0_is_greedy_or_as_low_as_accuracy_allows(asked, used):
    assert resolve(SamplingParams(temperature=asked), GREEDY, 10, 100).temperature == used
