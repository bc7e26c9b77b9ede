"""Admission of calls: which ones the proxy serves now, what they become, and which get 429 or 503."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

from triptych.base.errors import RETRY_AFTER, DeadlineExceeded, Overloaded, Unavailable
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.prompt_length import check_characters, check_prompt_length
from triptych.proxy.call.validation import fit
from triptych.proxy.events import Fetched
from triptych.proxy.media.source import MediaSource
from triptych.proxy.quotas.current_call import current_call
from triptych.proxy.quotas.quota import Hold
from triptych.proxy.quotas.table import QuotaTable
from triptych.proxy.requests.output_queue import ChoiceQueue, ChoiceTally, OutputQueue, ReplyMemory
from triptych.proxy.requests.request import Choices, InFlightRequest, draw_request_id
from triptych.proxy.splitter import VideoSegments, split
from triptych.proxy.workers import KnownWorkers

WINDOW_SECONDS = 30.0
#: Share of the encoder work of one window that may be re-encodes.
MAX_RE_ENCODE_SHARE = 0.10
#: Fewer losses than this refuse nothing: they say too little about the pace of the PD workers.
MIN_LOSSES = 4
#: Characters of a Submit that is handed over before the call's other choices are made.
LARGE_SUBMIT = 64 << 10
#: Outputs that wait for the reader of a reply in one piece, which is woken for none of them alone.
WHOLE_BATCH = 64


class Backpressure:
    """Encoder work of the last 30 s, split into first encodes and re-encodes. Pure; `now` in seconds.

    Embeddings that are lost before a PD worker has loaded them are encoded again: much of that means that
    the PD workers are too slow for the media that come in.
    """

    def __init__(self, *, flow_control: bool = True) -> None:
        self._flow_control = flow_control
        self._jobs: deque[tuple[float, float, bool]] = deque()
        self._work = {False: 0.0, True: 0.0}
        self._losses = 0

    def record(self, work: float, now: float, *, re_encode: bool) -> None:
        """An encoder job of `work`. Losses by a flushed or restarted store are recorded as first encodes."""
        self._jobs.append((now, work, re_encode))
        self._work[re_encode] += work
        self._losses += re_encode

    def refuses_media(self, now: float) -> bool:
        """Whether a new request with media should come back later."""
        self._expire(now - WINDOW_SECONDS)
        if not self._flow_control or self._losses < MIN_LOSSES:
            return False
        return self._work[True] > MAX_RE_ENCODE_SHARE * (self._work[True] + self._work[False])

    def _expire(self, before: float) -> None:
        while self._jobs and self._jobs[0][0] < before:
            _, work, re_encode = self._jobs.popleft()
            self._work[re_encode] -= work
            self._losses -= re_encode


class RequestAdmission:
    """Checks every call before anything is held for it."""

    def __init__(
        self,
        pool: KnownWorkers,
        backpressure: Backpressure,
        media: MediaSource,
        quotas: QuotaTable,
        clock: Callable[[], float],
        videos: VideoSegments | None = None,
    ) -> None:
        self._videos = videos
        self._pool = pool
        self._backpressure = backpressure
        self._media = media
        self._quotas = quotas
        self._clock = clock
        #: The proxy stops: no call is admitted any more.
        self.draining = False
        #: The limits of calls that wait for a worker or for their media.
        self._waits: set[asyncio.Timeout] = set()
        self._stopped = False

    def stop(self) -> None:
        """Whatever waits for a worker or for its media ends with Unavailable."""
        self._stopped = self.draining = True
        for limit in self._waits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def resolve_model(self, name: str) -> str:
        """The model or adapter that the call of the running code means; NotFound where its key may use none
        of that name."""
        return self._pool.resolve_model(name, current_call().models)

    def admit(self, call: ChatCall, allowed: Collection[str] | None = None) -> tuple[ChatCall, Hold]:
        """The call in the form that its model takes, and the places of its answers, until they have ended.

        RequestError where it cannot be served, or not now; `allowed`: the models of its key.
        """
        self._check_draining()
        name = self._pool.resolve_model(call.model, allowed)
        call = fit(call, self._pool.kind(name))
        check_prompt_length(call, self._pool.limits_of(name))
        base = self._pool.base_of(name)
        call = replace(call, model=base or name, adapter=name if base else "")
        places, answers = self._quotas["requests"], min(call.n, self._quotas["requests"].spec.capacity)
        if call.continues and not places.fits(call.tenant, answers):
            return call, places.hold(call.tenant)  # it was admitted with its first part
        hold = places.hold(call.tenant, answers)
        try:
            if not call.continues:
                self._check_media(call)
        except Overloaded:
            hold.close()
            raise
        return call, hold

    def _check_media(self, call: ChatCall) -> None:
        if call.has_items:
            if self._backpressure.refuses_media(self._clock()):
                raise Overloaded("embeddings are lost before they are used", retry_after=RETRY_AFTER)
            if self._media.full:
                raise Overloaded(
                    "the media of the requests in flight fill the memory", retry_after=RETRY_AFTER
                )

    async def prepare(self, choices: Choices) -> Fetched:
        """Binds the call to a model, then fetches, splits and hashes it: once for all its choices."""
        first = choices.first
        try:
            async with self._limited(first.deadline - self._clock()):
                name = self._pool.resolve_model(first.call.served_name)
                first.binding = await self._pool.bind(name, media=first.call.has_items)
                started = self._clock()
                first.split = await split(first.call, first.binding.namespace, self._media, self._videos)
        except TimeoutError:
            if self._stopped:
                raise Unavailable("this proxy is stopping", retry_after=RETRY_AFTER) from None
            if first.binding is not None:
                raise DeadlineExceeded("the request's media did not arrive in its time") from None
            raise Unavailable("no encoder worker became available in time", retry_after=RETRY_AFTER) from None
        params, titles = dict[str, str](), dict[str, str]()
        for item in first.split.items:
            params.setdefault(item.mm_hash, item.param)
            titles.setdefault(item.mm_hash, item.title)
        # Each choice is a message of its own: large ones go one after another.
        one_by_one = asyncio.Lock() if first.submit_size > LARGE_SUBMIT else nullcontext()
        for request in choices.requests:
            request.binding, request.split = first.binding, first.split
            request.sending = one_by_one
        return Fetched(params, self._clock() - started, tuple(titles.values()))

    @asynccontextmanager
    async def _limited(self, seconds: float) -> AsyncIterator[None]:
        """TimeoutError after so many seconds, or when the proxy has stopped."""
        async with asyncio.timeout(seconds) as limit:
            self._waits.add(limit)
            try:
                yield
            finally:
                self._waits.discard(limit)

    def check_length(self, model: str, characters: int, param: str) -> None:
        """ContextTooLong for a text of more tokens than the model takes, however they are cut."""
        check_characters(characters, self._pool.limits_of(model), param)

    @asynccontextmanager
    async def query(self) -> AsyncIterator[None]:
        """One query of a client, such as POST /tokenize: a few run at once, one of each key in turn.

        Overloaded when too many wait, or none ends in time; Unavailable at the proxy's end.
        """
        self._check_draining()
        holder = current_call().holder
        with self._quotas["queries"].hold(holder, 1), await self._quotas["query-turns"].wait(holder, 1):
            yield

    def _check_draining(self) -> None:
        if self.draining:
            raise Unavailable("this proxy is stopping", retry_after=RETRY_AFTER)


def make_choices(
    call: ChatCall,
    order: int,
    started: float,
    draw_id: Callable[[], str] = draw_request_id,
    memory: ReplyMemory | None = None,
) -> Choices:
    """One request for every answer that the call wants; `started` is a moment of the proxy's clock."""
    shared, deadline = OutputQueue(WHOLE_BATCH if call.whole else 1, memory), started + call.timeout
    if call.n == 1:
        return Choices([InFlightRequest(call, order, deadline, draw_id(), shared)], shared, started)
    tally = ChoiceTally(call.n)
    requests = []
    for index in range(call.n):
        own = replace(call, sampling=replace(call.sampling, choice=index))
        requests.append(InFlightRequest(own, order, deadline, draw_id(), ChoiceQueue(shared, tally, index)))
    return Choices(requests, shared, started)
