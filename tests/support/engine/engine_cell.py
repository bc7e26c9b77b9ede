"""A whole PD engine over an in-process store, and prompts for it that the reference has answered."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from support.data.checkpoints import build_checkpoint
from support.data.oracle import OracleResult, oracle
from support.data.pictures import picture
from support.engine.engine_events import End, kind
from support.engine.engine_requests import CountingText, greedy
from triptych.base.config import MIB, PDConfig
from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.delta import Delta
from triptych.base.metrics import PDMetrics
from triptych.base.types import DTYPE_BYTES, ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.native import build_engine
from triptych.pd_worker.ranks.ranked_runner import OtherRanks

MODEL_NAME = "tiny"


@dataclass(frozen=True)
class Prompt:
    """A conversation and its pictures, by the seeds and sizes that draw them."""

    text: str
    pictures: tuple[tuple[int, int, int], ...] = ()

    @property
    def images(self) -> list[Image.Image]:
        return [picture(seed, width, height) for seed, width, height in self.pictures]

    @property
    def messages(self) -> list[dict[str, Any]]:
        parts = [{"type": "image"} for _ in self.pictures]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]


@functools.cache
def reference(path: Path, prompt: Prompt, max_tokens: int) -> OracleResult:
    return oracle(path, prompt.messages, prompt.images, max_new_tokens=max_tokens)


@dataclass
class Checkpoint:
    """Both sides of a tiny checkpoint in one process."""

    path: Path
    encoder: EncoderSide
    decoder: DecoderSide
    _embedded: dict[tuple[int, int, int], MMFeature] = field(default_factory=dict)
    _rows: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, family: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Checkpoint:
        path = build_checkpoint(family)
        options: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        return cls(
            path,
            load_encoder(path, **options),
            load_decoder(path, **options, attn_implementation=ATTENTION_NAME),
        )

    def features(self, token_ids: Sequence[int], prompt: Prompt) -> list[MMFeature]:
        """Where the prompt's pictures stand in `token_ids`, in which placeholders are expanded."""
        features, offset = [], 0
        assert self.decoder.image_token_id is not None
        for drawn in prompt.pictures:
            plan = self._plan(drawn)
            offset = list(token_ids).index(self.decoder.image_token_id, offset)
            features.append(MMFeature(plan, Placement(offset, plan.length, plan.runs)))
            offset += plan.length
        return features

    def _plan(self, drawn: tuple[int, int, int]) -> ItemPlan:
        name = hashlib.sha256(f"{self.path.name} {drawn}".encode()).hexdigest()
        if drawn not in self._embedded:
            item = self.encoder.preprocess(picture(*drawn), {})
            dtype = str(self.encoder.dtype).removeprefix("torch.")
            plan = ItemPlan(
                name, "n" * 64, "image", item.rows, self.encoder.width, dtype, item.length, item.runs,
                item.grid_thw,
            )  # fmt: skip
            self._rows[name] = self.encoder.encode([item])[0]
            assert plan.nbytes == self._rows[name].numel() * DTYPE_BYTES[dtype]
            self._embedded[drawn] = MMFeature(plan, Placement(0, item.length, item.runs))
        return self._embedded[drawn].plan

    def rows(self, mm_hash: str) -> torch.Tensor:
        """The encoder output of a picture that some prompt has named."""
        return self._rows[mm_hash]

    def publish(self, store: MemoryStore, features: Sequence[MMFeature]) -> None:
        for feature in features:
            store[feature.mm_hash] = EncoderOutput(feature.plan, self._rows[feature.mm_hash])


