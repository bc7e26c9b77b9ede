"""Large bodies, which are parsed one after the other in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
import weakref

from starlette.types import Message

from triptych.base.errors import InvalidRequest
from triptych.proxy.http.endpoint import INLINE_BODY, HttpReply, PostEndpoint
from triptych.proxy.quotas.quota import Quota, QuotaSpec

PARSER = QuotaSpec("parser", 1, "bodies", "thread", "", "429", wait_seconds=60.0)
_PATIENCE = 30.0


class _Text:
    """A text that can be watched."""


class _RefusingEndpoint(PostEndpoint[None]):
    """An endpoint that refuses every body; the second one looks whether the first one's text is gone."""

    def __init__(self) -> None:
        super().__init__(Quota(PARSER), max_body=1 << 30)
        self.go = threading.Event()
        self.first: weakref.ref[_Text] | None = None
        self.first_is_alive = True

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> None:
        text = _Text()
        if self.first is None:
            self.first = weakref.ref(text)
            self.go.wait(_PATIENCE)
        else:
            self.first_is_alive = self.first() is not None
        try:
            raise ValueError("not what was wanted")
        except ValueError as error:
            raise InvalidRequest("refused", param="messages") from error

    async def answer(self, request: None, reply: HttpReply) -> None:
        raise AssertionError("nothing is to be answered")


async def _post(endpoint: _RefusingEndpoint) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(INLINE_BODY + 1)}

    async def send(message: Message) -> None:
        sent.append(message)

    await endpoint({"type": "http", "method": "POST", "headers": []}, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_a_refused_text_is_gone_before_the_next_body_is_parsed() -> None:
    endpoint = _RefusingEndpoint()
    calls = [asyncio.create_task(_post(endpoint)) for _ in range(2)]
    await asyncio.sleep(0)
    endpoint.go.set()
    assert await asyncio.gather(*calls) == [400, 400]
    assert not endpoint.first_is_alive
