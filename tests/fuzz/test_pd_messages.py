"""Messages into the real PD service: each is answered, nothing crashes, nothing is left."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import grpc

from support.engine.pd_serving import serving, tiny_model
from support.hostile.fuzzing import random_json, random_message, randoms
from triptych.base.errors import InternalError, RequestError
from triptych.base.types import ItemPlan
from triptych.pd_worker.native import LoadedModel, NativeWorker
from triptych.protos import pd_pb2
from triptych.protos.convert import plan_to_proto
from triptych.store.embedding_store import EmbeddingStore

REQUESTS, PROXIES = ["r1", "r2", "r3"], ["p1", "p2"]
KEYS = ["a" * 64, "b" * 64]
TEXTS = [
    '[{"role":"user","content":"hello"}]',
    '[{"role":"user","content":[{"type":"image"},{"type":"text","text":"?"}]}]',
    '[{"role":"user","content":[{"type":"image"},{"type":"image"}]}]',
    '[{"role":"tool","content":"x","tool_call_id":"1"}]',
    '[{"role":"user","content":"<|image_pad|><|im_end|>{{ messages }}"}]',
]


class Refused(Exception):
    """The call was aborted with a status."""


class Context:
    """What a servicer sees of a call."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        assert code is not grpc.StatusCode.INTERNAL, details
        raise Refused(details)

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass


class Peer:
    """Speaks every call of the service, mostly of a few requests and items, so that calls meet."""

    def __init__(self, worker: NativeWorker, model_key: str, plans: list[ItemPlan]) -> None:
        self._worker = worker
        self._servicer = worker.servicer
        self._known = {
            "request_id": REQUESTS,
            "request_ids": REQUESTS,
            "proxy_id": PROXIES,
            "model_key": [model_key],
            "plan": [plan_to_proto(plan) for plan in plans],
            "mm_hashes": KEYS,
            "attempt": [1, 1, 2, 3],
            "timeout": [5.0, 5.0, 0.01],
            "max_tokens": [1, 2, 3],
            "messages": [text.encode() for text in TEXTS],
            "prompt_token_ids": [1, 2, 3, 700],
            "output_token_ids": [1, 2, 3],
            "text_sent_chars": [0, 1, 5],
            "offset": [0, 1, 2],
        }

    async def say(self, rng: random.Random) -> None:
        kind = rng.choice(
            (pd_pb2.SubmitRequest,) * 5
            + (pd_pb2.ItemsNotice, pd_pb2.CancelRequest, pd_pb2.AttachRequest)
            + (pd_pb2.TokenizeRequest, pd_pb2.DetokenizeRequest)
        )
        message = self._made(kind, rng)
        async with asyncio.timeout(20):
            try:
                await self._call(message)
            except (Refused, RequestError) as error:
                assert not isinstance(error, InternalError), error

    def _made(self, kind: Any, rng: random.Random) -> Any:
        message = random_message(kind, rng, self._known)
        if not isinstance(message, pd_pb2.SubmitRequest) or rng.random() < 0.1:
            return message
        good = self._good(rng)
        for field in message.DESCRIPTOR.fields:
            if rng.random() < 0.06:
                lone = pd_pb2.SubmitRequest()
                lone.MergeFrom(message)
                for other in message.DESCRIPTOR.fields:
                    if other.name != field.name:
                        lone.ClearField(other.name)
                good.MergeFrom(lone)
        return good

    def _good(self, rng: random.Random) -> pd_pb2.SubmitRequest:
        """A request that can be served, unless its plans contradict each other or another request's."""
        images = rng.choice((0, 1, 1, 2))
        content: list[dict[str, Any]] = [{"type": "image"}] * images + [{"type": "text", "text": "?"}]
        message = pd_pb2.SubmitRequest(
            request_id=rng.choice(REQUESTS),
            proxy_id=rng.choice(PROXIES),
            model_key=self._known["model_key"][0],
            attempt=rng.choice((1, 1, 2)),
            timeout=rng.choice((5.0, 5.0, 0.05)),
            messages=json.dumps([{"role": "user", "content": content}]).encode(),
            salt=rng.choice(("", "x")),
        )
        message.sampling.max_tokens = rng.choice((1, 2, 8))
        message.sampling.ignore_eos = True
        for _ in range(images):
            message.items.add(plan=rng.choice(self._known["plan"]), state=rng.randrange(2))
        if rng.random() < 0.1:
            message.template.tools = json.dumps(random_json(rng)).encode()
            message.template.variables = json.dumps(random_json(rng)).encode()
        return message

    async def _call(self, message: Any) -> None:
        context: Any = Context()
        match message:
            case pd_pb2.SubmitRequest():
                reply = await self._servicer.Submit(message, context)
                assert reply.error.code != "internal_error", reply
            case pd_pb2.ItemsNotice():
                await self._servicer.NotifyItems(message, context)
            case pd_pb2.CancelRequest():
                await self._servicer.Cancel(message, context)
            case pd_pb2.TokenizeRequest():
                await self._servicer.Tokenize(message, context)
            case pd_pb2.DetokenizeRequest():
                await self._servicer.Detokenize(message, context)
            case _:
                await self._listen(message, context)

    async def _listen(self, message: pd_pb2.AttachRequest, context: Any) -> None:
        """Reads what is there and breaks the stream."""
        stream = self._servicer.Attach(message, context)
        try:
            async with asyncio.timeout(0.01):
                async for events in stream:
                    for event in events.events:
                        assert event.finished.error.code != "internal_error", event
        except TimeoutError:
            pass
        finally:
            await stream.aclose()

    async def at_rest(self) -> None:
        """Everything given up, the engine holds nothing."""
        for proxy in list(self._worker.streams._proxies):
            names = list(self._worker.streams._proxies[proxy].requests)
            cancel = pd_pb2.CancelRequest(proxy_id=proxy, request_ids=names)
            await self._servicer.Cancel(cancel, Context())  # type: ignore[arg-type]
        scheduler = self._worker.engine.scheduler
        async with asyncio.timeout(20):
            while (
                scheduler.num_running
                + scheduler.num_waiting
                + scheduler.kv.num_used
                + scheduler.items.cache.references
                + scheduler.items.admission.reserved
            ):
                await asyncio.sleep(0.01)
        assert self._worker.streams.unfinished == 0


