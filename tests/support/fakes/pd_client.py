"""A proxy as a PD worker sees it: submits over gRPC, reads the stream, adds everything up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc

PATIENCE = 45.0


@dataclass
class Answer:
    """What has come back of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    admitted: pd_pb2.Admitted | None = None
    finished: pd_pb2.Finished | None = None
    offered: pd_pb2.Tokens | None = None
    lost: bool = False
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)


class PDClient:
    """`attach` opens the stream; `answers` fill while it is open."""

    def __init__(self, channel: Any, model_key: str, proxy_id: str = "proxy") -> None:
        self.channel = channel
        self.stub = pd_pb2_grpc.PDServiceStub(channel)
        self.model_key = model_key
        self.proxy_id = proxy_id
        self.answers: dict[str, Answer] = {}
        self._news = asyncio.Event()
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def attach(self, *named: pd_pb2.Reattach) -> None:
        """Returns when the stream stands."""
        self._call = self.stub.Attach(pd_pb2.AttachRequest(proxy_id=self.proxy_id, requests=named))
        await asyncio.wait_for(self._call.initial_metadata(), PATIENCE)
        self._reader = asyncio.create_task(self._read(self._call))

    async def detach(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._call.cancel()

    async def submit(self, message: pd_pb2.SubmitRequest) -> pd_pb2.SubmitReply:
        self.answers[message.request_id] = Answer(list(message.resume.output_token_ids))
        reply: pd_pb2.SubmitReply = await self.stub.Submit(message, timeout=PATIENCE)
        return reply

    def message(
        self,
        request_id: str,
        text: str | Sequence[Mapping[str, Any]],
        *,
        items: Sequence[pd_pb2.ItemSlot] = (),
        attempt: int = 1,
        timeout: float = PATIENCE,
        resume: pd_pb2.Resume | None = None,
        may_hand_over: bool = False,
        **sampling: Any,
    ) -> pd_pb2.SubmitRequest:
        messages = [{"role": "user", "content": text if isinstance(text, str) else list(text)}]
        return pd_pb2.SubmitRequest(
            request_id=request_id,
            attempt=attempt,
            proxy_id=self.proxy_id,
            model_key=self.model_key,
            timeout=timeout,
            messages=json.dumps(messages).encode(),
            items=items,
            sampling=common_pb2.SamplingParams(**sampling),
            resume=resume,
            may_hand_over=may_hand_over,
        )

    async def until(self, request_id: str, tokens: int | None = None) -> Answer:
        """The answer when it is finished or lost, or has as many `tokens`."""
        answer = self.answers[request_id]
        await self._wait(
            lambda: (
                answer.lost
                or answer.finished is not None
                or (tokens is not None and len(answer.token_ids) >= tokens)
            )
        )
        return answer

    async def has(self, request_id: str, body: str) -> Answer:
        """The answer once an event of this kind has come."""
        answer = self.answers[request_id]
        await self._wait(lambda: body in answer.bodies)
        return answer

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                assert self._reader is not None
                if self._reader.done():
                    self._reader.result()
                    raise AssertionError("the stream has ended")
                self._news.clear()
                await self._news.wait()

    async def _read(self, call: Any) -> None:
        try:
            async for step in call:
                for event in step.events:
                    self._take(event)
                self._news.set()
        finally:
            self._news.set()

    def _take(self, event: pd_pb2.RequestEvent) -> None:
        answer = self.answers[event.request_id]
        kind = event.WhichOneof("body")
        answer.bodies.append("offer" if event.tokens.offered else kind or "")
        match kind:
            case "admitted":
                answer.admitted = event.admitted
            case "tokens":
                assert event.tokens.position == len(answer.token_ids), "a token twice, or one missing"
                answer.token_ids.extend(event.tokens.token_ids)
                if event.tokens.offered:
                    answer.offered = event.tokens
                answer.text += event.tokens.text
                answer.logprobs.extend(event.tokens.logprobs)
            case "item_loaded":
                answer.loaded.append(event.item_loaded.mm_hash)
            case "item_missing":
                answer.missing.append(event.item_missing.mm_hash)
            case "finished":
                answer.finished = event.finished
            case "lost":
                answer.lost = True
