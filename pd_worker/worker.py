"""One PD worker: engine, input processor, event streams and gRPC service of one model."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from triptych.config import PDConfig
from triptych.cpu.step_pacer import StepPacer
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.registry.matching import ROW_WIDTH
from triptych.errors import Unavailable
from triptych.machine.worker_kind import worker_kind
from triptych.metrics import PDMetrics
from triptych.models.identity import ModelIdentity
from triptych.pd_worker.engine_builder import build_engine
from triptych.pd_worker.events.attempt_trace import PDTraces
from triptych.pd_worker.events.load_report import load_report
from triptych.pd_worker.events.streams import EventStreams
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.pd_worker.frontend.encdec_prompt import EncDecPrompts
from triptych.pd_worker.frontend.grammar import GrammarCompiler
from triptych.pd_worker.frontend.input_processor import InputProcessor
from triptych.pd_worker.model_loading import LoadedModel
from triptych.pd_worker.ranks.share import decoder_threads_of_rank
from triptych.pd_worker.server import MAX_WAITING, PDServicer
from triptych.pd_worker.upkeep import StreamUpkeep
from triptych.tracing.tracer import Tracer
from triptych.types import WorkerInfo

_INPUT_THREADS = 2


class PDWorker:
    """Engine, input processor, event streams and servicer of one model, in the running event loop.

    `transfer` says where embeddings are loaded from, the store by default; `pacer` is the engine's. The
    caller closes the `tracer`. Without an `incarnation` one is drawn.
    """

    def __init__(
        self,
        config: PDConfig,
        model: LoadedModel,
        metrics: PDMetrics,
        *,
        transfer: ECTransferConfig | None = None,
        pacer: StepPacer | None = None,
        tracer: Tracer | None = None,
        incarnation: str = "",
    ) -> None:
        self._config = config = _with_memory(config, model)
        self._model = model
        self._pool = ThreadPoolExecutor(_INPUT_THREADS, thread_name_prefix="input")
        self._queries = ThreadPoolExecutor(1, thread_name_prefix="query")
        texts = TokenTexts(model.tokenizer)
        self.streams = EventStreams(self._cancel, texts=texts)
        transfer = transfer or transfer_config(config, model.identity)
        if tracer is not None:
            transfer = transfer.traced()
        self.engine = build_engine(
            config,
            model.decoder,
            transfer,
            self.streams.emit,
            metrics,
            model_name=model.name,
            pacer=pacer,
            ranks=model.ranks,
        )
        self._upkeep = StreamUpkeep(
            self.streams, self.engine.beat, lambda: load_report(metrics, config.embedding_memory)
        )
        most = MAX_WAITING + config.max_num_seqs
        self._incarnation = incarnation or uuid.uuid4().hex
        self.servicer = PDServicer(
            self.engine,
            self._input_processor(),
            self.streams,
            self._pool,
            self._queries,
            max_requests=most,
            incarnation=self._incarnation,
            traces=None
            if tracer is None or transfer.producers is None
            else PDTraces(tracer, transfer.producers),
        )

    def _input_processor(self) -> InputProcessor:
        model = self._model
        return InputProcessor(
            model_key=model.identity.model_key,
            prompts=model.prompts,
            tokenizer=model.tokenizer,
            decoder=model.decoder,
            defaults=model.defaults,
            max_model_len=self.engine.max_model_len,
            encoder_cache_bytes=self._config.embedding_memory,
            grammars=GrammarCompiler(model.tokenizer, model.defaults.eos_token_ids),
            two_prompts=self._two_prompts(),
        )

    def _two_prompts(self) -> EncDecPrompts | None:
        """The prompts of an encoder-decoder model; None for any other."""
        model = self._model
        if model.decoder.cross is None:
            return None
        return EncDecPrompts(model.tokenizer, model.prompts.guarded, model.decoder, self.engine.max_model_len)

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration. It serves all namespaces of its model_key."""
        ranks = self._config.tensor_parallel
        threads = ranks * decoder_threads_of_rank(self._config, self._model.decoder.geometry.hidden_size)
        return WorkerInfo(
            address=address,
            pool="pd",
            incarnation=self._incarnation,
            model_key=self._model.identity.model_key,
            model=self._model.name,
            capacity={
                "encoder_cache_bytes": self._config.embedding_memory,
                "max_num_seqs": self._config.max_num_seqs,
                "tensor_parallel": ranks,
                "max_model_len": self.engine.max_model_len,
                "metrics_port": metrics_port,
                "encoder_decoder": int(self._model.decoder.cross is not None),
                "keeps_items": int(self._config.prefix_caching or self._model.decoder.cross is not None),
                ROW_WIDTH: self._model.decoder.row_width,
            },
            modality=self._model.decoder.modality,
            kind=worker_kind(self._config.worker_kind, self._config.device, threads, ranks=ranks),
        )

    def start(self) -> None:
        self.engine.start()
        self._upkeep.start()

    async def drain(self, grace: float) -> None:
        """Refuses new requests and lets those held finish, for at most `grace` seconds."""
        self.servicer.drain()
        await self._upkeep.drain(grace)

    async def stop(self) -> None:
        """Ends the engine and all threads."""
        await self._upkeep.stop()
        await asyncio.to_thread(self.engine.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._queries.shutdown(wait=False, cancel_futures=True)

    def _cancel(self, request_ids: Sequence[str], proxy_id: str) -> None:
        # An engine that is stopping ends all its requests anyway.
        with contextlib.suppress(Unavailable):
            self.engine.cancel(request_ids, proxy_id)


def _with_memory(config: PDConfig, model: LoadedModel) -> PDConfig:
    """`config` with the sizes that were measured at the start, where its flags leave them open."""
    return replace(
        config,
        kv_memory=config.kv_memory or model.kv_memory,
        encoder_cache_memory=config.encoder_cache_memory or model.encoder_cache_memory,
    )


def transfer_config(config: PDConfig, model: ModelIdentity) -> ECTransferConfig:
    """The connector's configuration: a consumer of the store."""
    return ECTransferConfig(
        store_url=config.store,
        model_key=model.model_key,
        namespace=model.namespace,
        device=config.device,
        host_buffer_bytes=config.embedding_memory,
        ec_role="consumer",
    )
