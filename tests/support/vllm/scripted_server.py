"""A vLLM server that does what a test says: its token and pooling endpoints, health, version and metrics."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from support.waiting import stop_accepting
from triptych.base.source_tickets import SourceTickets

#: Writes the answer of one call.
Script = Callable[["Call"], Awaitable[web.StreamResponse]]


def greedy(body: Mapping[str, Any], count: int) -> list[int]:
    """The tokens of a model whose next token depends on all before: a continuation goes on as it began."""
    ids, made = list(body.get("token_ids", ())), []
    for _ in range(count):
        made.append((sum(ids) * 31 + len(ids) * 7) % 200 + 20)
        ids.append(made[-1])
    return made


def event(token_ids: Sequence[int] = (), **choice: Any) -> bytes:
    """One chunk as vLLM writes it."""
    body = {
        "request_id": "generate-tokens-1",
        "usage": None,
        "output_mode": "tokens",
        "choices": [{"index": 0, "token_ids": list(token_ids), "finish_reason": None, **choice}],
    }
    return data(body)


def data(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@dataclass
class Call:
    """One call of the token endpoint. `gone` is set when the caller has closed it."""

    request: web.Request
    body: dict[str, Any]
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def max_tokens(self) -> int:
        return int(self.body["sampling_params"]["max_tokens"])

    async def stream(self, status: int = 200, kind: str = "text/event-stream") -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": kind})
        await response.prepare(self.request)
        return response


async def answer(call: Call) -> web.StreamResponse:
    """The whole answer of a healthy server."""
    response = await call.stream()
    tokens = greedy(call.body, call.max_tokens)
    for index, token in enumerate(tokens):
        reason = "length" if index == len(tokens) - 1 else None
        await response.write(event([token], finish_reason=reason))
    await response.write(data({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}))
    await response.write(b"data: [DONE]\n\n")
    return response


def pooled(row: Sequence[float], tokens: int) -> dict[str, Any]:
    """The body of an answer of the pooling endpoint."""
    data = base64.b64encode(np.array(row, "<f4").tobytes()).decode()
    return {"data": [{"index": 0, "data": data}], "usage": {"prompt_tokens": tokens}}


def fails(status: int, message: str = "no", **error: Any) -> Script:
    """An answer with an error and no stream."""

    async def script(call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "code": status, **error}}, status=status)

    return script


def breaks(count: int, *after: bytes) -> Script:
    """`count` tokens, then `after`, then a connection that breaks."""

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        for token in greedy(call.body, call.max_tokens)[:count]:
            await response.write(event([token]))
        for piece in after:
            await response.write(piece)
        assert call.request.transport is not None
        await asyncio.sleep(0.01)  # what was written is sent before the connection is dropped
        call.request.transport.abort()
        return response

    return script


def whole(**fields: Any) -> Script:
    """The whole answer of a healthy server in one piece, with further `fields`."""

    async def script(call: Call) -> web.StreamResponse:
        choice = {"index": 0, "token_ids": greedy(call.body, call.max_tokens), "finish_reason": "length"}
        return web.json_response({"choices": [choice], **fields})

    return script


def hangs(count: int) -> Script:
    """`count` tokens, then nothing until the caller goes."""

    async def script(call: Call) -> web.StreamResponse:
        response = await call.stream()
        for token in greedy(call.body, count):
            await response.write(event([token]))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            call.gone.set()
            raise
        return response

    return script


class ScriptedServer:
    """The server. `scripts` are used up by streamed calls in order; after them come whole answers."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.default: Script = answer
        self.calls: list[Call] = []
        self.probes = 0
        self.healthy = True
        self.probe_status = 200
        self.version = "0.32.0"
        self.max_model_len = 512
        #: Requests that it computes at once; 0: it does not say.
        self.max_num_seqs = 256
        self.key = ""
        #: Whether its metrics count drafts.
        self.speculates = False
        #: Names of its LoRA adapters.
        self.adapters: tuple[str, ...] = ()
        #: What its connector has of the cluster: the token, and whether certificates.
        self.token, self.encrypted = "", False
        self.steps = 0
        #: Shares of the KV caches of its engines.
        self.kv_usage: tuple[float, ...] = ()
        self.host = "127.0.0.1"
        self._called = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._listener: socket.socket
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self._port}"

    async def start(self) -> None:
        """Serves, from the second time on at the same port."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/pooling", self._pool)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        self._listener = socket.create_server((self.host, self._port))
        await web.SockSite(self._runner, self._listener).start()
        self._port = self._listener.getsockname()[1]

    async def stop(self) -> None:
        """Ends with all connections, as a killed process does."""
        if self._runner is not None:
            for call in self.calls:
                if call.request.transport is not None:
                    call.request.transport.abort()
            await stop_accepting([self._listener])
            await self._runner.cleanup()
            self._runner = None

    async def called(self, count: int) -> None:
        """Waits until `count` streamed calls have come."""
        async with asyncio.timeout(45):
            while len(self.calls) < count:
                self._called.clear()
                await self._called.wait()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        if not body.get("stream") and "kv_transfer_params" not in body:
            self.probes += 1
            if self.probe_status == 0:
                await asyncio.Event().wait()
            answer = {"choices": []} | self._connector(body.get("ec_transfer_params"))
            return web.json_response(answer, status=self.probe_status)
        if "prompt_logprob_token_ids" in body["sampling_params"]:
            return web.json_response({"error": {"message": self._refusal(body), "code": 400}}, status=400)
        call = Call(request, body)
        self.calls.append(call)
        self._called.set()
        script = self.scripts.pop(0) if self.scripts else self.default
        return await script(call)

    def _connector(self, asked: object) -> dict[str, Any]:
        """What a connector adds to the answer."""
        said = SourceTickets(self.token).answer(asked, encrypted=self.encrypted) if self.token else None
        return {} if said is None else {"ec_transfer_params": said}

    def _refusal(self, body: Mapping[str, Any]) -> str:
        """As vLLM 0.32 refuses scores in a stream, after a number of sequences that it cannot compute."""
        most, wanted = self.max_num_seqs, body["sampling_params"]["n"]
        if most and wanted > most:
            return f"sampling_params.n must be at most the server's max_num_seqs ({most}), got {wanted}."
        return "prompt_logprob_token_ids are not available when stream=true."

    async def _pool(self, request: web.Request) -> web.StreamResponse:
        """Probes are answered; so are other calls, after the scripts, as `default` says."""
        body = await request.json()
        if body.get("input") == [[0]]:
            self.probes += 1
            return web.json_response(pooled([0.0], 1))
        call = Call(request, body)
        self.calls.append(call)
        self._called.set()
        script = self.scripts.pop(0) if self.scripts else self.default
        return await script(call)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "tiny", "root": "models/tiny", "max_model_len": self.max_model_len}
        adapters = [{"id": name, "root": f"/{name}", "parent": "tiny"} for name in self.adapters]
        return web.json_response({"object": "list", "data": [card, *adapters]})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [f'vllm:iteration_tokens_total_count{{engine="0"}} {self.steps}']
        for engine, share in enumerate(self.kv_usage):
            lines.append(f'vllm:kv_cache_usage_perc{{engine="{engine}",model_name="a}} b"}} {share}')
        if self.speculates:
            lines.append('vllm:spec_decode_num_drafts_total{engine="0"} 0.0')
        return web.Response(text="\n".join(lines) + "\n")


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
