"""The HTTP client of one vLLM server."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from triptych.base.source_tickets import SourceTickets
from triptych.base.types import JsonObject
from triptych.pd_worker.vllm.http.call import (
    EngineCall,
    body_of,
    probe_body,
    question_body,
    too_many_body,
    whole_body_of,
)
from triptych.pd_worker.vllm.http.replies import (
    ConnectorAnswer,
    EngineError,
    EngineGarbage,
    EngineRejected,
    EngineSilent,
    EngineUnreachable,
    ModelList,
    PooledAnswer,
    RenderedPrompt,
    ServerVersion,
    StreamChunk,
    StreamEvent,
    WholeAnswer,
    decode,
    error_of_body,
    error_of_event,
)

#: The longest event: one with log-probabilities of some thousand tokens is far below.
MAX_EVENT_BYTES = 8 << 20
_DATA = b"data:"


class EventParser:
    """The data of each event in a stream of bytes, however they are cut."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of all events that end in `piece`; EngineGarbage for what is no event."""
        self._rest += piece
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        if len(rest) > self._limit:
            raise EngineGarbage(f"an event is longer than {self._limit} bytes")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(_DATA):
                yield bytes(line[len(_DATA) :].strip())
            elif line and not line.startswith(b":"):
                raise EngineGarbage(f"no event: {bytes(line[:80])!r}")


