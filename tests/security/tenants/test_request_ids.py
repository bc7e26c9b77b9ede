"""X-Request-ID is only a label: requests that share one, of any tenant, get their own answers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from support.chaos.rest import assert_at_rest
from support.hostile.guarded import FAMILY, Guarded

pytestmark = pytest.mark.timeout(300)

SAME = "one-id-of-many"


@pytest.fixture
async def web(guarded: Guarded) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=guarded.cluster.url, timeout=60.0, limits=limits) as client:
        yield client
    await asyncio.to_thread(assert_at_rest, guarded.cluster)


def body_of(question: str, **options: Any) -> dict[str, Any]:
    """Sampled from the question's own seed, so that an answer to another question shows."""
    messages = [{"role": "user", "content": question}]
    sampled = {"temperature": 1.0, "seed": zlib.crc32(question.encode()), "max_tokens": 8}
    rest = {"ignore_eos": True, "return_token_ids": True}
    return {"model": FAMILY, "messages": messages, **sampled, **rest, **options}


def headers_of(guarded: Guarded, tenant: str, request_id: str = SAME) -> dict[str, str]:
    return {"Authorization": f"Bearer {guarded.keys[tenant]}", "X-Request-ID": request_id}


async def ask(
    web: httpx2.AsyncClient, guarded: Guarded, tenant: str, question: str, request_id: str = SAME
) -> list[int]:
    """The answer's token ids, after a look at what names it."""
    reply = await web.post(
        "/v1/chat/completions", json=body_of(question), headers=headers_of(guarded, tenant, request_id)
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-request-id"] == request_id
    assert reply.json()["id"] == f"chatcmpl-{request_id}"
    return list(reply.json()["choices"][0]["token_ids"])


async def expected(
    web: httpx2.AsyncClient, guarded: Guarded, tenant: str, questions: list[str]
) -> list[list[int]]:
    """Answers under ids that nobody else uses; all differ."""
    answers = [
        await ask(web, guarded, tenant, question, f"{tenant}-{at}") for at, question in enumerate(questions)
    ]
    assert len({tuple(answer) for answer in answers}) == len(questions)
    return answers


async def test_requests_in_flight_under_one_id_are_answered_apart(web, guarded):
    questions = [f"question {number} among many at once" for number in range(8)]
    tenants = ["alice", "bob"]
    answers = {tenant: await expected(web, guarded, tenant, questions) for tenant in tenants}
    asked = [(tenant, number) for number in range(len(questions)) for tenant in tenants]
    got = await asyncio.gather(*(ask(web, guarded, tenant, questions[number]) for tenant, number in asked))
    assert list(got) == [answers[tenant][number] for tenant, number in asked]
