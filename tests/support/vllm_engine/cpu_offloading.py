"""vLLM's tiered offloading where the device is a CPU, for tests: copies in place of a GPU's transfers.

vLLM loads it by `spec_module_path`, with this folder on its path; all else of the connector is its own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies of whole blocks; a chunk is one block."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = []
        for each in kv_caches.tensors:
            blocks = each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            self._pairs.append((blocks, region.create_next_worker_view(each.page_size_bytes)))
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            chunks[torch.from_numpy(dst_spec.block_ids)] = blocks[torch.from_numpy(src_spec.block_ids)]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            blocks[torch.from_numpy(dst_spec.block_ids)] = chunks[torch.from_numpy(src_spec.block_ids)]
        return self._end(job_id)

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """They have ended."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The specification of tiers, with these copies."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _Copies(kv_caches, region)
        return self._worker
