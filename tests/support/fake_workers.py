"""Encoder and PD workers that follow a script, as real gRPC servers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.ec_connector.store import EmbeddingStore
from triptych.hashing import mm_hash
from triptych.protos import (
    common_pb2,
    encoder_pb2,
    encoder_pb2_grpc,
    pd_pb2,
    pd_pb2_grpc,
)
from triptych.protos.convert import plan_from_proto
from triptych.rpc import make_server
from triptych.types import WorkerInfo

MODEL = "demo"
MODEL_KEY = "a" * 64
NAMESPACE = "b" * 64
ROWS, WIDTH = 4, 8
#: The token of 0 seconds, and the text of tokens that are no characters.
FIRST_TIME, END_TOKEN = 5000, 2
TOKEN_NAMES = {4000: "<|de|>"}


def picture(name: str, size: int = 64) -> bytes:
    """Bytes that stand for an image file."""
    return (name.encode() + b"\x00" * size)[: max(size, len(name))]


def data_url(media: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(media).decode()


def user(text: str, *pictures: bytes) -> list[dict[str, Any]]:
    """The messages of a question about pictures."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(media)}} for media in pictures
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def key_of(media: bytes, salt: str = "") -> str:
    return mm_hash(media, namespace=NAMESPACE, modality="image", salt=salt)


async def until(condition: Any, what: str = "the condition", seconds: float = 10.0) -> None:
    """Waits until `condition()` holds; AssertionError after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come about"
        await asyncio.sleep(0.01)


async def within(what: str, work: Awaitable[Any], seconds: float = 15.0) -> None:
    """Awaits `work`; AssertionError that names it after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        raise AssertionError(f"{what} did not come within {seconds:g} s") from None


