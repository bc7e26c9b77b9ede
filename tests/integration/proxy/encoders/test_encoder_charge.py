"""Encoder work counts towards the tokens of the key that it is done for."""

from __future__ import annotations

import asyncio
import json

from support.fakes.fake_encoder import ROWS
from support.fakes.fake_workers import MODEL, picture, user
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.auth.limits import Session

KEY = "tk-charged-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def body(name: str) -> bytes:
    return json.dumps({"model": MODEL, "messages": user("x", picture(name)), "max_tokens": 1}).encode()


async def test_a_request_that_leaves_before_a_pd_worker_took_it_pays_for_its_encoder_work(store):
    keys = KeyRing(KEY, "", KeyLimits(tokens_per_minute=1))
    async with FakeCluster(store, keys=keys) as cluster:
        cluster.pd_workers[0].admission.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        sent = body("cat")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        await until(lambda: cluster.pd_workers[0].submits, "the item is planned")
        writer.close()
        await writer.wait_closed()
        await cluster.at_rest()
        cluster.pd_workers[0].admission.set()
        status, _, reply = await raw_post(cluster.port, body("cat"), HEADERS)
        assert status == 429
        assert b"tokens-per-minute" in reply


async def test_what_the_store_has_costs_its_prompt_tokens_alone(store, monkeypatch):
    charged: list[int] = []
    monkeypatch.setattr(Session, "charge", lambda session, tokens: charged.append(tokens))
    async with FakeCluster(store, keys=KeyRing(KEY, "", KeyLimits())) as cluster:
        for _ in range(2):
            assert (await raw_post(cluster.port, body("cat"), HEADERS))[0] == 200
    assert charged == [3 + 1 + ROWS, 3 + 1]
