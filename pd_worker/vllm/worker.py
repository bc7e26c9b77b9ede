"""One PD worker in front of vLLM: its front, and the engine that vLLM's calls go through."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence

from triptych.config import PDConfig
from triptych.engine_beat import EngineBeat
from triptych.machine.worker_kind import worker_kind
from triptych.metrics import PDMetrics
from triptych.pd_worker.events.attempt_trace import PDTraces
from triptych.pd_worker.events.load_report import load_report
from triptych.pd_worker.front import PDFront
from triptych.pd_worker.frontend.grammar import GrammarCompiler
from triptych.pd_worker.vllm.connection import EngineConnection
from triptych.pd_worker.vllm.embeddings import Embeddings, ItemStore
from triptych.pd_worker.vllm.engine import VLLMEngine
from triptych.pd_worker.vllm.formats import EngineFormats
from triptych.pd_worker.vllm.front_model import FrontModel
from triptych.pd_worker.vllm.metrics import EngineMetrics
from triptych.protos import pd_pb2
from triptych.tracing.producers import Producers
from triptych.tracing.tracer import Tracer
from triptych.types import WorkerInfo


class VLLMWorker:
    """The worker of one model and one engine, in the running event loop. The caller closes the `tracer`."""

    def __init__(
        self,
        config: PDConfig,
        model: FrontModel,
        connection: EngineConnection,
        store: ItemStore,
        metrics: PDMetrics,
        *,
        tracer: Tracer | None = None,
        incarnation: str = "",
    ) -> None:
        self._config = config
        self._model = model
        self._connection = connection
        self._metrics = metrics
        self.front = PDFront(config, model, self._cancel, incarnation)
        self.streams = self.front.streams
        self.engine = VLLMEngine(
            config,
            connection.client,
            Embeddings(store),
            connection.health,
            self.streams.deliver,
            EngineMetrics(metrics, model.name),
            vocab_size=model.decoder.geometry.vocab_size,
            max_model_len=model.max_model_len,
            on_lost=self._lose_engine,
        )
        self._beat = EngineBeat("vLLM engine")
        formats = EngineFormats(GrammarCompiler(model.tokenizer, model.defaults.eos_token_ids))
        self.front.connect(
            self.engine,
            self.front.input_processor(formats, model.max_model_len),
            self._beat,
            self._load,
            # vLLM loads items itself: their spans have no links.
            None if tracer is None else PDTraces(tracer, Producers()),
        )
        self.servicer = self.front.servicer
        self._watch: asyncio.Task[None] | None = None

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration."""
        more = {
            "tensor_parallel": self._config.tensor_parallel,
            "encoder_decoder": 0,
            # Items are looked for in the store, whatever vLLM's prefix cache holds.
            "keeps_items": 0,
        }
        kind = worker_kind(self._config.worker_kind or "vllm", "cpu", 1)
        return self.front.info(address, metrics_port, kind, self._model.max_model_len, more)

    def start(self) -> None:
        self.front.upkeep.start()
        self._watch = asyncio.create_task(self._connection.health.run(), name="vllm health")

    async def drain(self, grace: float) -> None:
        """Refuses new requests and lets those held finish, for at most `grace` seconds."""
        await self.front.drain(grace)

    async def stop(self) -> None:
        """Ends all requests and threads."""
        await self.front.upkeep.stop()
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self.engine.close()
        self.front.close()

    def fail_unloaded(self) -> None:
        self.engine.fail_unloaded()

    def _load(self) -> pd_pb2.PDLoad:
        self._beat.tick()
        self.engine.show_metrics()
        return load_report(self._metrics, self._config.embedding_memory)

    def _lose_engine(self) -> None:
        self.servicer.lose_engine(uuid.uuid4().hex)

    def _cancel(self, request_ids: Sequence[str], proxy_id: str) -> None:
        self.engine.cancel(request_ids, proxy_id)
