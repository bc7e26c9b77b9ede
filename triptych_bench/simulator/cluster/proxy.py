"""The proxy in virtual time: the real dispatcher with its job runner and router, and the clients that ask it.

Simpler than a proxy: one of them, one model, a store that is never down, media that are there at once.
Requests are taken in one at a time; a token waits for those of its own message only.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from triptych.base.delta import Delta
from triptych.base.errors import RequestError
from triptych.base.metrics import ProxyMetrics
from triptych.base.request import TextPart
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, ChatMessage, Done, Timings
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.media.source import AudioPart, ImagePart, VideoPart
from triptych.proxy.media.spool import MediaHold
from triptych.proxy.pd.lengths import CHARS_PER_TOKEN
from triptych.proxy.quotas.call_context import NOBODY
from triptych.proxy.workers import KnownWorkers
from triptych.registry.matching import PREFILL
from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.simulator.cluster.context import SimulationContext
from triptych_bench.simulator.cluster.requests import SimulatedRequest
from triptych_bench.simulator.cluster.transport import ClientStream, SimulatedTransport

T = TypeVar("T")
MODEL = "model"
_STAGES = ("fetch", "queue", "encode", "save", "load", "prefill", "decode")


@dataclass(slots=True)
class SimulatedMedia:
    """The media of one item: a few bytes that stand for a file, hashed where they are."""

    data: bytes
    nbytes: int

    def retain(self) -> SimulatedMedia:
        return self

    def release(self) -> None: ...

    @contextmanager
    def view(self) -> Iterator[bytes]:
        yield self.data

    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()

    async def frames(self, size: int) -> AsyncIterator[bytes]:
        yield self.data


class SimulatedMediaSource:
    """Pictures are in the request, and take no room."""

    full = False
    held_bytes = 0

    async def load(self, part: ImagePart | VideoPart | AudioPart, hold: MediaHold) -> SimulatedMedia:
        assert isinstance(part.source, bytes)
        return SimulatedMedia(part.source, len(part.source))

    async def keep_text(self, text: object, encoded: Callable[[], bytes], hold: MediaHold) -> SimulatedMedia:
        raise NotImplementedError("no text encoder is simulated")

    def close(self) -> None: ...


class SimulatedProxy:
    """All requests. `ended` is called with the record of each."""

    def __init__(
        self,
        context: SimulationContext,
        workers: KnownWorkers,
        transport: SimulatedTransport,
        ended: Callable[[RequestRecord], None],
    ) -> None:
        limits = context.limits
        #: CPU seconds that requests have taken until they were on their way.
        self.intake_seconds = 0.0
        self._loop, self._costs = context.loop, context.costs.proxy
        self._limits, self._transport, self._ended = limits, transport, ended
        self._intake, self._metrics = asyncio.Lock(), ProxyMetrics()
        #: Prompts are told apart by the lengths of their texts, which stand for nothing else.
        self._roles = any(worker.role == PREFILL for worker in workers.serving("pd"))
        ids = itertools.count()
        self.dispatcher = Dispatcher(
            workers,
            context.store,
            self._metrics,
            transport,
            proxy_id="proxy",
            max_queue=limits.proxy.max_queue,
            share=limits.store_memory // 2,
            media=SimulatedMediaSource(),
            flow_control=limits.proxy.flow_control,
            skip_held_items=limits.proxy.skip_held_items,
            prefill_threshold=limits.proxy.prefill_threshold,
            clock=context.loop.time,
            draw_id=lambda: f"{next(ids):08}",
        )

    @property
    def re_encodes(self) -> int:
        """Items encoded again since their embeddings were lost."""
        return int(self._metrics.registry.get_sample_value("triptych_re_encodes_total") or 0)

    async def close(self) -> None:
        await self.dispatcher.close()

    async def serve(self, request: SimulatedRequest, planned: float, *, warm_up: bool = False) -> None:
        """One client's request, from now until its record is made."""
        client = ClientStream(request, self._loop.create_future())
        sent, timeout = self._loop.now, self._limits.client_timeout
        self._transport.clients[request.name] = client
        timings, error, taken_in = Timings(), "", sent
        try:
            async with asyncio.timeout(timeout):
                await self._take_in(request)
                taken_in = self._loop.now
                timings = await self._chat(client)
        except TimeoutError:
            error = f"timeout after {timeout:g} s"
        except RequestError as failure:
            error = f"HTTP {failure.status}: {failure.message}"
        del self._transport.clients[request.name]
        moments = [] if error else client.moments
        stages = {} if error else {name: getattr(timings, name) for name in _STAGES}
        if stages:
            stages["fetch"] += taken_in - sent
        record = RequestRecord(
            index=request.index,
            planned=planned,
            sent=sent,
            images=len(request.features),
            ttft=(moments[0] if moments else self._loop.now) - sent,
            e2e=(moments[-1] if moments else self._loop.now) - sent,
            itls=tuple(map(operator.sub, moments[1:], moments)),
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=len(moments),
            asked_tokens=request.output_tokens,
            error=error,
            stages=stages,
            caches=tuple(item.cache for item in timings.items),
            warm_up=warm_up,
        )
        self._ended(record)

    async def _take_in(self, request: SimulatedRequest) -> None:
        """The proxy reads requests one after another."""
        async with self._intake:
            seconds = self._costs.take(len(request.features), request.media_bytes, request.text_tokens)
            self.intake_seconds += seconds
            await asyncio.sleep(seconds)

    async def _chat(self, client: ClientStream) -> Timings:
        """Reads the reply: its beginning as soon as it comes, the rest when no more will come.

        What the client has when is the transport's to say; the dispatcher's output is read late, since
        waking the client for every token would take most of the simulation's time.
        """
        received, last = 0, None
        async with aclosing(self.dispatcher.chat(self._call(client.request), NOBODY)) as reply:
            async for outputs in reply:
                received += sum(len(output.token_ids) for output in outputs if isinstance(output, Delta))
                last = outputs[-1]
                await client.ended
        assert isinstance(last, Done) and received == len(client.moments), "tokens were lost"
        return last.timings

    def _call(self, request: SimulatedRequest) -> ChatCall:
        media = (request.items[feature.mm_hash].media for feature in request.features)
        images = tuple(ImagePart(image, "messages") for image in media)
        text = request.text.ljust(CHARS_PER_TOKEN * request.text_tokens) if self._roles else request.text
        messages: tuple[ChatMessage, ...] = (ChatMessage("user", text),)
        if images and self._limits.affinity:
            messages = (ChatMessage("user", images), *messages)
        elif images:
            messages = (ChatMessage("user", (*images, TextPart(text))),)
        return ChatCall(
            label=request.name,
            model=MODEL,
            messages=messages,
            sampling=SamplingParams(max_tokens=request.output_tokens),
            timeout=self._limits.proxy.request_timeout,
        )
