"""A flood's request costs the proxy's event loop no more than honest ones that bring as many bytes: one if it
is small, five if it is large or many.

Of the loop's thread, its CPU time: what a busy machine takes from it does not count. Best of five, beside the
honest request in the same process; the proxy and scripted workers share the thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack

import grpc
import pytest

from benchmarks.fairness.attacker import WRONG_KEY
from benchmarks.fairness.flood import CALLS, CHAT, Flood
from benchmarks.fairness.floods import FLOODS
from benchmarks.fairness.oddities import ODDITIES
from benchmarks.fairness.sends import UNARY, Call, Calls, Client, Door, Gets, Post, Raw, Send
from support.fakes.fake_workers import picture
from support.hostile.two_tenants import A, TwoTenants, chat_body, two_tenants
from triptych.protos import proxy_pb2

ROUNDS = 5
#: Seconds of which a loop never notices the lack.
LEAST = 0.003
SMALL = 2048
#: The part of its full size in which a flood is tried here; the others' requests are as large as they get.
SCALES = {
    "grpc-tools": 1 / 60,
    "grpc-options": 1 / 4,
    "long-texts": 1 / 8,
    "stop-strings": 1 / 32,
    "many-items": 1 / 3,
}
#: Those of unusual form are dear by the byte, and served in turns (integration/proxy/http/test_turns.py).
TRIED = {
    name: flood
    for name, flood in FLOODS.items()
    if flood.kind in ("loop", "parser") and flood not in ODDITIES
}
#: The scripted worker answers with a token for each character, on this thread.
LONG_REPLIES = {"POST /tokenize"}
_numbers = itertools.count()


def honest(send: Send) -> Send:
    """The request with which an honest client brings as many bytes through the same door: a fresh picture."""
    match send:
        case Gets():
            return Gets(("/v1/models",) * len(send.paths), send.times, send.read)
        case Raw():
            return Gets(("/v1/models",) * max(send.data.count(b" HTTP/1.1\r\n"), 1))
        case Calls():
            return Calls(send.call, send.count)
        case Call():
            pictures = _pictures(len(send.message))
            request = proxy_pb2.ChatRequest(model="demo")
            request.sampling.max_tokens = 2
            message = request.messages.add(role="user")
            message.parts.add(text="x")
            for media in pictures:
                message.parts.add(image=media)
            return Call(CALLS[0], request.SerializeToString())
    return Post(CHAT, chat_body("x", *_pictures(len(send.body) * 3 // 4)))


def times(send: Send) -> float:
    """As many honest requests, each with its whole answer."""
    match send:
        case Gets():
            small = len(send.paths) * send.times == 1
        case Raw():
            small = send.data.count(b" HTTP/1.1\r\n") <= 1 and len(send.data) <= SMALL
        case Calls():
            small = True
        case Call():
            small = len(send.message) <= SMALL
        case Post():
            small = len(send.body) <= SMALL
    return 1.0 if small else 5.0


def _pictures(size: int) -> tuple[bytes, ...]:
    return (picture(f"{next(_numbers)}", size),) if size > SMALL else ()


def _send(door: Door, key: str, send: Send) -> None:
    """In a thread of its own; gRPC's asyncio has one event loop in a process."""
    if not isinstance(send, Call):
        asyncio.run(_over_http(door, key, send))
        return
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{door.grpc_port}", options=options) as channel:
        metadata = (("authorization", f"Bearer {key}"),)
        try:
            if send.method in UNARY:
                channel.unary_unary(send.method)(send.message, metadata=metadata, timeout=send.seconds)
            else:
                call = channel.unary_stream(send.method)(
                    send.message, metadata=metadata, timeout=send.seconds
                )
                for _ in call:
                    pass
        except grpc.RpcError:
            return


async def _over_http(door: Door, key: str, send: Send) -> None:
    async with Client(door, key) as client:
        await client.send(send)


async def price(tenants: TwoTenants, key: str, send: Send) -> float:
    """Seconds of the loop's CPU time until it has its answer."""
    door = Door(tenants.cluster.port, tenants.cluster.grpc_port)
    begun = time.thread_time()
    await asyncio.to_thread(_send, door, key, send)
    return time.thread_time() - begun


@pytest.mark.parametrize("flood", TRIED.values(), ids=TRIED)
async def test_a_floods_request_costs_the_loop_no_more_than_honest_ones(flood: Flood, store, tmp_path):
    sends = {(type(send), *sorted(send.doors), at): send for at, send in enumerate(_distinct(flood))}
    async with AsyncExitStack() as stack:
        tenants = await two_tenants(
            store,
            tmp_path,
            stack,
            max_body=64 << 20,
            body_memory=1 << 30,
            live=True,
            one_address=True,
            further_keys=flood.keys - 2,
        )
        own = tenants.bearer(A).removeprefix("Bearer ")
        key = WRONG_KEY if flood.keys > 2 else own
        dear = []
        for name, send in sends.items():
            costs = [
                (await price(tenants, key, send), await price(tenants, own, honest(send)))
                for _ in range(ROUNDS)
            ]
            cost, control = (min(values) for values in zip(*costs, strict=True))
            if cost > times(send) * control + LEAST:
                dear.append(f"{name}: {cost * 1000:.1f} ms, an honest one {control * 1000:.1f} ms")
        assert dear == []


def _distinct(flood: Flood) -> list[Send]:
    """One of each send that is not like the one before it."""
    result: list[Send] = []
    for send in flood.make(SCALES.get(flood.name, 1.0)):
        if send not in result and not send.doors & LONG_REPLIES:
            result.append(send)
    return result