@dataclass
class EngineCell:
    """One engine and what it has said."""

    checkpoint: Checkpoint
    engine: Engine
    metrics: PDMetrics
    store: MemoryStore
    events: list[EngineEvent] = field(default_factory=list)
    #: Longest wait for an event, in seconds; requests have a little more.
    patience: float = 50.0
    _news: threading.Condition = field(default_factory=threading.Condition)
    _count: int = 0

    def take(self, events: list[EngineEvent]) -> None:
        with self._news:
            self.events.extend(events)
            self._news.notify_all()

    def request(
        self, prompt: Prompt, token_ids: Sequence[int], max_tokens: int, *, publish: bool = True
    ) -> EngineRequest:
        features = self.checkpoint.features(token_ids, prompt)
        if publish:
            self.checkpoint.publish(self.store, features)
        positions, delta = self.checkpoint.decoder.positions(token_ids, features)
        return self.build(token_ids, features, max_tokens, positions, delta, ready=publish)

    def build(
        self,
        token_ids: Sequence[int],
        features: Sequence[MMFeature],
        max_tokens: int,
        positions: torch.Tensor,
        delta: int,
        *,
        ready: bool = True,
        **fields: Any,
    ) -> EngineRequest:
        """A greedy request of these tokens; `ready`: its items are in the store."""
        self._count += 1
        now = time.monotonic()
        return EngineRequest(
            request_id=f"request-{self._count}",
            attempt=1,
            proxy_id="proxy",
            arrival=now,
            deadline=now + self.patience + 10,
            prompt_token_ids=list(token_ids),
            features=tuple(features),
            ready=frozenset(feature.mm_hash for feature in features) if ready else frozenset(),
            positions=positions,
            position_delta=delta,
            sampling=greedy(max_tokens),
            prefix_root=b"r" * 32,
            output=CountingText(max_tokens),
            **fields,
        )

    def wait(self, request_id: str, body: str, timeout: float | None = None) -> Any:
        """The body of the first such event of this request; `timeout` None: the cell's patience."""

        def found() -> object:
            events = (event for event in self.events if event.request_id == request_id)
            event = next((event for event in events if kind(event) == body), None)
            if event is None or isinstance(event, Delta):
                return event
            return End(event.finished) if body == "finished" else getattr(event, body)

        with self._news:
            patience = self.patience if timeout is None else timeout
            assert self._news.wait_for(lambda: found() is not None, patience), f"no {body}"
            return found()

    def tokens(self, request_id: str) -> list[int]:
        events = [event for event in self.events if event.request_id == request_id]
        return [token for event in events if isinstance(event, Delta) for token in event.token_ids]

    def answer(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """All prompts at once; the greedy output of each."""
        path = self.checkpoint.path
        requests = [
            self.request(prompt, reference(path, prompt, max_tokens).prompt_token_ids, max_tokens)
            for prompt in prompts
        ]
        return self.finish(requests)

    def finish(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        for request in requests:
            self.engine.submit(request)
        for request in requests:
            done = self.wait(request.request_id, "finished")
            assert done.error is None, done.error
        return [self.tokens(request.request_id) for request in requests]

    def metric(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model_name": MODEL_NAME}) or 0.0

    def assert_at_rest(self) -> None:
        """Every gauge of what requests hold is zero."""
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "triptych_pd_kv_blocks_used",
            "triptych_pd_cross_tables",
            "triptych_pd_host_blocks_used",
            "triptych_pd_encoder_cache_references",
            "triptych_pd_reserved_bytes",
        ):
            assert self.metric(name) == 0, name


@contextmanager
def engine_cell(
    checkpoint: Any,
    url: str = "",
    connector: str | None = "memory",
    ranks: OtherRanks | None = None,
    pacer: StepPacer | None = None,
    **flags: Any,
) -> Iterator[EngineCell]:
    """A running engine; with the "memory" connector it has a store of its own, and with None no connector.

    `checkpoint` is a Checkpoint, or anything else with a `path` and a `decoder`, with `ranks` rank 0's.
    """
    values: dict[str, Any] = {
        "max_model_len": 512, "kv_memory": 4 * MIB, "encoder_cache_memory": 8 * MIB, **flags
    }  # fmt: skip
    config = PDConfig(model=str(checkpoint.path), device=str(checkpoint.decoder.device), **values)
    store = MemoryStore()
    transfers = None
    if connector is not None:
        transfers = ECTransferConfig(
            connector,
            url,
            model_key=str(checkpoint.path),
            device=config.device,
            host_buffer_bytes=config.embedding_memory,
            store=store,
        )
    metrics = PDMetrics(MODEL_NAME)
    cell: EngineCell
    engine = build_engine(
        config,
        checkpoint.decoder,
        transfers,
        lambda events: cell.take(events),
        metrics,
        model_name=MODEL_NAME,
        pacer=pacer,
        ranks=ranks,
    )
    cell = EngineCell(checkpoint, engine, metrics, store)
    engine.start()
    try:
        yield cell
    finally:
        engine.stop()
