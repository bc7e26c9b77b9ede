"""A tier of vLLM's `OffloadingConnector` on the store: blocks that one vLLM has computed, others load.

vLLM moves blocks between the device and host memory; this moves them between that memory and the store. Their
keys are vLLM's block hashes, which contain the request's `cache_salt`. See docs/vllm.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, ScheduleEndContext, SecondaryTierManager, TransferJob

from triptych.integrations.vllm.kv_chunks import KVChunks, Piece, parse_tier


class _LookUps(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's thread of look-ups, over the store."""

    def __init__(self, chunks: KVChunks, tier_type: str) -> None:
        self._chunks = chunks
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._chunks.stored(keys)


class TriptychKVTier(SecondaryTierManager):  # type: ignore[misc]
    """The tier of one scheduler; what cannot be saved or loaded is computed again."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        mapper = FileMapper.from_offloading_spec(
            "", offloading_spec, blocks_per_file=offloading_spec.blocks_per_chunk, parallel_agnostic=True
        )
        layout = json.dumps([mapper.fields, mapper.rank], sort_keys=True, default=str)
        self._chunks = KVChunks(parse_tier(options), layout, self.block_size_bytes)
        self._memory = primary_kv_view.cast("B")
        self._look_ups = _LookUps(self._chunks, tier_type)
        #: Jobs that have not ended, and the keys of those that load.
        self._running: set[int] = set()
        self._loading: dict[int, list[OffloadKey]] = {}
        self._ended: SimpleQueue[JobResult] = SimpleQueue()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._look_ups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._chunks.save(self._pieces(job_metadata), self._begin(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = list(job_metadata.keys)
        self._chunks.load(self._pieces(job_metadata), self._begin(job_metadata))

    def _pieces(self, job: TransferJob) -> dict[bytes, Piece]:
        size = self.block_size_bytes
        places = (int(chunk) * size for chunk in job.chunk_ids)
        return {key: self._memory[at : at + size] for key, at in zip(job.keys, places, strict=True)}

    def _begin(self, job: TransferJob) -> Any:
        self._running.add(job.job_id)
        return partial(self._end, job, time.monotonic())

    def _end(self, job: TransferJob, begun: float, moved: list[bytes]) -> None:
        """From any thread."""
        whole, right = len(moved) == len(job.keys), tuple(map(OffloadKey, moved))
        seconds, nbytes = time.monotonic() - begun, len(moved) * self.block_size_bytes
        self._ended.put(JobResult(job.job_id, whole, None if whole else right, seconds, nbytes))
        self._running.discard(job.job_id)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while True:
            try:
                result = self._ended.get_nowait()
            except Empty:
                return results
            keys = self._loading.pop(result.job_id, None)
            if keys is not None and not result.success:
                self._look_ups.mark_miss(set(keys) - set(result.successful_keys or ()))
            results.append(result)

    def has_pending_work(self) -> bool:
        return bool(self._running) or not self._ended.empty()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._look_ups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._look_ups.flush()

    def drain_jobs(self) -> None:
        self._chunks.drain()

    def shutdown(self) -> None:
        # The thread may wait for the store, which answers or fails within its time limit.
        self._look_ups.shutdown()
        self._chunks.close()