class StallingHealth(health.aio.HealthServicer):
    """Health checks that get no answer while `answers` is cleared, as those of a stopped process."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        #: Checks that wait for their answer, and those that have had it.
        self.asked = 0
        self.checked = 0

    async def Check(self, request: Any, context: Any) -> Any:
        self.asked += 1
        await self.answers.wait()
        self.asked -= 1
        self.checked += 1
        return await super().Check(request, context)


class FakeWorker:
    """A gRPC server on a port of its own that can be killed and started again there."""

    pool = ""
    modality = "image"
    #: Whether the model's items are attended to from beside the prompt.
    encoder_decoder = False

    def __init__(self) -> None:
        self.port = 0
        self.incarnation = 0
        self.model_key = MODEL_KEY
        self.namespace = NAMESPACE
        self.server: Any = None
        self.health = StallingHealth()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def info(self) -> WorkerInfo:
        namespaces = (self.namespace,) if self.pool == "encoder" else ()
        capacity = {"plan_credit": 4, "tower_credit": 2} if self.pool == "encoder" else {"max_num_seqs": 64}
        if self.pool == "pd" and self.encoder_decoder:
            capacity["encoder_decoder"] = 1
        incarnation = f"i{self.incarnation}"
        return WorkerInfo(
            self.address, self.pool, incarnation, self.model_key, MODEL, namespaces, capacity, self.modality
        )

    async def start(self) -> None:
        self.incarnation += 1
        self.server = make_server()
        self.health = StallingHealth()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.add_to(self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    def add_to(self, server: Any) -> None:
        raise NotImplementedError

    async def kill(self) -> None:
        """Connections end at once."""
        if self.server is not None:
            await self.server.stop(None)
            self.server = None


class FakeEncoder(FakeWorker, encoder_pb2_grpc.EncoderServiceServicer):
    """Plans at once and saves to the real store. `gate` holds plans, `tower` holds runs, while cleared.

    It ends, and is started again, when it is at `ends_at[mm_hash]` ("plan", "tower") with such an item.
    """

    pool = "encoder"

    def __init__(self, store: EmbeddingStore) -> None:
        super().__init__()
        self.store = store
        self.jobs: list[encoder_pb2.EncodeJob] = []
        self.media: list[bytes] = []
        self.runs = 0
        self.cancelled = 0
        self.open = 0
        self.failures: list[encoder_pb2.JobFailed] = []
        self.ask_media_again = False
        self.ends_at: dict[str, str] = {}
        #: Of every audio file.
        self.frames = 400
        self.restarts: set[asyncio.Task[None]] = set()
        self.gate = asyncio.Event()
        self.tower = asyncio.Event()
        self.gate.set()
        self.tower.set()

    def add_to(self, server: Any) -> None:
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(self, server)

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        self.open += 1
        try:
            async for event in self._encode(requests):
                yield event
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _encode(self, requests: Any) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        messages = aiter(requests)
        job = (await anext(messages)).job
        self.jobs.append(job)
        media = b""
        while len(media) < job.media_bytes:
            media += (await anext(messages)).media
        self.media.append(media)
        if self.failures:
            yield encoder_pb2.EncodeEvent(failed=self.failures.pop(0))
            return
        await self.gate.wait()
        await self._end_at("plan", job.mm_hash)
        plan = fake_plan(job.mm_hash, self.namespace)
        if self.encoder_decoder:
            plan = cross_plan(job, self.namespace, self.frames)
        yield encoder_pb2.EncodeEvent(planned=plan)
        if self.ask_media_again:
            self.ask_media_again = False
            yield encoder_pb2.EncodeEvent(need_media=encoder_pb2.NeedMedia())
        while not (message := await anext(messages)).HasField("run"):
            self.media.append(message.media)
        self.runs += 1
        await self._end_at("tower", job.mm_hash)
        await self.tower.wait()
        values = plan_from_proto(plan)
        await self.store.save(values, b"\x01" * values.nbytes, ttl=60.0, damaged_digest=job.damaged_digest)
        ready = encoder_pb2.ItemReady(plan=plan, encode_seconds=0.5, save_seconds=0.25)
        yield encoder_pb2.EncodeEvent(ready=ready)

    async def _end_at(self, stage: str, mm_hash: str) -> None:
        if self.ends_at.get(mm_hash) == stage:
            self.restarts.add(asyncio.create_task(self._restart()))
            await asyncio.Event().wait()

    async def _restart(self) -> None:
        await self.kill()
        await self.start()


def fake_plan(key: str, namespace: str = NAMESPACE) -> common_pb2.ItemPlan:
    return common_pb2.ItemPlan(
        mm_hash=key,
        namespace=namespace,
        modality="image",
        rows=ROWS,
        width=WIDTH,
        dtype="float32",
        length=ROWS,
        grid_thw=[1, 2, 2],
    )


def cross_plan(job: encoder_pb2.EncodeJob, namespace: str, frames: int) -> common_pb2.ItemPlan:
    """What an encoder-decoder model's encoder says of a text, or of a window of 3000 frames of audio."""
    plan = fake_plan(job.mm_hash, namespace)
    plan.modality, plan.length = job.modality, 0
    del plan.grid_thw[:]
    if job.modality == "audio":
        start = json.loads(job.processor_options or "{}").get("start_frame", 0)
        plan.grid_thw.extend([start, min(3000, frames - start), frames])
    return plan


def token_text(index: int) -> str:
    return f"t{index} "


def whole_text(count: int) -> str:
    return "".join(token_text(index) for index in range(count))


def choice_text(choice: int, index: int) -> str:
    """Token texts of the choices differ, so that a mix-up shows."""
    return token_text(index) if choice == 0 else f"c{choice}-{token_text(index)}"


def fake_logprobs(index: int, text: str, top: int) -> common_pb2.PositionLogprobs:
    """Of token `index`: the chosen one first, then others that are ever less likely, the last impossible."""

    def token(rank: int) -> common_pb2.TokenLogprob:
        shown = text if rank == 0 else f"other{rank}"
        logprob = float("-inf") if rank == 2 else -0.5 * (rank + 1)
        return common_pb2.TokenLogprob(
            token_id=1000 + index, logprob=logprob, text=shown, utf8=shown.encode()
        )

    return common_pb2.PositionLogprobs(chosen=token(0), top=[token(rank) for rank in range(top)])


