"""FlexAttention compiled for the device against torch's own kernel, and how often it is compiled."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import inputs_of
from support.encdec.cell import EncDecCheckpoint
from support.engine.engine_cell import engine_cell
from triptych.models.base import AttentionBias
from triptych.models.families.t5 import RelativeBias
from triptych.pd_worker.attention.attention import (
    AttentionMetadata,
    PagedKVCache,
    PrefillSpan,
    paged_attention,
)
from triptych.pd_worker.attention.flex_start import prepare

pytestmark = pytest.mark.gpu

HEADS, DIM, BLOCK = 8, 64, 16
LENGTHS, CHUNK = (1, 15, 130, 700), (300, 1000)


class Distances(RelativeBias):
    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        self.table = torch.randn(HEADS, 50, generator=generator, device="cuda")


def step(
    backend: str, dtype: torch.dtype, kv_heads: int, bias: AttentionBias | None, **options: object
) -> torch.Tensor:
    """[T, heads, dim] of four decodes and a chunk in the middle of its sequence."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    start, end = CHUNK
    counts = [-(-length // BLOCK) for length in (*LENGTHS, end)]
    order = torch.arange(sum(counts)).split(counts)
    cache = PagedKVCache(
        num_layers=1, num_blocks=sum(counts), block_size=BLOCK, num_kv_heads=kv_heads, head_dim=DIM,
        dtype=dtype, device=torch.device("cuda"),
    )  # fmt: skip
    for blocks in (*cache.keys, *cache.values):
        blocks.copy_(draw(*blocks.shape))
    tables = torch.nn.utils.rnn.pad_sequence(list(order[:-1]), batch_first=True)
    slots = [int(table[-1]) * BLOCK + (n - 1) % BLOCK for table, n in zip(order, LENGTHS, strict=False)]
    tokens = len(LENGTHS) + end - start
    metadata = AttentionMetadata(
        cache=cache,
        slots=torch.cat([torch.tensor(slots).cuda(), cache.slots(order[-1].tolist(), end)[start:]]),
        num_decodes=len(LENGTHS),
        decode_tables=tables.cuda(),
        decode_lengths=torch.tensor(LENGTHS).cuda(),
        prefills=[PrefillSpan(len(LENGTHS), tokens, start, order[-1].cuda())],
        bias=bias,
        backend=backend,
    )
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    query, key, value = (draw(1, heads, tokens, DIM) for heads in (HEADS, kv_heads, kv_heads))
    with torch.inference_mode():
        out, _ = paged_attention(
            module, query, key, value, None, scaling=0.1, attn_metadata=metadata, **options
        )
    return out[0]


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 3.0}])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_step_is_that_of_sdpa(
    kv_heads: int, options: dict[str, object], dtype: torch.dtype, atol: float
) -> None:
    flex, sdpa = (step(backend, dtype, kv_heads, None, **options) for backend in ("flex", "sdpa"))
    torch.testing.assert_close(flex, sdpa, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_bias_by_distance_is_that_of_sdpa(kv_heads: int) -> None:
    flex, sdpa = (step(backend, torch.float32, kv_heads, Distances()) for backend in ("flex", "sdpa"))
    torch.testing.assert_close(flex, sdpa, atol=1e-4, rtol=1e-3)


def test_no_request_waits_for_the_compiler() -> None:
    t5 = EncDecCheckpoint.open(build_checkpoint("t5"), device="cuda")
    counters.clear()
    prepare(t5.path, t5.decoder, 8)
    before = counters["stats"]["unique_graphs"]
    assert before == 4
    vocab = t5.decoder.geometry.vocab_size
    flags = {"max_model_len": 512, "block_size": 8, "max_num_batched_tokens": 300}
    with engine_cell(t5, attention_backend="flex", **flags) as cell:
        for count, length in ((1, 1), (3, 40), (2, 290)):
            prompt = [0, *range(5, 4 + length)]
            inputs = [inputs_of("t5", t5.path, number, vocab) for number in range(count)]
            cell.finish([t5.request(cell, one, prompt, 3) for one in inputs])
    assert counters["stats"]["unique_graphs"] == before
