"""One PD worker before its engine, native or vLLM: input processor, event streams, gRPC service, upkeep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

from prometheus_client import Counter, Gauge
from tokenizers import Tokenizer

from triptych.base.config import PDConfig
from triptych.base.engine_beat import BusyClock, EngineBeat
from triptych.base.errors import Unavailable
from triptych.base.hashing import stored_as
from triptych.base.metrics import PDMetrics
from triptych.base.types import INT8, ITEMS, TASKS, WorkerInfo
from triptych.ec_connector.base import DirectTransfer
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.models.checkpoint.folder import given_template
from triptych.models.checkpoint.pooling import GENERATES, PoolingDefaults, read_pooling
from triptych.models.identity import ModelIdentity, model_identity
from triptych.models.registry import generation_defaults
from triptych.pd_worker.events.attempt_trace import PDTraces
from triptych.pd_worker.events.streams import EventStreams
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.pd_worker.frontend.encdec_prompt import EncDecPrompts
from triptych.pd_worker.frontend.grammar import Formats
from triptych.pd_worker.frontend.input_processor import InputProcessor
from triptych.pd_worker.frontend.prompt import PromptBuilder, open_checkpoint
from triptych.pd_worker.item_limits import parse_item_limits
from triptych.pd_worker.server import MAX_WAITING, EnginePort, PDServicer
from triptych.pd_worker.turn_pool import TurnPool
from triptych.protos import pd_pb2
from triptych.registry.matching import PREFILL, ROLE, ROLES, ROW_WIDTH
from triptych.registry.registry import StoreReach

logger = logging.getLogger(__name__)

#: How often proxies get the engine's beat, in seconds.
BEAT_SECONDS = 1.0
_SWEEP_SECONDS = 0.25
_POLL_SECONDS = 0.02


class StreamUpkeep:
    """Two tasks in the running event loop, from `start` to `stop`. `load` is asked for each beat."""

    def __init__(self, streams: EventStreams, beat: EngineBeat, load: Callable[[], pd_pb2.PDLoad]) -> None:
        self._streams = streams
        self._beat = beat
        self._load = load
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._sweep(), name="sweep"),
            loop.create_task(self._send_beat(), name="beat"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drain(self, grace: float) -> None:
        """Returns once no request is left, after at most `grace` seconds."""
        deadline = time.monotonic() + grace
        while not self._streams.idle and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._streams.sweep()

    async def _send_beat(self) -> None:
        while True:
            # The count of a dead engine does not advance.
            self._streams.beat(self._beat.count, self._beat.patience, self._load())
            await asyncio.sleep(BEAT_SECONDS)


def load_report(metrics: PDMetrics, encoder_cache_bytes: int) -> pd_pb2.PDLoad:
    """The load now; `encoder_cache_bytes` is the encoder cache's size."""
    return pd_pb2.PDLoad(
        running=int(_value(metrics.requests_running)),
        waiting=int(_value(metrics.requests_waiting)),
        kv_usage=_value(metrics.kv_cache_usage),
        cache_usage=_value(metrics.encoder_cache_bytes) / max(encoder_cache_bytes, 1),
        generated_tokens=int(_value(metrics.generation_tokens)),
    )


def _value(metric: Counter | Gauge) -> float:
    """The value of a metric without labels of its own. Once a second: nothing is added to a step."""
    return next(sample.value for family in metric.collect() for sample in family.samples)


INPUT_THREADS = 2


@dataclass(frozen=True, slots=True)
class PDModel:
    """A checkpoint's decoder side, and what its files say. Before vLLM `decoder` has no weights."""

    path: Path
    name: str
    decoder: DecoderSide
    identity: ModelIdentity
    defaults: GenerationDefaults
    prompts: PromptBuilder
    tokenizer: Tokenizer
    pooling: PoolingDefaults

    @classmethod
    def open(cls, config: PDConfig, decoder: DecoderSide, max_model_len: int, **more: Any) -> Self:
        """The checkpoint of `config.model` for requests of such a length; `more` are a subclass's fields."""
        path = Path(config.model)
        prompts, tokenizer = open_checkpoint(
            path,
            decoder,
            max_model_len,
            chat_template=given_template(config.chat_template),
            reasoning_parser=config.reasoning_parser,
            tool_call_parser=config.tool_call_parser,
        )
        identity = model_identity(
            path, dtype=decoder.dtype, revision=config.model_revision, quantization=config.quantization
        )
        defaults = generation_defaults(path)
        if (beams := defaults.extra.get("num_beams")) not in (None, 1):
            logger.warning(
                "generation_config.json of MODEL=%s asks for beam search (num_beams %s), which is not done: "
                "answers are those of num_beams=1, not those of transformers' generate with its defaults",
                path,
                beams,
            )
        name = config.served_model_name or path.resolve().name
        pooling = GENERATES if decoder.cross is not None else read_pooling(path, tokenizer)
        return cls(path, name, decoder, identity, defaults, prompts, tokenizer, pooling, **more)


class PDEngine(EnginePort, Protocol):
    """The engine as its worker uses it."""

    @property
    def max_model_len(self) -> int: ...

    def fail_unloaded(self) -> None: ...


