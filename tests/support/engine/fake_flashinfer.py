"""FlashInfer's wrapper for paged keys and values, by its documentation: the formula in place of a kernel."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from support.engine.reference_attention import written_out


class BatchPrefillWithPagedKVCacheWrapper:
    """Takes what the package's own takes of these parameters, and nothing that it would refuse."""

    plans = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(part.dtype == torch.int32 and part.dim() == 1 for part in indices)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert q_data_type == kv_data_type
        type(self).plans += 1
        self._indices, self._page = indices, page_size
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._causal, self._window, self._scale, self._softcap = (
            causal,
            window_left,
            sm_scale,
            logits_soft_cap,
        )

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, heads, dim] of q [T, heads, dim] over keys and values [pages, page_size, kv_heads, dim]."""
        queries, starts, pages, last = self._indices
        assert q.is_contiguous() and q.shape == (int(queries[-1]), self._heads[0], self._heads[2])
        assert all(part.shape[1:] == (self._page, *self._heads[1:]) for part in paged_kv_cache)
        outputs = []
        for i in range(len(last)):
            own = pages[starts[i] : starts[i + 1]].long()
            length = (len(own) - 1) * self._page + int(last[i])
            key, value = (part[own].flatten(0, 1)[:length] for part in paged_kv_cache)
            part = q[queries[i] : queries[i + 1]]
            outputs.append(self._one(part, key, value))
        return torch.cat(outputs)

    def _one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The last query is at the last key.
        at = torch.arange(len(key) - len(query), len(key))[:, None]
        behind = torch.arange(len(key))[None]
        allowed = behind <= at if self._causal else torch.ones(len(query), len(key), dtype=torch.bool)
        if self._window >= 0:
            allowed &= behind >= at - self._window
        scale = self._heads[2] ** -0.5 if self._scale is None else self._scale
        return written_out(query, key, value, scale=scale, allowed=allowed, softcap=self._softcap or None)


def install(patch: pytest.MonkeyPatch) -> type[BatchPrefillWithPagedKVCacheWrapper]:
    """`import flashinfer` gives this until the patch is undone; its plans are counted from 0."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "flashinfer", module)
    patch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plans", 0)
    return BatchPrefillWithPagedKVCacheWrapper
