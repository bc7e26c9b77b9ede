"""Workers without models, for measurements of the proxy: they answer at once, with what was prepared."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.ec_connector.registry.registry import RegistrySnapshot
from triptych.protos import common_pb2, encoder_pb2, encoder_pb2_grpc, pd_pb2, pd_pb2_grpc
from triptych.rpc.channels import listen, make_server
from triptych.rpc.tls.certificates import Certificates
from triptych.types import ItemPlan, WorkerInfo

Context = aio.ServicerContext[Message, Message]

MODEL = "bench"
#: What an SSE chunk with one token holds.
MARK = b'"content":" token"'
MODEL_KEY, NAMESPACE = "a" * 64, "b" * 64
_ROWS, _WIDTH = 100, 64


class NoStore:
    """A store that holds nothing."""

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        return [None for _ in keys]

    async def epoch(self) -> str:
        return "epoch"

    @property
    def clock_jumps(self) -> int:
        return 0


class FixedRegistry:
    """A registry with one PD worker, and one encoder if it has an address."""

    def __init__(self, pd_address: str, encoder_address: str = "") -> None:
        self.infos = [WorkerInfo(pd_address, "pd", "i", MODEL_KEY, MODEL, (), {"max_num_seqs": 4096})]
        if encoder_address:
            credit = {"plan_credit": 16, "tower_credit": 8}
            self.infos.append(
                WorkerInfo(encoder_address, "encoder", "i", MODEL_KEY, MODEL, (NAMESPACE,), credit)
            )

    async def poll(self, proxy_id: str, term: float, *, mark: str) -> RegistrySnapshot:
        return RegistrySnapshot("fixed", "epoch", 1, None if mark else list(self.infos))


@dataclass(slots=True)
class Inbox:
    """Requests of one proxy: those that wait for a full batch or for their items, and steps to be sent."""

    waiting: list[pd_pb2.SubmitRequest] = field(default_factory=list)
    pending: dict[str, tuple[pd_pb2.SubmitRequest, set[str]]] = field(default_factory=dict)
    steps: asyncio.Queue[list[pd_pb2.StepEvents]] = field(default_factory=asyncio.Queue)


class ScriptedPD(pd_pb2_grpc.PDServiceServicer):
    """Waits for `streams` requests of a proxy, then sends one token of each in every message.

    A request for one token waits for no other, one with items until the proxy has said that they are stored.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.inboxes: defaultdict[str, Inbox] = defaultdict(Inbox)

    async def Submit(self, request: pd_pb2.SubmitRequest, context: Context) -> pd_pb2.SubmitReply:
        inbox = self.inboxes[request.proxy_id]
        items = {slot.plan.mm_hash for slot in request.items if slot.state == pd_pb2.ITEM_STATE_PENDING}
        if items:
            inbox.pending[request.request_id] = (request, items)
            inbox.steps.put_nowait([_admitted([request])])
        elif request.sampling.max_tokens == 1:
            inbox.steps.put_nowait([_admitted([request]), *_tokens([request])])
        else:
            inbox.waiting.append(request)
            if len(inbox.waiting) == self.streams:
                batch, inbox.waiting = inbox.waiting, []
                inbox.steps.put_nowait([_admitted(batch), *_tokens(batch)])
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_ADMITTED)

    async def NotifyItems(self, request: pd_pb2.ItemsNotice, context: Context) -> common_pb2.Ack:
        inbox = self.inboxes[request.proxy_id]
        for name, (submitted, items) in list(inbox.pending.items()):
            items.difference_update(request.mm_hashes)
            if not items:
                del inbox.pending[name]
                inbox.steps.put_nowait([_loaded(submitted), *_tokens([submitted])])
        return common_pb2.Ack()

    async def Attach(
        self, request: pd_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[pd_pb2.StepEvents]:
        await context.send_initial_metadata(())
        inbox = self.inboxes[request.proxy_id]
        while True:
            for step in await inbox.steps.get():
                yield step

    async def Cancel(self, request: pd_pb2.CancelRequest, context: Context) -> common_pb2.Ack:
        raise NotImplementedError


class ScriptedEncoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Takes the media, plans at once, and is ready as soon as it may run."""

    async def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        messages = aiter(requests)
        job = (await anext(messages)).job
        left = job.media_bytes
        while left > 0:
            left -= len((await anext(messages)).media)
        plan = common_pb2.ItemPlan(
            mm_hash=job.mm_hash,
            namespace=NAMESPACE,
            modality="image",
            rows=_ROWS,
            width=_WIDTH,
            dtype="float32",
            length=_ROWS,
            grid_thw=[1, 20, 20],
        )
        yield encoder_pb2.EncodeEvent(planned=plan)
        while not (await anext(messages)).HasField("run"):
            continue
        yield encoder_pb2.EncodeEvent(ready=encoder_pb2.ItemReady(plan=plan))


def _admitted(batch: Sequence[pd_pb2.SubmitRequest]) -> pd_pb2.StepEvents:
    events = []
    for request in batch:
        places = [pd_pb2.ItemPlacement(offset=at * _ROWS, length=_ROWS) for at, _ in enumerate(request.items)]
        admitted = pd_pb2.Admitted(prompt_token_ids=[1, 2, 3], placements=places)
        events.append(_event(request, admitted=admitted))
    return pd_pb2.StepEvents(events=events)


def _loaded(request: pd_pb2.SubmitRequest) -> pd_pb2.StepEvents:
    keys = dict.fromkeys(slot.plan.mm_hash for slot in request.items)
    return pd_pb2.StepEvents(
        events=[_event(request, item_loaded=pd_pb2.ItemLoaded(mm_hash=key)) for key in keys]
    )


def _tokens(batch: Sequence[pd_pb2.SubmitRequest]) -> list[pd_pb2.StepEvents]:
    """A step for every token, then the end."""
    count, size = batch[0].sampling.max_tokens, len(batch)
    steps = []
    for at in range(count):
        tokens = pd_pb2.StepTokens(
            request_ids=[request.request_id for request in batch],
            attempts=[1] * size,
            positions=[at] * size,
            texts=[" token"] * size,
            token_ids=[1000 + at] * size,
        )
        steps.append(pd_pb2.StepEvents(tokens=tokens))
    end = pd_pb2.Finished(reason="length", prompt_tokens=3, completion_tokens=count)
    steps.append(pd_pb2.StepEvents(events=[_event(request, finished=end) for request in batch]))
    return steps


def _event(request: pd_pb2.SubmitRequest, **body: Message) -> pd_pb2.RequestEvent:
    event = pd_pb2.RequestEvent(request_id=request.request_id, attempt=1)
    for name, value in body.items():
        getattr(event, name).CopyFrom(value)
    return event


async def serve_workers(streams: int, certificates: Certificates | None = None) -> tuple[aio.Server, int]:
    """Both workers behind one port, which is returned, with health beside them."""
    server = make_server()
    pd_pb2_grpc.add_PDServiceServicer_to_server(ScriptedPD(streams), server)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(ScriptedEncoder(), server)
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    await state.set("", health_pb2.HealthCheckResponse.SERVING)
    port = listen(server, "127.0.0.1:0", certificates, mutual=True)
    await server.start()
    return server, port