class PDWorker:
    """The worker of one model and one engine, in the running event loop.

    Engines put their events into `streams`: a subclass makes its engine after this class, and then calls
    `connect`. Without an `incarnation` one is drawn.
    """

    servicer: PDServicer
    _engine: PDEngine
    _upkeep: StreamUpkeep
    busy_clocks: tuple[BusyClock]
    #: The paths of embeddings besides the store; None without.
    direct: DirectTransfer | None = None

    def __init__(self, config: PDConfig, model: PDModel, incarnation: str = "") -> None:
        self._config = config
        self._model = model
        self._incarnation = incarnation or uuid.uuid4().hex
        inputs = ThreadPoolExecutor(INPUT_THREADS, thread_name_prefix="input")
        self._pool = TurnPool(inputs, INPUT_THREADS)
        queries = ThreadPoolExecutor(INPUT_THREADS, thread_name_prefix="query")
        self._queries = TurnPool(queries, INPUT_THREADS)
        texts = TokenTexts(model.tokenizer)
        self.streams = EventStreams(self._cancel, texts=texts, offers=config.role == PREFILL)

    def connect(
        self,
        engine: PDEngine,
        formats: Formats,
        beat: EngineBeat,
        load: Callable[[], pd_pb2.PDLoad],
        *,
        two_prompts: EncDecPrompts | None = None,
        traces: PDTraces | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Puts the service before `engine`; proxies get its `beat` and `load`. `adapters` are the engine's
        names of LoRA adapters, by key."""
        self._engine = engine
        self.busy_clocks = (beat.busy,)
        model = self._model
        self._upkeep = StreamUpkeep(self.streams, beat, load)
        input_processor = InputProcessor(
            model_key=model.identity.model_key,
            prompts=model.prompts,
            tokenizer=model.tokenizer,
            decoder=model.decoder,
            defaults=model.defaults,
            max_model_len=engine.max_model_len,
            encoder_cache_bytes=self._config.embedding_memory,
            grammars=formats,
            two_prompts=two_prompts,
            pooling=model.pooling,
            item_limits=parse_item_limits(self._config.limit_mm_per_prompt),
            adapters=adapters,
        )
        self.servicer = PDServicer(
            engine,
            input_processor,
            self.streams,
            self._pool,
            self._queries,
            max_requests=MAX_WAITING + self._config.max_num_seqs,
            incarnation=self._incarnation,
            traces=traces,
            sources=None if self.direct is None else self.direct.sources,
        )

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration."""
        raise NotImplementedError

    def registration(
        self, address: str, metrics_port: int, kind: str, capacity: Mapping[str, int]
    ) -> WorkerInfo:
        """A registration with an engine's own `capacity`. The worker takes embeddings of every namespace of
        its tower, of which it names its own, in whichever form its rows are stored."""
        common = {
            "encoder_cache_bytes": self._config.embedding_memory,
            "max_num_seqs": self._config.max_num_seqs,
            "max_model_len": self._engine.max_model_len,
            "tensor_parallel": self._config.tensor_parallel,
            "metrics_port": metrics_port,
            ROW_WIDTH: self._model.decoder.row_width,
            ROLE: ROLES.index(self._config.role),
            "task": TASKS.index(self._model.pooling.task),
            "items": sum(1 << ITEMS.index(each) for each in self._model.prompts.modalities),
        }
        namespace = self._model.identity.namespace
        return WorkerInfo(
            address=address,
            pool="pd",
            incarnation=self._incarnation,
            model_key=self._model.identity.model_key,
            model=self._model.name,
            namespaces=(namespace, stored_as(namespace, INT8)),
            capacity={**common, **capacity},
            modality=self._model.decoder.modality,
            kind=kind,
        )

    def start(self) -> None:
        self._upkeep.start()

    def describe_held(self) -> str:
        return f"{self.streams.unfinished} requests"

    async def drain(self, grace: float) -> None:
        """Refuses new requests and lets those held finish, for at most `grace` seconds."""
        self.servicer.drain()
        await self._upkeep.drain(grace)

    def end_streams(self) -> None:
        self.streams.shut_down()

    async def stop(self) -> None:
        """Ends the engine and all threads."""
        await self._upkeep.stop()
        await self._stop_engine()
        self._pool.shutdown()
        self._queries.shutdown()

    async def _stop_engine(self) -> None:
        raise NotImplementedError

    def fail_unloaded(self) -> None:
        """Ends requests that wait for embeddings, so that they go on elsewhere. Called again and again while
        the process does not reach the store. With paths besides it, each load finds out for itself."""
        if self.direct is None:
            self._engine.fail_unloaded()

    def follow(self, reach: StoreReach) -> None:
        """Loads from the store follow whether this process reaches it."""
        if self.direct is not None:
            self.direct.reaches_store = lambda: reach.reaches

    def _cancel(self, request_ids: Sequence[str], proxy_id: str) -> None:
        # An engine that is stopping ends all its requests anyway.
        with contextlib.suppress(Unavailable):
            self._engine.cancel(request_ids, proxy_id)
