"""One PD worker in front of a vLLM server: input processor, event streams, gRPC service and engine."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from triptych.config import PDConfig
from triptych.ec_connector.registry.matching import ROW_WIDTH
from triptych.engine_beat import EngineBeat
from triptych.machine.worker_kind import worker_kind
from triptych.metrics import PDMetrics
from triptych.pd_worker.events.load_report import load_report
from triptych.pd_worker.events.streams import EventStreams
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.pd_worker.frontend.grammar import GrammarCompiler
from triptych.pd_worker.frontend.input_processor import InputProcessor
from triptych.pd_worker.server import MAX_WAITING, PDServicer
from triptych.pd_worker.upkeep import StreamUpkeep
from triptych.pd_worker.vllm.embeddings import Embeddings, ItemStore
from triptych.pd_worker.vllm.engine import VLLMEngine
from triptych.pd_worker.vllm.formats import EngineFormats
from triptych.pd_worker.vllm.front_model import FrontModel
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import VLLMClient
from triptych.pd_worker.vllm.metrics import EngineMetrics
from triptych.protos import pd_pb2
from triptych.types import WorkerInfo

_INPUT_THREADS = 2


class VLLMWorker:
    """The worker of one model and one server, in the running event loop. `health` is the server's."""

    def __init__(
        self,
        config: PDConfig,
        model: FrontModel,
        client: VLLMClient,
        health: EngineHealth,
        store: ItemStore,
        metrics: PDMetrics,
    ) -> None:
        self._config = config
        self._model = model
        self._health = health
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(_INPUT_THREADS, thread_name_prefix="input")
        self._queries = ThreadPoolExecutor(1, thread_name_prefix="query")
        self._incarnation = uuid.uuid4().hex
        self.streams = EventStreams(self._cancel, texts=TokenTexts(model.tokenizer))
        self.engine = VLLMEngine(
            config,
            client,
            Embeddings(store),
            health,
            self.streams.deliver,
            EngineMetrics(metrics, model.name),
            vocab_size=model.decoder.geometry.vocab_size,
            max_model_len=model.max_model_len,
            on_lost=self._lose_engine,
        )
        self.servicer = PDServicer(
            self.engine,
            self._input_processor(),
            self.streams,
            self._pool,
            self._queries,
            max_requests=MAX_WAITING + config.max_num_seqs,
            incarnation=self._incarnation,
        )
        self._beat = EngineBeat("vLLM engine")
        self._upkeep = StreamUpkeep(self.streams, self._beat, self._load)
        self._watch: asyncio.Task[None] | None = None

    def _input_processor(self) -> InputProcessor:
        model = self._model
        return InputProcessor(
            model_key=model.identity.model_key,
            prompts=model.prompts,
            tokenizer=model.tokenizer,
            decoder=model.decoder,
            defaults=model.defaults,
            max_model_len=model.max_model_len,
            encoder_cache_bytes=self._config.embedding_memory,
            grammars=EngineFormats(GrammarCompiler(model.tokenizer, model.defaults.eos_token_ids)),
        )

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration. It serves all namespaces of its model_key."""
        return WorkerInfo(
            address=address,
            pool="pd",
            incarnation=self._incarnation,
            model_key=self._model.identity.model_key,
            model=self._model.name,
            capacity={
                "encoder_cache_bytes": self._config.embedding_memory,
                "max_num_seqs": self._config.max_num_seqs,
                "max_model_len": self._model.max_model_len,
                "metrics_port": metrics_port,
                "encoder_decoder": 0,
                # Items are looked for in the store, whatever vLLM's prefix cache holds.
                "keeps_items": 0,
                ROW_WIDTH: self._model.decoder.row_width,
            },
            modality=self._model.decoder.modality,
            kind=worker_kind(self._config.worker_kind or "vllm", "cpu", 1),
        )

    def start(self) -> None:
        self._upkeep.start()
        self._watch = asyncio.create_task(self._health.run(), name="vllm health")

    async def drain(self, grace: float) -> None:
        """Refuses new requests and lets those held finish, for at most `grace` seconds."""
        self.servicer.drain()
        await self._upkeep.drain(grace)

    async def stop(self) -> None:
        """Ends all requests and threads."""
        await self._upkeep.stop()
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self.engine.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._queries.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> pd_pb2.PDLoad:
        self._beat.tick()
        self.engine.show_metrics()
        return load_report(self._metrics, self._config.embedding_memory)

    def _lose_engine(self) -> None:
        self.servicer.lose_engine(uuid.uuid4().hex)

    def _cancel(self, request_ids: Sequence[str], proxy_id: str) -> None:
        self.engine.cancel(request_ids, proxy_id)
