from __future__ import annotations

import re

import pytest

from triptych.errors import InvalidRequest
from triptych.proxy.call.chat import ChatCall, Delta, Done, Started, Timings
from triptych.proxy.requests.choices import Choices, make_choices
from triptych.types import FinishReason, SamplingParams, Usage


def made(n: int) -> Choices:
    return make_choices(ChatCall("r", "m", (), SamplingParams(seed=7), 1.0, n=n), 1, 0.0)


def done(prompt: int, completion: int, cached: int) -> Done:
    return Done(FinishReason.STOP, Usage(prompt, completion, cached), Timings())


def test_a_single_choice_is_the_call_itself() -> None:
    choices = made(1)
    (flow,) = choices.flows
    assert flow.call.label == "r"
    assert flow.outbox is choices.outbox


def test_choices_differ_in_id_and_index_and_share_label_and_seed() -> None:
    flows = made(3).flows
    calls = [flow.call for flow in flows]
    assert len({flow.request_id for flow in flows}) == 3
    assert [call.label for call in calls] == ["r", "r", "r"]
    assert [(call.sampling.seed, call.sampling.choice) for call in calls] == [(7, 0), (7, 1), (7, 2)]
    assert calls[1].media is calls[0].media


def test_ids_say_nothing_of_the_label_and_are_never_drawn_twice() -> None:
    ids = [flow.request_id for _ in range(500) for flow in made(2).flows]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", drawn) for drawn in ids)


async def test_outputs_carry_their_choice_and_the_prompt_is_told_once() -> None:
    choices = made(2)
    first, second = choices.flows
    second.emit(Started((1, 2)))
    first.emit(Started((1, 2)))
    second.emit_tokens(Delta("b", [4]))
    first.emit_tokens(Delta("a", [3]))
    assert await choices.outbox.take() == [Started((1, 2)), Delta("b", [4], (), 1), Delta("a", [3], (), 0)]


async def test_the_last_choice_to_end_has_the_usage_of_all() -> None:
    choices = made(2)
    first, second = choices.flows
    second.emit(done(10, 5, 8))
    first.emit(done(10, 2, 0))
    early, late = await choices.outbox.take()
    assert isinstance(early, Done)
    assert isinstance(late, Done)
    assert (early.choice, early.final) == (1, False)
    assert (late.choice, late.final, late.usage) == (0, True, Usage(10, 7, 0))


async def test_the_failure_of_one_choice_is_the_requests() -> None:
    choices = made(2)
    error = InvalidRequest("no")
    choices.flows[1].outbox.fail(error)
    with pytest.raises(InvalidRequest) as caught:
        await choices.outbox.take()
    assert caught.value is error
