from __future__ import annotations

import time

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from support.engine.engine_requests import make_request
from triptych.base.delta import Delta
from triptych.base.types import FinishReason, KeptKV
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.events.streams import EventStream, EventStreams
from triptych.protos import common_pb2, pd_pb2
from triptych.protos.pd_pb2 import Admitted, Finished, RequestEvent

NAMES = {"request_id": "r", "attempt": 1, "proxy_id": "p"}


def opened(*, offers: bool = True, step_tokens: bool = False) -> tuple[EventStreams, EventStream]:
    streams = EventStreams(lambda ids, proxy: None, offers=offers)
    stream = streams.attach("p", [], step_tokens=step_tokens)
    streams.open("p", "r", 1)
    return streams, stream


def request_of(cached_tokens: int | None = None) -> EngineRequest:
    request = make_request("r", 3, proxy_id="p")
    request.cached_tokens = cached_tokens
    return request


def token(position: int) -> Delta:
    return Delta("x", (position,), position=position, **NAMES)


async def kinds(stream: EventStream) -> list[str]:
    message = await stream.next()
    assert message is not None
    listed = ["tokens"] * len(message.tokens.request_ids)
    return listed + [
        "offer" if each.tokens.offered else str(each.WhichOneof("body")) for each in message.events
    ]


async def test_a_prefill_worker_offers_a_request_once_with_its_first_token() -> None:
    streams, stream = opened()
    streams.deliver([token(0)])
    assert await kinds(stream) == ["offer"]
    streams.deliver([token(1)])
    assert await kinds(stream) == ["tokens"]


async def test_other_workers_offer_nothing() -> None:
    streams, stream = opened(offers=False)
    streams.deliver([token(0)])
    assert await kinds(stream) == ["tokens"]


async def test_an_offer_may_come_later_and_goes_with_the_next_tokens_of_its_attempt() -> None:
    streams, stream = opened(offers=False, step_tokens=True)
    streams.deliver([RequestEvent(admitted=Admitted(), **NAMES), token(0)])
    assert await kinds(stream) == ["admitted", "tokens"]
    streams.offer("p", "r", 2)
    streams.offer("p", "gone", 1)
    streams.deliver([token(1)])
    assert await kinds(stream) == ["tokens"]
    streams.offer("p", "r", 1)
    streams.deliver([token(2)])
    assert await kinds(stream) == ["offer"]
    streams.deliver([token(3)])
    assert await kinds(stream) == ["tokens"]


async def test_what_has_ended_is_not_offered() -> None:
    streams, stream = opened()
    end = RequestEvent(finished=Finished(reason=FinishReason.STOP), **NAMES)
    streams.deliver([token(0), end])
    assert await kinds(stream) == ["tokens", "finished"]


async def test_an_offer_is_sent_again_to_a_proxy_that_lost_its_stream() -> None:
    streams, stream = opened()
    streams.deliver([token(0)])
    assert await kinds(stream) == ["offer"]
    again = streams.attach("p", [pd_pb2.Reattach(request_id="r", attempt=1, position=1)])
    streams.deliver([token(1)])
    assert await kinds(again) == ["offer"]


async def test_an_offer_before_the_first_token_goes_with_it() -> None:
    streams, stream = opened(offers=False)
    streams.offer("p", "r", 1)
    streams.deliver([token(0)])
    assert await kinds(stream) == ["offer"]


@pytest.mark.parametrize("found", [None, 0, 32])
async def test_an_offer_says_what_the_engine_has_found_in_its_cache_and_says_it_again(
    found: int | None,
) -> None:
    streams, stream = opened(offers=False)
    request = request_of()
    streams.follow(request)
    streams.deliver([token(0)])
    assert await kinds(stream) == ["tokens"]
    request.cached_tokens = found
    streams.offer("p", "r", 1)
    for position in (1, 2):
        streams.deliver([token(position)])
        [event] = (await stream.next() or pd_pb2.StepEvents()).events
        assert event.tokens.offered
        assert (event.tokens.cached_tokens if event.tokens.HasField("cached_tokens") else None) == found
        stream = streams.attach("p", [pd_pb2.Reattach(request_id="r", attempt=1, position=position + 1)])


async def test_to_an_earlier_proxy_an_offer_is_tokens_like_any_other() -> None:
    streams, stream = opened()
    streams.follow(request_of(cached_tokens=16))
    streams.deliver([token(0)])
    [offer] = (await stream.next() or pd_pb2.StepEvents()).events
    assert offer.tokens.cached_tokens == 16
    earlier = _earlier_event().FromString(offer.SerializeToString())
    assert earlier.WhichOneof("body") == "tokens"
    assert (list(earlier.tokens.token_ids), earlier.tokens.text) == ([0], "x")


def _earlier_event() -> type[RequestEvent]:
    """RequestEvent as 0.2.0 has it, whose tokens know no offer."""
    files = [descriptor_pb2.FileDescriptorProto() for _ in range(2)]
    common_pb2.DESCRIPTOR.CopyToProto(files[0])
    pd_pb2.DESCRIPTOR.CopyToProto(files[1])
    (tokens,) = (each for each in files[1].message_type if each.name == "Tokens")
    for each in [each for each in tokens.field if each.name in ("offered", "kv", "cached_tokens")]:
        tokens.field.remove(each)
    del tokens.oneof_decl[:]  # those of optional fields
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("triptych.v1.RequestEvent"))


async def kept(stream: EventStream) -> list[float]:
    """Seconds that offers say KV is kept for; -1 where an offer has none."""
    message = await stream.next()
    assert message is not None
    offers = [each.tokens for each in message.events if each.tokens.offered]
    return [each.kv.seconds if each.HasField("kv") else -1.0 for each in offers]


async def test_an_offer_that_leaves_late_says_what_is_left_of_the_time() -> None:
    streams, stream = opened(offers=False)
    streams.offer("p", "r", 1, KeptKV(b"where", time.monotonic() + 5.0))
    streams.deliver([token(0)])
    [seconds] = await kept(stream)
    assert 0 < seconds < 5.0


async def test_kv_that_is_not_kept_any_more_is_not_offered() -> None:
    streams, stream = opened(offers=False)
    streams.offer("p", "r", 1, KeptKV(b"where", time.monotonic()))
    streams.deliver([token(0)])
    assert await kept(stream) == [-1.0]


async def test_a_proxy_that_lost_its_stream_hears_of_the_offer_again_and_of_its_kv_not() -> None:
    streams, stream = opened(offers=False)
    streams.offer("p", "r", 1, KeptKV(b"where", time.monotonic() + 5.0))
    streams.deliver([token(0)])
    assert len(await kept(stream)) == 1
    again = streams.attach("p", [pd_pb2.Reattach(request_id="r", attempt=1, position=1)])
    streams.deliver([token(1)])
    assert await kept(again) == [-1.0]
