"""The calls of one request without generation: how many at once, in which order, and how they end."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import pytest

from triptych.base.errors import InternalError, InvalidRequest, Overloaded
from triptych.base.request import MAX_QUERY_VECTORS
from triptych.base.types import FinishReason, Task, Usage
from triptych.proxy.call import pairs
from triptych.proxy.call.chat import ChatCall, Done, Output, PoolingOptions, Timings
from triptych.proxy.call.pairs import Pair, PairScoring, best_first
from triptych.proxy.call.pooled import (
    AT_ONCE,
    MAX_INPUTS,
    input_calls,
    pool_all,
    pooled_call,
    rows_of,
    vector_of,
)
from triptych.proxy.media.spool import MediaHold
from triptych.proxy.quotas.call_context import NOBODY, CallContext

FIRST = pooled_call("r", "m", 60.0, PoolingOptions(), "", {})


def done(value: float = 1.0) -> Done:
    return Done(FinishReason.STOP, Usage(3, 0, 0), Timings(), pooled=struct.pack("<f", value))


class Dispatch:
    """Ends each call once `places` allow it; remembers what was under way at once, and what was cancelled."""

    def __init__(self, places: int = 1000, fails: str = "") -> None:
        self.places, self.fails = places, fails
        self.running = self.maximum = 0
        self.calls: list[ChatCall] = []
        self.cancelled: list[object] = []

    async def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]:
        if self.running >= self.places:
            raise Overloaded("full", retry_after=1.0)
        self.running += 1
        self.maximum = max(self.maximum, self.running)
        try:
            await asyncio.sleep(0)
            if call.prompt == self.fails:
                raise InvalidRequest("no", param=call.prompt_param)
            if self.fails:
                await asyncio.Event().wait()
            self.calls.append(call)
            yield [done(float(str(call.prompt)))]
        except asyncio.CancelledError:
            self.cancelled.append(call.prompt)
            raise
        finally:
            self.running -= 1

    def task(self, model: str) -> Task:
        return "score"


async def pool(dispatch: Dispatch, count: int) -> dict[int, float]:
    ends: dict[int, float] = {}
    calls = input_calls(FIRST, [str(n) for n in range(count)], "input", several=True)
    chat = partial(dispatch.chat, context=NOBODY)
    await pool_all(chat, calls, lambda at, end: ends.update({at: float(vector_of(end)[0])}))
    return ends


@pytest.mark.parametrize("places", [1, 5, 1000])
async def test_each_input_has_its_own_vector_and_as_many_are_under_way_as_have_places_or_some(places):
    dispatch = Dispatch(places)
    assert await pool(dispatch, 100) == {n: float(n) for n in range(100)}
    assert dispatch.maximum == min(places, AT_ONCE)


class Patient(Dispatch):
    """Refuses a call only after the one under way has ended."""

    async def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]:
        if self.running:
            while self.running:
                await asyncio.sleep(0)
            raise Overloaded("full", retry_after=1.0)
        async with aclosing(super().chat(call, context)) as batches:
            async for outputs in batches:
                yield outputs


async def test_inputs_that_are_refused_when_the_others_have_ended_are_tried_again():
    assert await pool(Patient(), 3) == {n: float(n) for n in range(3)}


async def test_a_proxy_without_any_place_refuses():
    with pytest.raises(Overloaded):
        await pool(Dispatch(0), 50)


async def test_the_first_error_names_its_input_and_ends_the_others():
    dispatch = Dispatch(fails="7")
    with pytest.raises(InvalidRequest) as caught:
        await pool(dispatch, 10)
    assert caught.value.param == "input[7]"
    assert len(dispatch.cancelled) == 9
    assert dispatch.running == 0


async def test_only_the_first_call_holds_the_places_of_the_reply():
    dispatch = Dispatch()
    await pool(dispatch, 3)
    assert sorted(call.is_part for call in dispatch.calls) == [False, True, True]
    assert all(0 < call.timeout <= FIRST.timeout for call in dispatch.calls)


@pytest.mark.parametrize("pooled", [b"", b"abc"])
def test_what_is_no_vector_is_an_error_of_the_server(pooled):
    with pytest.raises(InternalError):
        vector_of(Done(FinishReason.STOP, Usage(1, 0, 0), Timings(), pooled=pooled))


def test_a_pair_is_one_call_with_the_instruction_first():
    pairs = PairScoring(FIRST, (Pair("q", "query", "d", "documents[0]"),), "Judge.")
    (call,) = pairs.pair_calls()
    assert [(message.role, message.content) for message in call.messages] == [
        ("system", "Judge."),
        ("query", "q"),
        ("document", "d"),
    ]
    assert call.pooling == PoolingOptions(scores=True)
    assert call.prompt_param == "documents[0]"


def test_a_query_of_many_documents_is_embedded_once():
    query = "q"
    pairs = tuple(Pair(query, "query", f"d{n}", f"documents[{n}]") for n in range(3))
    calls, places = PairScoring(FIRST, pairs).text_calls()
    assert [call.prompt for call in calls] == ["q", "d0", "d1", "d2"]
    assert places == [(0, 1), (0, 2), (0, 3)]


def test_the_best_come_first_and_equal_ones_in_order():
    assert best_first([0.1, 0.9, 0.5, 0.9], 0) == [1, 3, 2, 0]
    assert best_first([0.1, 0.9, 0.5, 0.9], 2) == [1, 3]


@pytest.mark.parametrize("task", ["score", "embed", "token_embed"])
async def test_the_calls_of_a_request_with_many_documents_are_not_made_on_the_event_loop(task, monkeypatch):
    made: list[threading.Thread] = []

    class Hold(MediaHold):
        def __init__(self) -> None:
            made.append(threading.current_thread())
            super().__init__()

    class Scores(Dispatch):
        def task(self, model: str) -> Task:
            return task

        async def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]:
            await asyncio.sleep(0)
            yield [done()]

    monkeypatch.setattr(pairs, "MediaHold", Hold)
    documents = tuple(Pair("q", "query", f"d{at}", f"documents[{at}]") for at in range(MAX_INPUTS))
    scores = await PairScoring(FIRST, documents).scores(Scores(), NOBODY, lambda done: None)
    assert scores == [1.0] * MAX_INPUTS
    assert len(made) >= MAX_INPUTS
    assert threading.current_thread() not in made


class Retriever(Dispatch):
    """Gives a query two vectors of its length, and a document the number of bytes of its query."""

    def __init__(self, floats: int = 4) -> None:
        super().__init__()
        self.floats = floats

    async def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]:
        await asyncio.sleep(0)
        self.calls.append(call)
        assert call.pooling is not None and call.pooling.tokens
        if call.messages[0].role == "query":
            pooled = struct.pack("<f", len(call.messages[0].content)) * self.floats
            yield [Done(FinishReason.STOP, Usage(2, 0, 0), Timings(), pooled=pooled)]
        else:
            yield [done(struct.unpack("<f", call.pooling.query[:4])[0])]

    def task(self, model: str) -> Task:
        return "token_embed"


def roles(dispatch: Retriever) -> list[str]:
    return [call.messages[0].role for call in dispatch.calls]


async def test_a_query_of_many_documents_has_its_vectors_once_and_first():
    dispatch, counted, query = Retriever(), [], "qqq"
    pairs_given = tuple(Pair(query, "query", f"d{n}", f"documents[{n}]") for n in range(40))
    scores = await PairScoring(FIRST, pairs_given).scores(dispatch, NOBODY, counted.append)
    assert scores == [3.0] * 40
    assert roles(dispatch) == ["query"] + ["document"] * 40
    assert len(counted) == 41, "the query's tokens are part of the usage"
    assert [call.is_part for call in dispatch.calls].count(False) == 1, "one call holds the reply's places"
    documents = {pair.document_param for pair in pairs_given}
    assert {call.prompt_param for call in dispatch.calls} == {"query", *documents}
    assert all(0 < call.timeout <= FIRST.timeout for call in dispatch.calls)


async def test_queries_of_their_own_documents_have_their_vectors_each():
    dispatch = Retriever()
    pairs_given = tuple(Pair("q" * n, f"text_1[{n}]", f"d{n}", f"text_2[{n}]") for n in range(1, 6))
    scores = await PairScoring(FIRST, pairs_given).scores(dispatch, NOBODY, lambda done: None)
    assert scores == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(roles(dispatch)) == ["document"] * 5 + ["query"] * 5


@pytest.mark.parametrize("queries", [("q", "q"), ("qq", "qqq")])
async def test_a_query_of_more_vectors_than_a_worker_takes_is_refused_by_its_field(queries):
    dispatch = Retriever(MAX_QUERY_VECTORS // 4 + 1)
    pairs_given = tuple(Pair(query, "text_1", "d", "text_2") for query in queries)
    with pytest.raises(InvalidRequest, match="text_1.*shorten") as caught:
        await PairScoring(FIRST, pairs_given).scores(dispatch, NOBODY, lambda done: None)
    assert caught.value.param == "text_1"


def test_vectors_are_one_for_each_token():
    given = Done(FinishReason.STOP, Usage(2, 0, 0), Timings(), pooled=struct.pack("<6f", *range(6)))
    assert [list(row) for row in rows_of(given)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(InternalError, match="one for each token"):
        rows_of(Done(FinishReason.STOP, Usage(4, 0, 0), Timings(), pooled=given.pooled))
