"""A PD worker that follows a script, as a real gRPC server."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from support.fakes.fake_workers import END_TOKEN, FIRST_TIME, TOKEN_NAMES, FakeWorker, choice_text
from triptych.base.rpc.channels import INCARNATION_HEADER
from triptych.pd_worker.isolation import Isolation
from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc


def fake_logprobs(index: int, text: str, top: int) -> common_pb2.PositionLogprobs:
    """Of token `index`: the chosen one first, then others that are ever less likely, the last impossible."""

    def token(rank: int) -> common_pb2.TokenLogprob:
        shown = text if rank == 0 else f"other{rank}"
        logprob = float("-inf") if rank == 2 else -0.5 * (rank + 1)
        return common_pb2.TokenLogprob(
            token_id=1000 + index, logprob=logprob, text=shown, utf8=shown.encode()
        )

    return common_pb2.PositionLogprobs(chosen=token(0), top=[token(rank) for rank in range(top)])


def tokens_of(submit: pd_pb2.SubmitRequest) -> int:
    """Prompt and output of a request that ends at its limit; a character of text is a token."""
    output = submit.sampling.max_tokens or 1
    if submit.HasField("resume"):
        return len(submit.resume.prompt_token_ids) + output
    if submit.HasField("prompt"):
        return len(submit.prompt.token_ids.ids or submit.prompt.text) + output
    parts = [part for message in json.loads(submit.messages) for part in message["content"]]
    text = "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)
    return len(text) + sum(slot.plan.length for slot in submit.items) + output


def plain(event: pd_pb2.RequestEvent) -> bool:
    """Whether it is tokens without log-probabilities, and without an offer."""
    return event.HasField("tokens") and not event.tokens.logprobs and not event.tokens.offered


def as_lists(event: pd_pb2.RequestEvent) -> pd_pb2.StepTokens:
    """The same tokens as the only entry of a step."""
    tokens = event.tokens
    return pd_pb2.StepTokens(
        request_ids=[event.request_id],
        attempts=[event.attempt],
        positions=[tokens.position],
        texts=[tokens.text],
        token_ids=tokens.token_ids,
        counts=[] if len(tokens.token_ids) == 1 else [len(tokens.token_ids)],
    )


@dataclass
class FakeRequest:
    submit: pd_pb2.SubmitRequest
    loaded: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[pd_pb2.RequestEvent] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    #: Cleared while its proxy has it paused.
    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.resumed.set()


class FakePD(FakeWorker, pd_pb2_grpc.PDServiceServicer):
    """Token i is 1000 + i. `gate` holds tokens while cleared; `admission` holds admissions.

    `script` has the texts of all tokens of an answer that ends by itself. A request with "poison N" in its
    messages ends the worker, which is started again, when it has N output tokens; "poison door", at Submit.
    """

    pool = "pd"

    def __init__(self) -> None:
        super().__init__()
        self.beats = 0
        self.submits: list[pd_pb2.SubmitRequest] = []
        self.cancels: list[str] = []
        self.notices: list[list[str]] = []
        self.can_pause = True
        #: Seconds between two tokens of a request.
        self.pace = 0.0
        #: What its engine keeps of the prompts that it offers.
        self.kv: pd_pb2.KVHandOff | None = None
        #: Prompt tokens that its prefix cache gives. Hand-overs tell it, but of an earlier release.
        self.cached = 2
        self.tells_cached = True
        self.paused: list[str] = []
        self.resumed: list[str] = []
        self.attaches: list[pd_pb2.AttachRequest] = []
        self.requests: dict[str, FakeRequest] = {}
        self.refusals: list[common_pb2.Error] = []
        #: Holds the answers to Submits while cleared.
        self.door = asyncio.Event()
        self.door.set()
        #: Submits to come whose calls break, after they have been taken.
        self.breaks = 0
        #: Whether an attempt may come twice; not with a worker of an earlier release.
        self.takes_twice = True
        self.missing: dict[str, list[str]] = {}
        #: Items that it needs no embedding of, where the proxy asks.
        self.held: set[str] = set()
        self.fail_with: common_pb2.Error | None = None
        self.pause_at: int | None = None
        self.repeat_frames = False
        #: Tokens are lists where the proxy reads them; else events, as of an older version.
        self.step_tokens = True
        self.script: list[str] | None = None
        #: The stop string that has ended the script.
        self.stop_sequence = ""
        #: What its answers' reasoning stands between.
        self.reasoning: pd_pb2.ReasoningMarkers | None = None
        self.tool_format = ""
        #: Token ids of the answers to come where times or a language are asked for, the end token last.
        self.answers: list[list[int]] = []
        #: The same by the first frame of their window.
        self.windows: dict[int, list[int]] = {}
        self.fail_choice: int | None = None
        #: What it pools a prompt to.
        self.vector: tuple[float, ...] = (0.6, 0.8)
        self.questions: list[Any] = []
        #: Holds the answers to questions while cleared; `asking` are those that wait for it.
        self.answering = asyncio.Event()
        self.answering.set()
        self.asking = 0
        self.gate = asyncio.Event()
        self.admission = asyncio.Event()
        self.gate.set()
        self.admission.set()
        self.streams: dict[str, asyncio.Queue[pd_pb2.RequestEvent | pd_pb2.Beat | None]] = {}
        #: The stream's next end is the worker's own doing.
        self.leaving = False
        #: Items for which there is room; requests wait for theirs in order of arrival.
        self.room = 1 << 20
        self.reserved = 0
        self._admitting = asyncio.Lock()
        self.isolation = Isolation()
        #: Requests that it was set apart for.
        self.set_apart: list[str] = []
        #: How often a poison has ended it.
        self.ends = 0
        self.ending: asyncio.Task[None] | None = None

    def add_to(self, server: Any) -> None:
        pd_pb2_grpc.add_PDServiceServicer_to_server(self, server)

    async def kill(self) -> None:
        for request in self.requests.values():
            if request.task:
                request.task.cancel()
        await asyncio.gather(*(r.task for r in self.requests.values() if r.task), return_exceptions=True)
        self.requests.clear()
        self.break_streams()
        self.streams.clear()
        self.isolation = Isolation()
        await super().kill()

    def break_streams(self) -> None:
        """Ends every Attach call, as a connection that breaks does; requests live on."""
        for queue in self.streams.values():
            queue.put_nowait(None)

    def beat(self, count: int, patience: float = 1.0, load: pd_pb2.PDLoad | None = None) -> None:
        """Says how far the engine is, and its load."""
        self.beats += 1
        for queue in self.streams.values():
            queue.put_nowait(pd_pb2.Beat(count=count, patience=patience, load=load))

    async def Submit(self, request: pd_pb2.SubmitRequest, context: Any) -> pd_pb2.SubmitReply:
        self.submits.append(request)
        if not self.isolation.admits(
            (request.proxy_id, request.request_id), self._produced(), time.monotonic()
        ):
            error = common_pb2.Error(code="unavailable", message="set apart")
            return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=error)
        await self.door.wait()
        if b"poison door" in request.messages:
            await self._end()
        if self.max_model_len and (tokens := tokens_of(request)) > self.max_model_len:
            message = f"{tokens} tokens, but the model takes {self.max_model_len}"
            error = common_pb2.Error(code="context_length_exceeded", message=message, param="messages")
            return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=error)
        if self.refusals:
            return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=self.refusals.pop(0))
        held = FakeRequest(request)
        held.ready = {slot.plan.mm_hash for slot in request.items if slot.state == pd_pb2.ITEM_STATE_READY}
        earlier = self.requests.get(request.request_id)
        if earlier is not None and earlier.submit.attempt == request.attempt and not self.takes_twice:
            error = common_pb2.Error(code="invalid_request_error", message="known", param="request_id")
            return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=error)
        if earlier is None or earlier.submit.attempt != request.attempt:
            if earlier is not None and earlier.task is not None:
                earlier.task.cancel()
            self.requests[request.request_id] = held
            held.task = asyncio.create_task(self._serve(held))
        if self.breaks:
            self.breaks -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_QUEUED)

    async def SetApart(self, request: pd_pb2.SetApartRequest, context: Any) -> pd_pb2.SetApartReply:
        if self.ending is not None and not self.ending.done():
            await asyncio.Event().wait()  # a process that ends answers nothing
        await context.send_initial_metadata(((INCARNATION_HEADER, f"{self.port}.{self.incarnation}"),))
        key = (request.proxy_id, request.request_id)
        if not self.isolation.claim(key, request.tokens, self._produced(), time.monotonic()):
            error = common_pb2.Error(code="unavailable", message="set apart for another one")
            return pd_pb2.SetApartReply(error=error)
        self.set_apart.append(request.request_id)
        for held in list(self.requests.values()):
            self.emit(held, lost=pd_pb2.Lost())
            if held.task is not None:
                held.task.cancel()
        self.requests.clear()
        return pd_pb2.SetApartReply()

    def _produced(self) -> int | None:
        held = self.requests.get(self.isolation.key[1]) if self.isolation.key else None
        return sum(event.HasField("tokens") for event in held.events) if held is not None else None

    async def _end_at(self, held: FakeRequest, tokens: int) -> None:
        poison = re.search(rb"poison (\d+)", held.submit.messages)
        if poison and tokens >= int(poison[1]):
            await self._end()

    async def _end(self) -> None:
        if self.ending is None or self.ending.done():
            self.ends += 1
            self.ending = asyncio.create_task(self._restart())
        await asyncio.Event().wait()

    async def _restart(self) -> None:
        await self.kill()
        await self.start()

    async def NotifyItems(self, request: pd_pb2.ItemsNotice, context: Any) -> common_pb2.Ack:
        self.notices.append(list(request.mm_hashes))
        for held in self.requests.values():
            held.ready.update(request.mm_hashes)
            held.news.set()
        return common_pb2.Ack()

    async def Cancel(self, request: pd_pb2.CancelRequest, context: Any) -> common_pb2.Ack:
        self.cancels += request.request_ids
        for request_id in request.request_ids:
            self.isolation.free((request.proxy_id, request_id))
            held = self.requests.pop(request_id, None)
            if held is not None and held.task is not None:
                held.task.cancel()
        return common_pb2.Ack()

    async def Pause(self, request: pd_pb2.PauseRequest, context: Any) -> common_pb2.Ack:
        if not self.can_pause:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older version")
        for request_id in request.paused:
            self.paused.append(request_id)
            if (held := self.requests.get(request_id)) is not None:
                held.resumed.clear()
        for request_id in request.resumed:
            self.resumed.append(request_id)
            if (held := self.requests.get(request_id)) is not None:
                held.resumed.set()
        return common_pb2.Ack()

    async def Attach(self, request: pd_pb2.AttachRequest, context: Any) -> AsyncIterator[pd_pb2.StepEvents]:
        await context.send_initial_metadata(((INCARNATION_HEADER, f"{self.port}.{self.incarnation}"),))
        self.attaches.append(request)
        queue: asyncio.Queue[pd_pb2.RequestEvent | pd_pb2.Beat | None] = asyncio.Queue()
        self.streams[request.proxy_id] = queue
        for item in request.requests:
            held = self.requests.get(item.request_id)
            if held is None or held.submit.attempt != item.attempt:
                lost = pd_pb2.Lost()
                queue.put_nowait(
                    pd_pb2.RequestEvent(request_id=item.request_id, attempt=item.attempt, lost=lost)
                )
                continue
            for past in held.events:
                if not past.HasField("tokens") or past.tokens.position >= item.position:
                    queue.put_nowait(past)
        while (event := await queue.get()) is not None:
            if isinstance(event, pd_pb2.Beat):
                yield pd_pb2.StepEvents(beat=event)
            elif request.reads_step_tokens and self.step_tokens and plain(event):
                yield pd_pb2.StepEvents(tokens=as_lists(event))
            else:
                yield pd_pb2.StepEvents(events=[event])
        if not self.leaving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    async def Tokenize(self, request: pd_pb2.TokenizeRequest, context: Any) -> pd_pb2.TokenizeReply:
        """A text's ids are its characters; a conversation's are [1, 2, 3]."""
        await self._asked(request)
        ids = [ord(letter) for letter in request.prompt.text] if request.HasField("prompt") else [1, 2, 3]
        return pd_pb2.TokenizeReply(token_ids=ids, max_model_len=4096)

    async def Detokenize(self, request: pd_pb2.DetokenizeRequest, context: Any) -> pd_pb2.DetokenizeReply:
        await self._asked(request)
        if any(token > 0x10FFFF for token in request.token_ids):
            error = common_pb2.Error(code="invalid_request_error", message="tokens: unknown", param="tokens")
            return pd_pb2.DetokenizeReply(error=error)
        ids = list(request.token_ids)
        if request.skip_special_tokens:
            ids = [token for token in ids if END_TOKEN < token < FIRST_TIME]
        return pd_pb2.DetokenizeReply(text="".join(TOKEN_NAMES.get(token, chr(token)) for token in ids))

    async def _asked(self, request: Any) -> None:
        self.questions.append(request)
        self.asking += 1
        await self.answering.wait()
        self.asking -= 1

    def emit(self, held: FakeRequest, **body: Any) -> None:
        event = pd_pb2.RequestEvent(request_id=held.submit.request_id, attempt=held.submit.attempt, **body)
        held.events.append(event)
        if queue := self.streams.get(held.submit.proxy_id):
            queue.put_nowait(event)

    async def _serve(self, held: FakeRequest) -> None:
        await self.admission.wait()
        items = len({slot.plan.mm_hash for slot in held.submit.items})
        async with self._admitting:
            while self.reserved + items > self.room:
                await asyncio.sleep(0.01)
        self.reserved += items
        try:
            await self._answer(held)
        finally:
            self.reserved -= items

    async def _answer(self, held: FakeRequest) -> None:
        submit = held.submit
        prompt = list(submit.resume.prompt_token_ids) or [1, 2, 3]
        self.emit(held, admitted=self._admitted(submit, prompt))
        for slot in submit.items:
            await self._load(held, slot.plan.mm_hash)
        sampling, script = submit.sampling, self.script
        if self.fail_with is not None and self.fail_choice in (None, sampling.choice):
            self.emit(held, finished=pd_pb2.Finished(reason="error", error=self.fail_with))
            return
        pooling = submit.pooling if submit.HasField("pooling") else None
        count = 0 if pooling else sampling.max_tokens or 8
        said: list[int] | None = None
        if submit.transcription.timestamps or submit.transcription.detect_language:
            start = submit.items[0].plan.grid_thw[0]
            said = self.windows[start] if self.windows else self.answers.pop(0)
            script = [chr(token) if END_TOKEN < token < 4000 else "" for token in said]
        if script is not None:
            count = min(count if said is None else len(said), len(script))
        for index in range(len(submit.resume.output_token_ids), count):
            await self._end_at(held, index)
            if index == self.pause_at:
                self.gate.clear()
            await self.gate.wait()
            await held.resumed.wait()
            text = script[index] if script else choice_text(sampling.choice, index)
            token = said[index] if said else 1000 + index
            tokens = pd_pb2.Tokens(position=index, token_ids=[token], text=text)
            if sampling.HasField("logprobs"):
                tokens.logprobs.append(fake_logprobs(index, text, sampling.logprobs))
            tokens.offered = self.role == "prefill" and index == len(submit.resume.output_token_ids)
            if tokens.offered and self.kv is not None:
                tokens.kv.CopyFrom(self.kv)
            if tokens.offered and self.tells_cached:
                tokens.cached_tokens = self._cached(submit)
            self.emit(held, tokens=tokens)
            if self.repeat_frames:
                self.emit(held, tokens=tokens)
            await asyncio.sleep(self.pace)
        finished = pd_pb2.Finished(
            reason="stop" if script is not None and count == len(script) else "length",
            prompt_tokens=len(prompt),
            completion_tokens=count,
            cached_tokens=self._cached(submit),
            queue_seconds=0.125,
            load_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=1.0,
            stop_sequence=self.stop_sequence,
        )
        if pooling is not None:
            scores = pooling.task == pd_pb2.Pooling.TASK_SCORE
            row = (0.75,) if scores else self.vector
            if pooling.task == pd_pb2.Pooling.TASK_TOKEN_EMBED:
                row = tuple(self.vector) * len(prompt)
            finished.pooled = struct.pack(f"<{len(row)}f", *row)
        self.emit(held, finished=finished)
        self.requests.pop(submit.request_id, None)

    def _cached(self, submit: pd_pb2.SubmitRequest) -> int:
        told = self.tells_cached and submit.resume.HasField("cached_tokens")
        return submit.resume.cached_tokens if told else self.cached

    def _admitted(self, submit: pd_pb2.SubmitRequest, prompt: Sequence[int]) -> pd_pb2.Admitted:
        places = [
            pd_pb2.ItemPlacement(offset=at, length=slot.plan.length) for at, slot in enumerate(submit.items)
        ]
        admitted = pd_pb2.Admitted(prompt_token_ids=prompt, placements=places, tool_format=self.tool_format)
        encoder = submit.encoder_prompt
        admitted.encoder_prompt_token_ids.extend([ord(letter) for letter in encoder.text])
        admitted.encoder_prompt_token_ids.extend(encoder.token_ids.ids)
        if submit.transcription.timestamps:
            admitted.timestamps.first, admitted.timestamps.seconds = FIRST_TIME, 0.02
        if self.reasoning is not None:
            admitted.reasoning.CopyFrom(self.reasoning)
        return admitted

    async def _load(self, held: FakeRequest, key: str) -> None:
        if key in held.loaded:
            return
        unencoded = {s.plan.mm_hash for s in held.submit.items if s.state == pd_pb2.ITEM_STATE_UNENCODED}
        if key in unencoded and key not in self.held:
            self.emit(held, item_missing=pd_pb2.ItemMissing(mm_hash=key))
        while key not in held.ready and key not in unencoded & self.held:
            held.news.clear()
            await held.news.wait()
        if self.missing.get(key):
            held.ready.discard(key)
            digest = self.missing[key].pop(0)
            self.emit(held, item_missing=pd_pb2.ItemMissing(mm_hash=key, damaged_digest=digest))
            await self._load(held, key)
            return
        held.loaded.add(key)
        self.emit(held, item_loaded=pd_pb2.ItemLoaded(mm_hash=key, seconds=0.1))
