"""Sampling parameters become vLLM's, or an error that names the field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.types import OutputFormat, SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import ResolvedSampling, resolve
from triptych.pd_worker.vllm.calls import check_sampling, engine_seed, replays, sampling_params

DEFAULTS = GenerationDefaults(eos_token_ids=(2, 7))
FORMAT = OutputFormat("json_object")


def resolved(**given: object) -> ResolvedSampling:
    return resolve(SamplingParams(**{"max_tokens": 20, **given}), DEFAULTS, 10, 100)


def params(received: tuple[int, ...] = (), *, replay: bool = False, **given: object) -> dict[str, object]:
    return sampling_params(resolved(**given), received, None, replay=replay)


def test_a_greedy_request_says_how_it_ends_and_nothing_of_chance():
    assert params() == {
        "max_tokens": 20,
        "min_tokens": 0,
        "ignore_eos": True,
        "stop_token_ids": [2, 7],
        "detokenize": False,
        "temperature": 0.0,
    }


def test_stop_tokens_are_the_clients_and_the_checkpoints():
    assert params(stop_token_ids=(5,))["stop_token_ids"] == [2, 5, 7]


def test_a_continuation_counts_the_tokens_that_have_come():
    made = params((4, 4, 6), min_tokens=5)
    assert (made["max_tokens"], made["min_tokens"]) == (17, 2)


def test_a_replay_counts_from_the_prompt():
    made = params((4, 4, 6), replay=True, min_tokens=5)
    assert (made["max_tokens"], made["min_tokens"]) == (20, 5)


def test_the_least_number_of_tokens_counts_though_the_end_is_ignored():
    # Both engines forbid end-of-sequence tokens before it, ignored or not.
    assert params(ignore_eos=True, min_tokens=5)["min_tokens"] == 5


def test_bad_words_pass_as_texts_and_those_of_several_tokens_are_generated_again():
    assert params(bad_words=("sea", "of"))["bad_words"] == ["sea", "of"]
    assert "bad_words" not in params()
    single = replace(resolved(), bad_words=("sea",), bad_word_ids=((1,), (2,)))
    several = replace(resolved(), bad_words=("seaside",), bad_word_ids=((1,), (2, 5)))
    assert replays(several, (4,), None) and not replays(single, (4,), None) and not replays(several, (), None)


def test_a_sampled_request_has_all_of_its_parameters():
    made = params(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=3)
    assert {name: made[name] for name in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
    }


def test_choices_and_continuations_draw_other_numbers_and_repetitions_the_same():
    seeds = [engine_seed(3, 0, 0), engine_seed(3, 1, 0), engine_seed(4, 0, 0), engine_seed(3, 0, 5)]
    assert len(set(seeds)) == 4 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert params((4, 4), temperature=1.0, seed=3)["seed"] == engine_seed(3, 0, 2)
    assert params((4, 4), replay=True, temperature=1.0, seed=3)["seed"] == engine_seed(3, 0, 0)


def test_penalties_pass_and_those_that_are_off_are_left_out():
    made = params(presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2)
    assert (made["presence_penalty"], made["frequency_penalty"]) == (0.5, -0.5)
    assert made["repetition_penalty"] == 1.2
    assert not {"presence_penalty", "frequency_penalty", "repetition_penalty"} & params().keys()


def test_tokens_before_a_continuation_are_penalised_by_a_bias():
    made = params((4, 4, 6), presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((6, 1.0), (9, 2.0)))
    assert made["logit_bias"] == {"4": -1.0, "6": 0.25, "9": 2.0}


def test_one_more_logprob_is_asked_for_than_is_reported():
    assert "logprobs" not in params()
    assert [params(logprobs=count)["logprobs"] for count in (0, 1, 19, 20)] == [0, 2, 20, 20]


@pytest.mark.parametrize(
    ("output_format", "expected"),
    [
        (OutputFormat("json_object"), {"json_object": True}),
        (
            OutputFormat("json_schema", '{"type": "object", "x-guidance": {"a": 1}}'),
            {"json": {"type": "object"}},
        ),
        (OutputFormat("regex", "[ab]+"), {"regex": "[ab]+"}),
        (OutputFormat("choices", choices=("yes", "no", "yes")), {"choice": ["yes", "no"]}),
    ],
)
def test_an_output_format_is_one_of_vllms(output_format, expected):
    made = sampling_params(resolved(), (), output_format, replay=False)
    assert made["structured_outputs"] == expected


@pytest.mark.parametrize(
    ("given", "output_format", "field"),
    [({"temperature": 2.5}, None, "temperature"), ({"min_tokens": 3}, FORMAT, "min_tokens")],
)
def test_what_vllm_cannot_do_is_refused_by_name(given, output_format, field):
    sampling = replace(resolved(), **given)
    with pytest.raises(InvalidRequest, match="vLLM") as refused:
        check_sampling(sampling, output_format)
    assert refused.value.param == field


def test_only_formats_and_presence_penalties_are_generated_again():
    plain, present = resolved(), resolved(presence_penalty=0.1)
    assert (
        not replays(plain, (4,), None) and not replays(present, (), None) and not replays(plain, (), FORMAT)
    )
    assert replays(present, (4,), None) and replays(plain, (4,), FORMAT)
