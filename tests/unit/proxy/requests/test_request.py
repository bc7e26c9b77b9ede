from __future__ import annotations

import asyncio
import re

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.types import FinishReason, SamplingParams, Usage
from triptych.proxy.admission import WHOLE_BATCH, make_choices
from triptych.proxy.call.chat import ChatCall, Delta, Done, Started, Timings
from triptych.proxy.requests.request import Choices


def made(n: int) -> Choices:
    return make_choices(ChatCall("r", "m", (), SamplingParams(seed=7), 1.0, n=n), 1, 0.0)


def whole() -> Choices:
    call = ChatCall("r", "m", (), SamplingParams(seed=7), 1.0, whole=True)
    return make_choices(call, 1, 0.0)


def done(prompt: int, completion: int, cached: int) -> Done:
    return Done(FinishReason.STOP, Usage(prompt, completion, cached), Timings())


def test_a_single_choice_is_the_call_itself() -> None:
    choices = made(1)
    (request,) = choices.requests
    assert request.call.label == "r"
    assert request.output is choices.output


def test_choices_differ_in_id_and_index_and_share_label_and_seed() -> None:
    requests = made(3).requests
    calls = [request.call for request in requests]
    assert len({request.request_id for request in requests}) == 3
    assert [call.label for call in calls] == ["r", "r", "r"]
    assert [(call.sampling.seed, call.sampling.choice) for call in calls] == [(7, 0), (7, 1), (7, 2)]
    assert calls[1].media is calls[0].media


def test_ids_say_nothing_of_the_label_and_are_never_drawn_twice() -> None:
    ids = [request.request_id for _ in range(500) for request in made(2).requests]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", drawn) for drawn in ids)


async def test_outputs_carry_their_choice_and_the_prompt_is_reported_once() -> None:
    choices = made(2)
    first, second = choices.requests
    second.emit(Started((1, 2)))
    first.emit(Started((1, 2)))
    second.output.put(Delta("b", [4]))
    first.output.put(Delta("a", [3]))
    assert await choices.output.drain() == [Started((1, 2)), Delta("b", [4], (), 1), Delta("a", [3], (), 0)]


async def test_the_last_choice_to_end_has_the_usage_of_all() -> None:
    choices = made(2)
    first, second = choices.requests
    second.emit(done(10, 5, 8))
    first.emit(done(10, 2, 0))
    early, late = await choices.output.drain()
    assert isinstance(early, Done)
    assert isinstance(late, Done)
    assert (early.choice, early.final) == (1, False)
    assert (late.choice, late.final, late.usage) == (0, True, Usage(10, 7, 0))


async def test_the_failure_of_one_choice_is_the_requests() -> None:
    choices = made(2)
    error = InvalidRequest("no")
    choices.requests[1].output.fail(error)
    with pytest.raises(InvalidRequest) as caught:
        await choices.output.drain()
    assert caught.value is error


async def test_a_reply_in_one_piece_is_woken_by_a_batch_or_the_end_and_not_by_each_token() -> None:
    output = whole().output
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    for position in range(WHOLE_BATCH - 1):
        output.put(Delta("a", [position]))
    await asyncio.sleep(0)
    assert not reader.done()
    output.put(Delta("b", [9]))
    assert len(await reader) == WHOLE_BATCH
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    end = done(1, 65, 0)
    output.put(end)
    assert await reader == [end]


async def test_a_failure_wakes_a_reply_in_one_piece_behind_its_tokens() -> None:
    output = whole().output
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    output.put(Delta("a", [1]))
    output.fail(InvalidRequest("no"))
    assert await reader == [Delta("a", [1])]
    with pytest.raises(InvalidRequest):
        await output.drain()


async def test_a_streamed_replys_reader_is_woken_by_its_first_token() -> None:
    output = made(1).output
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    output.put(Delta("a", [1]))
    assert await reader == [Delta("a", [1])]