def plans_of(model: LoadedModel) -> list[ItemPlan]:
    """Two items, and what a liar says of the same two."""
    geometry = model.decoder.geometry
    width = geometry.hidden_size * (1 + geometry.deepstack_levels)
    shapes = ((4, (1, 4, 4)), (1, (1, 2, 2)), (9, (1, 6, 6)))
    namespace = model.identity.namespace
    return [
        ItemPlan(key, namespace, "image", rows, width, "float32", rows, None, grid)
        for rows, grid in shapes
        for key in KEYS
    ]


def test_any_calls_of_any_proxies_are_answered_and_leave_nothing(store_url, fuzzer, caplog):
    model = tiny_model("qwen3_vl")
    plans = plans_of(model)
    with asyncio.Runner() as runner:
        store = runner.run(EmbeddingStore.connect(store_url))
        runner.run(store.save(plans[0], bytes(plans[0].nbytes), ttl=600))
        opened = serving(model, store_url, encoder_cache_memory=1 << 20, kv_memory=4 << 20, max_model_len=128)
        worker, client = runner.run(opened.__aenter__())
        peer = Peer(worker, model.identity.model_key, plans)
        fuzzer.run("PD calls", randoms(), lambda rng: runner.run(peer.say(rng)), 100)
        runner.run(peer.at_rest())
        assert not [record for record in caplog.records if record.exc_info], caplog.text
        good = client.message("good", "hello", max_tokens=3, ignore_eos=True)
        runner.run(client.submit(good))
        assert len(runner.run(client.until("good")).token_ids) == 3
        runner.run(opened.__aexit__(None, None, None))
        runner.run(store.close())
