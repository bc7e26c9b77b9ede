"""A server that speaks OpenAI's streaming chat and computes nothing: the generator is measured against it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
from aiohttp import web

MODEL = "null"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Seconds to the first token and between two. Every `fail_every`-th request gets a 503; with `early_end`
    a reply ends after that number of tokens, whatever was asked; with `capacity` requests wait for one of
    that number of places."""

    ttft: float = 0.02
    tpot: float = 0.005
    fail_every: int = 0
    early_end: int = 0
    capacity: int = 0


class _Body(msgspec.Struct):
    max_tokens: int = 16
    triptych_timings: bool = False


class NullServer:
    """Counts what it has served."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._places = asyncio.Semaphore(behaviour.capacity or 1 << 30)
        self.requests = 0
        self.running = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = f"# TYPE triptych_requests_in_flight gauge\ntriptych_requests_in_flight {self.running}\n"
        return web.Response(text=text)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.requests += 1
        if self._behaviour.fail_every and self.requests % self._behaviour.fail_every == 0:
            return web.json_response({"error": {"message": "as configured"}}, status=503)
        self.running += 1
        try:
            async with self._places:
                return await self._stream(request, msgspec.json.decode(raw, type=_Body), raw)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: _Body, raw: bytes) -> web.StreamResponse:
        behaviour = self._behaviour
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = min(body.max_tokens, behaviour.early_end or body.max_tokens)
        await asyncio.sleep(behaviour.ttft)
        for index in range(tokens):
            if index:
                await asyncio.sleep(behaviour.tpot)
            await response.write(b'data: {"choices":[{"index":0,"delta":{"content":" token"}}]}\n\n')
        end: dict[str, object] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if body.triptych_timings:
            items = [{"mm_hash": "0" * 64, "cache": "miss"}] * raw.count(b'"image_url":')
            end["triptych_timings"] = {
                "prefill": behaviour.ttft,
                "decode": behaviour.tpot * (tokens - 1),
                "items": items,
            }
        usage = {"prompt_tokens": raw.count(b" ") + 1, "completion_tokens": tokens}
        last = [msgspec.json.encode(event) for event in (end, {"choices": [], "usage": usage})]
        await response.write(b"".join(b"data: " + event + b"\n\n" for event in (*last, b"[DONE]")))
        return response


async def start(behaviour: Behaviour) -> tuple[web.AppRunner, str]:
    """A listening server and its URL; `cleanup` of the runner ends it."""
    runner = web.AppRunner(NullServer(behaviour).app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    host, bound = runner.addresses[0][:2]
    return runner, f"http://{host}:{bound}"
