"""One PD worker in front of vLLM: its model without weights, and the engine that vLLM's calls go through."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from triptych.base.config import PDConfig, internal_tls
from triptych.base.engine_beat import EngineBeat
from triptych.base.errors import ConfigError
from triptych.base.log import short
from triptych.base.machine.resources import worker_kind
from triptych.base.metrics import PDMetrics
from triptych.base.source_tickets import SourceTickets
from triptych.base.tracing.context import Producers
from triptych.base.tracing.tracer import Tracer
from triptych.base.types import KeptKV, WorkerInfo
from triptych.base.vllm_classes import class_of
from triptych.ec_connector.base import DirectTransfer
from triptych.models.registry import family_of, resolve_dtype
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.events.attempt_trace import PDTraces
from triptych.pd_worker.frontend.grammar import compiler_of
from triptych.pd_worker.vllm.adapters import Adapter
from triptych.pd_worker.vllm.calls import DirectItems, Embeddings, EngineFormats, ItemStore
from triptych.pd_worker.vllm.connection import EngineConnection
from triptych.pd_worker.vllm.engine import EngineMetrics, VLLMEngine, batch_places
from triptych.pd_worker.vllm.http.replies import EngineError
from triptych.pd_worker.vllm.kv_transfer import KVTransfer
from triptych.pd_worker.vllm.pooled import PooledCalls
from triptych.pd_worker.worker import PDModel, PDWorker, load_report
from triptych.protos import pd_pb2
from triptych.registry.matching import DIRECT, PREFILL, WHOLE_REQUESTS

logger = logging.getLogger(__name__)


def load_front_model(config: PDConfig, engine_max_model_len: int) -> PDModel:
    """The checkpoint of `config.model` without weights, before an engine that takes that many tokens."""
    path = Path(config.model)
    class_of(family_of(path).architecture, generic=config.engine_class == "generic")
    dtype = resolve_dtype(path, torch.device("cpu"), config.dtype)
    decoder = family_of(path).decoder.without_weights(path, dtype=dtype)
    if config.max_model_len > engine_max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {engine_max_model_len} tokens that "
            "vLLM takes: lower it, or raise vLLM's --max-model-len"
        )
    return PDModel.open(config, decoder, config.max_model_len or engine_max_model_len)


async def proven_tickets(config: PDConfig, connection: EngineConnection, token: str) -> SourceTickets | None:
    """Tickets for items that vLLM reads at encoder workers, signed with the token; None where it cannot.

    Its connector has to prove that it has the token, and certificates where services have them.
    """
    if not token or connection.client.pools or DirectTransfer.of(config) is None:
        return None
    tickets, encrypted = SourceTickets(token), internal_tls(config) is not None
    try:
        proven = await connection.client.has_token(tickets, encrypted=encrypted)
    except EngineError as error:
        logger.warning("vLLM's connector could not be asked for its token: %s", error)
        return None
    if not proven:
        files = "internal_token_file and the tls_ files" if encrypted else "internal_token_file"
        logger.warning(
            "vLLM's connector has not shown that it knows the cluster's token: it reads embeddings from the "
            "store alone; give it %s in ec_connector_extra_config",
            files,
        )
        return None
    logger.info("vLLM reads embeddings from encoder workers, and from the store")
    return tickets


class VLLMWorker(PDWorker):
    """The worker of one model and one engine, in the running event loop. The caller closes the `tracer`."""

    def __init__(
        self,
        config: PDConfig,
        model: PDModel,
        connection: EngineConnection,
        store: ItemStore,
        metrics: PDMetrics,
        *,
        tracer: Tracer | None = None,
        incarnation: str = "",
        tickets: SourceTickets | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._adapters = adapters
        for adapter in adapters:
            logger.info("LoRA adapter %s: rank %d, key %s", adapter.name, adapter.rank, short(adapter.key))
        places = batch_places(config, connection.info)
        said = "" if connection.info.max_num_seqs else ", since it does not say how many it computes at once"
        logger.info("vLLM has up to %d requests of this worker at once%s", places, said)
        moves = config.kv_connector == "nixl"
        if config.role == PREFILL and not moves:
            logger.warning(
                "vLLM's KV does not move: decode workers compute the prompts of this one again; "
                "--kv-connector nixl has it moved"
            )
        super().__init__(replace(config, max_num_seqs=places), model, incarnation)
        # A connector that has proved that it knows the token reads where this worker says.
        self.direct = None if tickets is None else DirectTransfer.of(config)
        direct = None
        if tickets is not None and self.direct is not None:
            direct = DirectItems(tickets, self.direct.sources)
        self._health = connection.health
        self._metrics = metrics
        model_class = class_of(
            family_of(Path(config.model)).architecture, generic=config.engine_class == "generic"
        )
        transfer = self._kv_transfer(connection, model_class.image_kind) if moves else None
        self.engine = VLLMEngine(
            config,
            connection.client,
            Embeddings(store),
            connection.health,
            self.streams.deliver,
            EngineMetrics(metrics, model.name),
            vocab_size=model.decoder.geometry.vocab_size,
            pooled=PooledCalls(model.pooling, model.tokenizer, model.decoder.geometry.hidden_size),
            max_model_len=config.max_model_len or connection.info.max_model_len,
            model_class=model_class,
            on_lost=lambda: self.servicer.lose_engine(uuid.uuid4().hex),
            direct=direct,
            transfer=transfer,
        )
        self._beat = EngineBeat("vLLM engine")
        metrics.busy.set_function(self._beat.busy.share)
        self.connect(
            self.engine,
            EngineFormats(compiler_of(config, model.tokenizer, model.defaults.eos_token_ids)),
            self._beat,
            self._load,
            # vLLM loads items itself: their spans have no links.
            traces=None if tracer is None else PDTraces(tracer, Producers()),
            adapters={adapter.key: adapter.name for adapter in adapters},
        )
        self._watch: asyncio.Task[None] | None = None

    def _kv_transfer(self, connection: EngineConnection, image_kind: str) -> KVTransfer:
        self.streams.offers_at_first_token = False
        name, health, results = self._model.name, connection.health, self._metrics.kv_transfers
        return KVTransfer(
            connection.client,
            self._offer if self._config.role == PREFILL else None,
            lambda result: results.labels(name, result).inc(),
            lambda: health.kv_usage,
            lambda: health.speculates,
            image_kind,
        )

    def _offer(self, request: EngineRequest, kv: KeptKV) -> None:
        self.streams.offer(request.proxy_id, request.request_id, request.attempt, kv)

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration."""
        kind = worker_kind(self._config.worker_kind or "vllm", "cpu", 1)
        # Items are looked for, whatever vLLM's prefix cache holds.
        capacity = {"encoder_decoder": 0, "keeps_items": 0, WHOLE_REQUESTS: 1}
        capacity[DIRECT] = int(self.direct is not None)
        # Of a generating model: vLLM is one or the other.
        capacity["pools"] = int(not self._model.pooling.generates)
        info = self.registration(address, metrics_port, kind, capacity)
        return replace(info, adapters={adapter.name: adapter.key for adapter in self._adapters})

    def renewed(self, info: WorkerInfo) -> WorkerInfo:
        """A registration of this worker as it is now: vLLM may have come back with other places."""
        return replace(info, capacity={**info.capacity, "max_num_seqs": self.engine.places})

    def start(self) -> None:
        super().start()
        self._watch = asyncio.create_task(self._health.run(), name="vllm health")

    async def _stop_engine(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self.engine.close()

    def _load(self) -> pd_pb2.PDLoad:
        self._beat.tick()
        # vLLM makes steps as long as it has a request.
        self._beat.busy.mark(self.engine.show_metrics() > 0)
        return load_report(self._metrics, self._config.embedding_memory)
