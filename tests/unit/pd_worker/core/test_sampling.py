from __future__ import annotations

import dataclasses

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.types import SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import resolve

GREEDY = GenerationDefaults(eos_token_ids=(2,))
SAMPLED = GenerationDefaults(eos_token_ids=(2, 3), temperature=0.7, top_p=0.8, top_k=20)


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
        ("temperature", SamplingParams(temperature=float("nan"))),
        ("top_p", SamplingParams(top_p=0.0)),
        ("top_p", SamplingParams(top_p=1.5)),
        ("top_p", SamplingParams(top_p=float("nan"))),
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
