from __future__ import annotations

import dataclasses
import gc

import pytest

from triptych.base.errors import InvalidRequest, Overloaded
from triptych.base.types import ItemPlan, OutputFormat, PositionLogprobs, SamplingParams, TokenLogprob
from triptych.protos import common_pb2
from triptych.protos.convert import (
    error_from_proto,
    error_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    plan_from_proto,
    plan_nbytes,
    plan_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)

PLAN = ItemPlan("a" * 64, "b" * 64, "image", 6, 8, "bfloat16", 8, ((1, 2), (4, 4)), (1, 4, 6), (0, 0, 9))
INT8 = dataclasses.replace(PLAN, dtype="int8", scales=2)
FORMS = (
    None,
    OutputFormat("json_object"),
    OutputFormat("json_schema", "{}"),
    OutputFormat("json_schema", "{}", open=True),
    OutputFormat("regex", "a+"),
    OutputFormat("choices", choices=("yes", "no")),
)


@pytest.mark.parametrize("seconds", [float("inf"), float("-inf"), float("nan"), -1.0, 1e9, 0.0])
def test_a_wait_that_no_worker_can_mean_is_not_passed_on(seconds: float) -> None:
    assert error_from_proto(common_pb2.Error(code="overloaded", retry_after=seconds)).retry_after is None


def test_an_error_comes_back_as_the_same_kind_with_all_that_it_says() -> None:
    error = error_from_proto(error_to_proto(Overloaded("full", param="items", retry_after=2.0)))
    assert type(error) is Overloaded
    assert (error.message, error.param, error.retry_after) == ("full", "items", 2.0)


def test_an_error_that_quotes_half_a_surrogate_pair_can_be_sent() -> None:
    assert error_to_proto(InvalidRequest("no \ud83d here")).message == "no ? here"


@pytest.mark.parametrize("plan", [PLAN, dataclasses.replace(PLAN, runs=None, grid_thw=(), layout=()), INT8])
def test_a_plan_comes_back_whole(plan: ItemPlan) -> None:
    assert plan_from_proto(plan_to_proto(plan)) == plan


@pytest.mark.parametrize("changes", [{"dtype": "object"}, {"mm_hash": "no key"}])
def test_a_plan_whose_key_or_dtype_cannot_be_one_is_refused(changes: dict[str, str]) -> None:
    message = plan_to_proto(PLAN)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequest):
        plan_from_proto(message)


@pytest.mark.parametrize("changes", [{"scales": 0}, {"scales": 3}, {"dtype": "bfloat16"}])
def test_scales_that_do_not_fit_a_row_are_refused(changes: dict[str, object]) -> None:
    message = plan_to_proto(INT8)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequest, match="a scale for each equal part"):
        plan_from_proto(message)


@pytest.mark.parametrize("plan", [PLAN, INT8])
def test_the_bytes_of_a_message_are_those_of_its_plan(plan: ItemPlan) -> None:
    assert plan_nbytes(plan_to_proto(plan)) == plan.nbytes


def test_what_a_client_left_out_of_its_sampling_stays_left_out() -> None:
    assert sampling_from_proto(sampling_to_proto(SamplingParams())) == SamplingParams()


@pytest.mark.parametrize("form", FORMS)
def test_every_field_of_the_sampling_comes_back(form: OutputFormat | None) -> None:
    sampling = SamplingParams(
        max_tokens=0,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=4,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        min_p=0.125,
        logit_bias=((1, 0.5), (2, -0.5)),
        choice=1,
        logprobs=0,
        output_format=form,
        bad_words=("sea",),
        include_stop_str_in_output=True,
        thinking_token_budget=9,
    )
    untold = {
        field.name for field in dataclasses.fields(sampling) if getattr(sampling, field.name) == field.default
    }
    assert untold <= {"output_format"}
    assert sampling_from_proto(sampling_to_proto(sampling)) == sampling


def test_log_probabilities_are_nothing_that_the_garbage_collector_walks_over():
    token = TokenLogprob(7, -0.5, "a", b"a")
    assert not gc.is_tracked(token)
    assert not gc.is_tracked(PositionLogprobs(token, (token,) * 20))


def test_log_probabilities_come_back() -> None:
    chosen, other = TokenLogprob(7, -0.5, "a", b"a"), TokenLogprob(8, -1.5, "\ufffd", b"\xc3")
    position = PositionLogprobs(chosen, (chosen, other))
    assert logprobs_from_proto(logprobs_to_proto(position)) == position
