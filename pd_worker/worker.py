"""One PD worker: engine, input processor, event streams and gRPC service of one model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from triptych.config import PDConfig
from triptych.cpu.step_pacer import StepPacer
from triptych.ec_connector.base import ECTransferConfig
from triptych.errors import Unavailable
from triptych.machine.worker_kind import worker_kind
from triptych.metrics import PDMetrics
from triptych.models.identity import ModelIdentity
from triptych.pd_worker.engine_builder import build_engine
from triptych.pd_worker.events.attempt_trace import PDTraces
from triptych.pd_worker.events.load_report import load_report
from triptych.pd_worker.front import PDFront
from triptych.pd_worker.frontend.encdec_prompt import EncDecPrompts
from triptych.pd_worker.frontend.grammar import GrammarCompiler
from triptych.pd_worker.model_loading import LoadedModel
from triptych.pd_worker.ranks.share import decoder_threads_of_rank
from triptych.tracing.tracer import Tracer
from triptych.types import WorkerInfo


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
        self.front = PDFront(config, model, self._cancel, incarnation)
        self.streams = self.front.streams
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
        grammars = GrammarCompiler(model.tokenizer, model.defaults.eos_token_ids)
        self.front.connect(
            self.engine,
            self.front.input_processor(grammars, self.engine.max_model_len, self._two_prompts()),
            self.engine.beat,
            lambda: load_report(metrics, config.embedding_memory),
            traces=None
            if tracer is None or transfer.producers is None
            else PDTraces(tracer, transfer.producers),
        )
        self.servicer = self.front.servicer

    def _two_prompts(self) -> EncDecPrompts | None:
        """The prompts of an encoder-decoder model; None for any other."""
        model = self._model
        if model.decoder.cross is None:
            return None
        return EncDecPrompts(model.tokenizer, model.prompts.guarded, model.decoder, self.engine.max_model_len)

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration."""
        config, cross = self._config, self._model.decoder.cross is not None
        ranks = config.tensor_parallel
        threads = ranks * decoder_threads_of_rank(config, self._model.decoder.geometry.hidden_size)
        kind = worker_kind(config.worker_kind, config.device, threads, ranks=ranks)
        more = {
            "tensor_parallel": ranks,
            "encoder_decoder": int(cross),
            "keeps_items": int(config.prefix_caching or cross),
        }
        return self.front.info(address, metrics_port, kind, self.engine.max_model_len, more)

    def start(self) -> None:
        self.engine.start()
        self.front.upkeep.start()

    async def drain(self, grace: float) -> None:
        """Refuses new requests and lets those held finish, for at most `grace` seconds."""
        await self.front.drain(grace)

    async def stop(self) -> None:
        """Ends the engine and all threads."""
        await self.front.upkeep.stop()
        await asyncio.to_thread(self.engine.stop)
        self.front.close()

    def fail_unloaded(self) -> None:
        self.engine.fail_unloaded()

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
