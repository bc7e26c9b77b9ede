"""What stands before the engine of any PD worker: input processor, event streams, gRPC service, upkeep."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tokenizers import Tokenizer

from triptych.config import PDConfig
from triptych.ec_connector.registry.matching import ROW_WIDTH
from triptych.engine_beat import EngineBeat
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.models.identity import ModelIdentity
from triptych.pd_worker.events.attempt_trace import PDTraces
from triptych.pd_worker.events.streams import EventStreams
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.pd_worker.events.upkeep import StreamUpkeep
from triptych.pd_worker.frontend.encdec_prompt import EncDecPrompts
from triptych.pd_worker.frontend.input_processor import Formats, InputProcessor
from triptych.pd_worker.frontend.prompt import PromptBuilder
from triptych.pd_worker.server import MAX_WAITING, EnginePort, PDServicer
from triptych.protos import pd_pb2
from triptych.types import WorkerInfo

_INPUT_THREADS = 2


class PromptModel(Protocol):
    """What a front needs of a checkpoint; no weights."""

    @property
    def name(self) -> str: ...

    @property
    def decoder(self) -> DecoderSide: ...

    @property
    def identity(self) -> ModelIdentity: ...

    @property
    def defaults(self) -> GenerationDefaults: ...

    @property
    def prompts(self) -> PromptBuilder: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class PDFront:
    """The front of one model, in the running event loop; `cancel` ends requests in the engine.

    Engines put their events into `streams`, so they are made after it, and before `connect`. Without an
    `incarnation` one is drawn.
    """

    servicer: PDServicer
    upkeep: StreamUpkeep

    def __init__(
        self,
        config: PDConfig,
        model: PromptModel,
        cancel: Callable[[Sequence[str], str], None],
        incarnation: str = "",
    ) -> None:
        self._config = config
        self._model = model
        self._incarnation = incarnation or uuid.uuid4().hex
        self._pool = ThreadPoolExecutor(_INPUT_THREADS, thread_name_prefix="input")
        self._queries = ThreadPoolExecutor(1, thread_name_prefix="query")
        self.streams = EventStreams(cancel, texts=TokenTexts(model.tokenizer))

    def input_processor(
        self, grammars: Formats, max_model_len: int, two_prompts: EncDecPrompts | None = None
    ) -> InputProcessor:
        """Makes requests of this model for an engine of such a length."""
        model = self._model
        return InputProcessor(
            model_key=model.identity.model_key,
            prompts=model.prompts,
            tokenizer=model.tokenizer,
            decoder=model.decoder,
            defaults=model.defaults,
            max_model_len=max_model_len,
            encoder_cache_bytes=self._config.embedding_memory,
            grammars=grammars,
            two_prompts=two_prompts,
        )

    def connect(
        self,
        engine: EnginePort,
        input_processor: InputProcessor,
        beat: EngineBeat,
        load: Callable[[], pd_pb2.PDLoad],
        traces: PDTraces | None = None,
    ) -> None:
        """Puts the service before `engine`; proxies get its `beat` and `load`."""
        self.upkeep = StreamUpkeep(self.streams, beat, load)
        self.servicer = PDServicer(
            engine,
            input_processor,
            self.streams,
            self._pool,
            self._queries,
            max_requests=MAX_WAITING + self._config.max_num_seqs,
            incarnation=self._incarnation,
            traces=traces,
        )

    def info(
        self, address: str, metrics_port: int, kind: str, max_model_len: int, more: Mapping[str, int]
    ) -> WorkerInfo:
        """The worker's registration, with `more` capacity. It serves all namespaces of its model_key."""
        capacity = {
            "encoder_cache_bytes": self._config.embedding_memory,
            "max_num_seqs": self._config.max_num_seqs,
            "max_model_len": max_model_len,
            "metrics_port": metrics_port,
            ROW_WIDTH: self._model.decoder.row_width,
        }
        return WorkerInfo(
            address=address,
            pool="pd",
            incarnation=self._incarnation,
            model_key=self._model.identity.model_key,
            model=self._model.name,
            capacity=capacity | dict(more),
            modality=self._model.decoder.modality,
            kind=kind,
        )

    async def drain(self, grace: float) -> None:
        """Refuses new requests and lets those held finish, for at most `grace` seconds."""
        self.servicer.drain()
        await self.upkeep.drain(grace)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._queries.shutdown(wait=False, cancel_futures=True)