@dataclass
class FakeRequest:
    submit: pd_pb2.SubmitRequest
    loaded: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[pd_pb2.RequestEvent] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class FakePD(FakeWorker, pd_pb2_grpc.PDServiceServicer):
    """Token i is 1000 + i. `gate` holds tokens while cleared; `admission` holds admissions.

    `script` has the texts of all tokens of an answer that ends by itself.
    """

    pool = "pd"

    def __init__(self) -> None:
        super().__init__()
        self.submits: list[pd_pb2.SubmitRequest] = []
        self.cancels: list[str] = []
        self.notices: list[list[str]] = []
        self.attaches: list[pd_pb2.AttachRequest] = []
        self.requests: dict[str, FakeRequest] = {}
        self.refusals: list[common_pb2.Error] = []
        self.missing: dict[str, list[str]] = {}
        self.fail_with: common_pb2.Error | None = None
        self.pause_at: int | None = None
        self.repeat_frames = False
        self.script: list[str] | None = None
        #: Token ids of the answers to come where times or a language are asked for, the end token last.
        self.answers: list[list[int]] = []
        #: The same by the first frame of their window.
        self.windows: dict[int, list[int]] = {}
        self.fail_choice: int | None = None
        self.questions: list[Any] = []
        self.gate = asyncio.Event()
        self.admission = asyncio.Event()
        self.gate.set()
        self.admission.set()
        self.streams: dict[str, asyncio.Queue[pd_pb2.RequestEvent | None]] = {}

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
        await super().kill()

    def break_streams(self) -> None:
        """Ends every Attach call, as a connection that breaks does; requests live on."""
        for queue in self.streams.values():
            queue.put_nowait(None)

    async def Submit(self, request: pd_pb2.SubmitRequest, context: Any) -> pd_pb2.SubmitReply:
        self.submits.append(request)
        if self.refusals:
            return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_REFUSED, error=self.refusals.pop(0))
        held = FakeRequest(request)
        held.ready = {slot.plan.mm_hash for slot in request.items if slot.state == pd_pb2.ITEM_STATE_READY}
        self.requests[request.request_id] = held
        held.task = asyncio.create_task(self._serve(held))
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_QUEUED)

    async def NotifyItems(self, request: pd_pb2.ItemsNotice, context: Any) -> common_pb2.Ack:
        self.notices.append(list(request.mm_hashes))
        for held in self.requests.values():
            held.ready.update(request.mm_hashes)
            held.news.set()
        return common_pb2.Ack()

    async def Cancel(self, request: pd_pb2.CancelRequest, context: Any) -> common_pb2.Ack:
        self.cancels += request.request_ids
        for request_id in request.request_ids:
            held = self.requests.pop(request_id, None)
            if held is not None and held.task is not None:
                held.task.cancel()
        return common_pb2.Ack()

    async def Attach(self, request: pd_pb2.AttachRequest, context: Any) -> AsyncIterator[pd_pb2.StepEvents]:
        await context.send_initial_metadata(())
        self.attaches.append(request)
        queue: asyncio.Queue[pd_pb2.RequestEvent | None] = asyncio.Queue()
        self.streams[request.proxy_id] = queue
        for item in request.requests:
            held = self.requests.get(item.request_id)
            if held is None or held.submit.attempt != item.attempt:
                lost = pd_pb2.Lost()
                queue.put_nowait(
                    pd_pb2.RequestEvent(request_id=item.request_id, attempt=item.attempt, lost=lost)
                )
                continue
            for event in held.events:
                if not event.HasField("tokens") or event.tokens.position >= item.position:
                    queue.put_nowait(event)
        while (event := await queue.get()) is not None:
            yield pd_pb2.StepEvents(events=[event])

    async def Tokenize(self, request: pd_pb2.TokenizeRequest, context: Any) -> pd_pb2.TokenizeReply:
        """A text's ids are its characters; a conversation's are [1, 2, 3]."""
        self.questions.append(request)
        ids = [ord(letter) for letter in request.prompt.text] if request.HasField("prompt") else [1, 2, 3]
        return pd_pb2.TokenizeReply(token_ids=ids, max_model_len=4096)

    async def Detokenize(self, request: pd_pb2.DetokenizeRequest, context: Any) -> pd_pb2.DetokenizeReply:
        self.questions.append(request)
        if any(token > 0x10FFFF for token in request.token_ids):
            error = common_pb2.Error(code="invalid_request_error", message="tokens: unknown", param="tokens")
            return pd_pb2.DetokenizeReply(error=error)
        ids = list(request.token_ids)
        if request.skip_special_tokens:
            ids = [token for token in ids if END_TOKEN < token < FIRST_TIME]
        return pd_pb2.DetokenizeReply(text="".join(TOKEN_NAMES.get(token, chr(token)) for token in ids))

    def emit(self, held: FakeRequest, **body: Any) -> None:
        event = pd_pb2.RequestEvent(request_id=held.submit.request_id, attempt=held.submit.attempt, **body)
        held.events.append(event)
        if queue := self.streams.get(held.submit.proxy_id):
            queue.put_nowait(event)

    async def _serve(self, held: FakeRequest) -> None:
        submit = held.submit
        await self.admission.wait()
        prompt = list(submit.resume.prompt_token_ids) or [1, 2, 3]
        places = [
            pd_pb2.ItemPlacement(offset=at, length=slot.plan.length) for at, slot in enumerate(submit.items)
        ]
        admitted = pd_pb2.Admitted(prompt_token_ids=prompt, placements=places)
        encoder = submit.encoder_prompt
        admitted.encoder_prompt_token_ids.extend([ord(letter) for letter in encoder.text])
        admitted.encoder_prompt_token_ids.extend(encoder.token_ids.ids)
        if submit.transcription.timestamps:
            admitted.timestamps.first, admitted.timestamps.seconds = FIRST_TIME, 0.02
        self.emit(held, admitted=admitted)
        for slot in submit.items:
            await self._load(held, slot.plan.mm_hash)
        sampling, script = submit.sampling, self.script
        if self.fail_with is not None and self.fail_choice in (None, sampling.choice):
            self.emit(held, finished=pd_pb2.Finished(reason="error", error=self.fail_with))
            return
        count = sampling.max_tokens or 8
        said: list[int] | None = None
        if submit.transcription.timestamps or submit.transcription.detect_language:
            start = submit.items[0].plan.grid_thw[0]
            said = self.windows[start] if self.windows else self.answers.pop(0)
            script = [chr(token) if END_TOKEN < token < 4000 else "" for token in said]
        if script is not None:
            count = min(count if said is None else len(said), len(script))
        for index in range(len(submit.resume.output_token_ids), count):
            if index == self.pause_at:
                self.gate.clear()
            await self.gate.wait()
            text = script[index] if script else choice_text(sampling.choice, index)
            token = said[index] if said else 1000 + index
            tokens = pd_pb2.Tokens(position=index, token_ids=[token], text=text)
            if sampling.HasField("logprobs"):
                tokens.logprobs.append(fake_logprobs(index, text, sampling.logprobs))
            self.emit(held, tokens=tokens)
            if self.repeat_frames:
                self.emit(held, tokens=tokens)
            await asyncio.sleep(0)
        finished = pd_pb2.Finished(
            reason="stop" if script is not None and count == len(script) else "length",
            prompt_tokens=len(prompt),
            completion_tokens=count,
            cached_tokens=2,
            queue_seconds=0.125,
            load_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=1.0,
        )
        self.emit(held, finished=finished)
        self.requests.pop(submit.request_id, None)

    async def _load(self, held: FakeRequest, key: str) -> None:
        if key in held.loaded:
            return
        while key not in held.ready:
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
