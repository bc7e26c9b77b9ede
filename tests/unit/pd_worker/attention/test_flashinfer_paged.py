"""FlashInfer's plans by hand, what it is not asked for, and whole models over its documented arithmetic."""

from __future__ import annotations

import importlib.machinery
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import varied
from support.encdec.cell import EncDecCheckpoint
from support.engine import fake_flashinfer
from support.engine.engine_cell import Checkpoint, Prompt, engine_cell, reference
from triptych.errors import ConfigError
from triptych.pd_worker.attention.attention import paged_attention
from triptych.pd_worker.attention.flashinfer_paged import check_flashinfer, paged_batch
from triptych.pd_worker.attention.metadata import AttentionMetadata, PrefillSpan
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache

Wrapper = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    return fake_flashinfer.install(monkeypatch)


def test_decodes_and_chunks_are_one_batch_of_pages() -> None:
    # Two decodes of 5 and 8 tokens in a table padded to three blocks, a chunk of 6 of 9 tokens; pages of 4.
    decodes = torch.tensor([[7, 2, 7], [4, 1, 4]])
    batch = paged_batch([1, 1, 6], [5, 8, 9], [*decodes, torch.tensor([3, 0, 5])], 4)
    assert batch.query_starts.tolist() == [0, 1, 2, 8]
    assert batch.page_starts.tolist() == [0, 2, 4, 7]
    assert batch.pages.tolist() == [7, 2, 4, 1, 3, 0, 5]
    assert batch.last_page_tokens.tolist() == [1, 4, 1]
    assert {part.dtype for part in (batch.query_starts, batch.pages)} == {torch.int32}


def step(atomic: tuple[tuple[int, int], ...] = (), bias: Any = None) -> AttentionMetadata:
    """A chunk of six tokens at the begin of its sequence."""
    cache = PagedKVCache(
        num_layers=2, num_blocks=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    table = torch.tensor([1, 0])
    return AttentionMetadata(
        cache=cache,
        slots=cache.slots([1, 0], 6),
        num_decodes=0,
        decode_tables=torch.zeros(0, 0, dtype=torch.int64),
        decode_lengths=torch.zeros(0, dtype=torch.int64),
        prefills=[PrefillSpan(0, 6, 0, table, atomic)],
        bias=bias,
        backend="flashinfer",
    )


def layer(meta: AttentionMetadata, index: int, window: int | None = None) -> torch.Tensor:
    module = torch.nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    out, _ = paged_attention(module, query, key, value, None, sliding_window=window, attn_metadata=meta)
    return out


def test_a_step_is_planned_once_for_all_layers_of_a_kind(wrapper: type[Wrapper]) -> None:
    meta = step()
    for index, window in ((0, None), (1, None), (0, 3), (1, 3)):
        layer(meta, index, window)
    assert wrapper.plans == 2
    other = replace(meta, plans={})
    layer(other, 0)
    assert wrapper.plans == 3, "the next step has a plan of its own"


def test_an_atomic_span_attends_both_ways_without_it(wrapper: type[Wrapper]) -> None:
    meta = step(atomic=((0, 4),))
    assert torch.equal(layer(meta, 0), layer(replace(meta, backend="sdpa"), 0))
    assert not torch.allclose(layer(meta, 0)[0, 0], layer(step(), 0)[0, 0])
    assert wrapper.plans == 1, "that of the step without the span"


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "installed", "said"),
    [
        ("cpu", torch.bfloat16, 128, True, "CUDA only, and the device is cpu"),
        ("cuda:1", torch.bfloat16, 128, False, "flashinfer-python"),
        ("cuda", torch.float32, 128, True, "--dtype is float32: give --dtype bfloat16"),
        ("cuda", torch.bfloat16, 80, True, "heads of 80 values, only for 64, 128, 256"),
        ("cuda", torch.bfloat16, 128, True, ""),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    installed: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.machinery.ModuleSpec("flashinfer", None) if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    decoder: Any = SimpleNamespace(
        device=torch.device(device), dtype=dtype, geometry=SimpleNamespace(head_dim=head_dim)
    )
    if not said:
        check_flashinfer(decoder)
        return
    with pytest.raises(ConfigError, match=f"--attention-backend flashinfer .*{said}.* sdpa"):
        check_flashinfer(decoder)


def test_a_models_tokens_are_those_of_generate_in_chunks_and_decodes(wrapper: type[Wrapper]) -> None:
    torch.set_num_threads(1)
    prompts = [Prompt("What is this?", ((1, 96, 64),)), Prompt("Say something about the weather.")]
    flags = {"max_num_batched_tokens": 33, "block_size": 8, "attention_backend": "flashinfer"}
    with engine_cell(Checkpoint.open("qwen3_vl"), **flags) as cell:
        path = cell.checkpoint.path
        assert cell.answer(prompts, 24) == [reference(path, prompt, 24).token_ids for prompt in prompts]
    assert wrapper.plans > 24


def test_cross_tables_are_pages_too(wrapper: type[Wrapper]) -> None:
    torch.set_num_threads(1)
    bart = EncDecCheckpoint.open(build_checkpoint("bart"))
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    inputs, results = zip(*varied(bart, "bart", 4), strict=True)
    with engine_cell(bart, block_size=4, max_model_len=80, attention_backend="flashinfer") as cell:
        answers = cell.finish([bart.request(cell, each, prompt, 64) for each in inputs])
    assert answers == [result.token_ids for result in results]
    assert wrapper.plans >= 2 * 64, "one for self-attention and one for cross-attention, in each step"