#: Tokens in, tokens out: there with `vllm serve --enable-scale-out`.
GENERATE = "/inference/v1/generate"
#: Tokens or a conversation in, a vector or a score out: there with `vllm serve --runner pooling`.
POOL = "/pooling"
#: A conversation in, its tokens and items out: there with `vllm serve --enable-scale-out`, too.
RENDER = "/v1/chat/completions/render"
CONNECT_SECONDS = 5.0
#: For answers that vLLM makes without its engine.
ANSWER_SECONDS = 5.0
#: For the step by which a connector answers.
PROOF_SECONDS = 30.0
MAX_REPLY_BYTES = 1 << 20
#: For a picture by vLLM's processor, which is loaded for it; its tensors come back with it.
RENDER_SECONDS = 120.0
MAX_RENDERED_BYTES = 256 << 20
MAX_METRICS_BYTES = 16 << 20
#: What the engine's steps increase, in vLLM's metrics.
_STEPS = b"vllm:iteration_tokens_total_count"
#: There with speculative decoding alone.
_DRAFTS = b"vllm:spec_decode_num_drafts"
_KV_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{.*\})? ([0-9.]+(?:e[+-]?[0-9]+)?)\s*$", re.MULTILINE)
#: In the refusal of a request of more sequences than that.
_MOST_SEQUENCES = re.compile(r"max_num_seqs \((\d{1,9})\)")
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a vLLM server says of itself."""

    version: str
    model: str
    root: str
    max_model_len: int
    #: Requests that its engines compute at once, all together; 0 where it does not say.
    max_num_seqs: int = 0
    #: Names of its LoRA adapters.
    adapters: tuple[str, ...] = ()
    #: Whether it decodes speculatively; False where it keeps no metrics.
    speculates: bool = False


class VLLMClient:
    """Calls of the server at `url`, in one event loop. All of them raise EngineError for what goes wrong.

    With `probe`, the body of a call of its pooling endpoint, the server pools; otherwise it generates.
    """

    def __init__(self, url: str, key: str = "", probe: JsonObject | None = None) -> None:
        self._url = url.rstrip("/")
        self._probe = probe
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=headers,
            # A stream is silent while its request waits or is prefilled: `EngineHealth` judges that.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def check_health(self) -> None:
        """Returns where the server says that its engine lives."""
        await self._get("/health", ANSWER_SECONDS)

    async def info(self) -> EngineInfo:
        """Version, model and places of the server."""
        version = decode(await self._get("/version", ANSWER_SECONDS), ServerVersion)
        models = decode(await self._get("/v1/models", ANSWER_SECONDS), ModelList)
        if not models.data or not models.data[0].max_model_len:
            raise EngineGarbage("the server names no model")
        first = models.data[0]
        length, places = first.max_model_len or 0, 0 if self.pools else await self._places()
        adapters = tuple(card.id for card in models.data if card.parent)
        speculates = not self.pools and await self._speculates()
        root = first.root or first.id
        return EngineInfo(version.version, first.id, root, length, places, adapters, speculates)

    async def _speculates(self) -> bool:
        try:
            return _DRAFTS in await self.metrics()
        except EngineError:
            return False

    async def _places(self) -> int:
        """Requests that the server computes at once; 0 where it does not say. This computes nothing."""
        try:
            await self._answer("POST", GENERATE, ANSWER_SECONDS, MAX_REPLY_BYTES, too_many_body())
        except EngineRejected as refusal:
            if named := _MOST_SEQUENCES.search(refusal.message):
                return int(named[1]) * max(1, len(await self._kv_shares()))
        return 0

    async def metrics(self) -> bytes:
        """The server's own page of metrics, in Prometheus' text format."""
        return await self._get("/metrics", ANSWER_SECONDS, MAX_METRICS_BYTES)

    async def steps(self) -> bytes:
        """A word that changes with every step of the engine; empty where the server keeps no metrics."""
        page = await self.metrics()
        return b"\n".join(line for line in page.split(b"\n") if line.startswith(_STEPS))

    async def kv_usage(self) -> float:
        """The fraction of the KV cache in use, a mean over its engines; 0 where the server tells none."""
        shares = await self._kv_shares()
        return min(sum(shares) / len(shares), 1.0) if shares else 0.0

    async def _kv_shares(self) -> list[float]:
        """Of each engine's KV cache, what is in use; none where the server tells nothing."""
        try:
            return [float(value) for value in _KV_USAGE.findall(await self.metrics())]
        except EngineError:
            return []

    @property
    def pools(self) -> bool:
        """Whether the server is one that pools, and generates nothing."""
        return self._probe is not None

    async def probe(self, timeout: float) -> None:
        """Has the engine make one step."""
        if self._probe is None:
            await self._answer("POST", GENERATE, timeout, MAX_REPLY_BYTES, probe_body())
        else:
            await self._answer("POST", POOL, timeout, MAX_REPLY_BYTES, self._probe)

    async def has_token(self, tickets: SourceTickets, *, encrypted: bool) -> bool:
        """Whether the connector in the server proves that it has the token, and certificates if needed."""
        question = secrets.token_hex(16)
        raw = await self._answer("POST", GENERATE, PROOF_SECONDS, MAX_REPLY_BYTES, question_body(question))
        params = decode(raw, ConnectorAnswer).ec_transfer_params
        return tickets.proven(question, params, encrypted=encrypted)

    async def render(self, body: JsonObject) -> RenderedPrompt:
        """A conversation as the server would compute it, by its own processor."""
        raw = await self._answer("POST", RENDER, RENDER_SECONDS, MAX_RENDERED_BYTES, body)
        return decode(raw, RenderedPrompt)

    async def pool(self, body: JsonObject) -> PooledAnswer:
        """What one prompt is pooled to. Cancelling this ends the request in vLLM, too."""
        return decode(await self._answer("POST", POOL, None, MAX_REPLY_BYTES, body), PooledAnswer)

    async def whole(self, call: EngineCall, timeout: float | None = None) -> WholeAnswer:
        """A call's answer in one piece. Cancelling this ends the request in vLLM, too."""
        raw = await self._answer("POST", GENERATE, timeout, MAX_REPLY_BYTES, whole_body_of(call))
        return decode(raw, WholeAnswer)

    @asynccontextmanager
    async def generate(self, call: EngineCall) -> AsyncIterator[AsyncIterator[StreamChunk]]:
        """The chunks of a streamed answer. Leaving the context ends the request in vLLM, too."""
        response = await self._open("POST", GENERATE, body_of(call))
        chunks = _chunks(response)
        try:
            if response.status != 200:
                raise error_of_body(response.status, await _read(response, MAX_REPLY_BYTES))
            if response.content_type != "text/event-stream":
                raise EngineGarbage(f"an answer of type {response.content_type[:80]!r}")
            yield chunks
        finally:
            await chunks.aclose()
            # Not released: what is left of the stream is not wanted.
            response.close()

    async def _get(self, path: str, timeout: float, limit: int = MAX_REPLY_BYTES) -> bytes:
        return await self._answer("GET", path, timeout, limit)

    async def _answer(
        self, method: str, path: str, timeout: float | None, limit: int, body: JsonObject | None = None
    ) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                response = await self._open(method, path, body)
                try:
                    raw = await _read(response, limit)
                finally:
                    response.close()
        except TimeoutError as error:
            raise EngineSilent(f"{path} has not answered in {timeout:g} s") from error
        if response.status != 200:
            raise error_of_body(response.status, raw)
        return raw

    async def _open(self, method: str, path: str, body: JsonObject | None) -> aiohttp.ClientResponse:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            return await self._session.request(
                method, self._url + path, data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"{path}: {error or type(error).__name__}") from error


async def _chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[StreamChunk, None]:
    """The chunks up to the stream's own end; EngineUnreachable where it breaks before."""
    parser = EventParser()
    try:
        async for piece in response.content.iter_any():
            for data in parser.feed(piece):
                if data == _DONE:
                    return
                chunk = decode(data, StreamEvent)
                if chunk.error is not None:
                    raise error_of_event(chunk.error)
                yield chunk
    except (aiohttp.ClientError, OSError) as error:
        raise EngineUnreachable(f"the stream broke: {error or type(error).__name__}") from error
    raise EngineUnreachable("the stream ended in the middle")


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body of an answer; EngineGarbage above `limit` bytes."""
    raw = bytearray()
    try:
        async for piece in response.content.iter_any():
            raw += piece
            if len(raw) > limit:
                raise EngineGarbage(f"an answer is longer than {limit} bytes")
    except (aiohttp.ClientError, OSError) as error:
        raise EngineUnreachable(f"the answer broke: {error or type(error).__name__}") from error
    return bytes(raw)
