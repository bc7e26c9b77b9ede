"""Start-up of FlexAttention: checks that the model supports it, and compiles its kernels."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch._dynamo.callback import callback_handler

from triptych.engine_beat import EngineBeat
from triptych.models.base import DecoderSide
from triptych.models.checkpoint.support import check_supported, wanted_by_flex
from triptych.pd_worker.attention.flex_kernel import is_compiled
from triptych.pd_worker.attention.metadata import AttentionMetadata, CrossSpan, CrossTables, PrefillSpan
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.progress.progress import step

logger = logging.getLogger(__name__)

#: Sizes that differ even when rounded up: torch.compile takes equal sizes for the same symbol.
_DECODES, _LENGTH, _CHUNK, _START = 5, 700, 300, 600


def prepare(path: Path, decoder: DecoderSide, block_size: int) -> None:
    """Compiles the kernels of this model; ConfigError where its device cannot run them."""
    geometry, device = decoder.geometry, decoder.device
    check_supported(path, wanted_by_flex(device.type, geometry.head_dim))
    if not is_compiled(device):
        return
    began = time.monotonic()
    try:
        with step("compiling FlexAttention"):
            warm_up(decoder, block_size)
    except Exception:
        # torch raises many types of errors for an unsuitable compiler, driver or chip.
        logger.exception("FlexAttention could not be compiled on %s", device)
        check_supported(path, ["flex_compile"])
    logger.info("compiled FlexAttention in %.1f s", time.monotonic() - began)


def slow_while_compiling(beat: EngineBeat) -> None:
    """Allows a step more time while torch compiles kernels for sizes that warm-up did not cover."""
    callback_handler.register_start_callback(lambda args: beat.begin_slow())
    callback_handler.register_end_callback(lambda args: beat.end_slow())


@torch.inference_mode()
def warm_up(decoder: DecoderSide, block_size: int) -> None:
    """Runs one step of decodes and a chunk on a cache of its own, which makes every size dynamic."""
    geometry, device = decoder.geometry, decoder.device
    cache = PagedKVCache(
        num_layers=geometry.num_layers, num_blocks=1, block_size=block_size,
        num_kv_heads=geometry.num_kv_heads, head_dim=geometry.head_dim, dtype=decoder.dtype, device=device,
    )  # fmt: skip
    tokens = _DECODES + _CHUNK

    def table(length: int) -> torch.Tensor:
        return torch.zeros(-(-length // block_size), dtype=torch.int64, device=device)

    tables = table(_LENGTH).expand(_DECODES, -1)
    lengths = torch.full((_DECODES,), _LENGTH, device=device)
    end = _START + _CHUNK
    metadata = AttentionMetadata(
        cache=cache,
        slots=torch.zeros(tokens, dtype=torch.int64, device=device),
        num_decodes=_DECODES,
        decode_tables=tables,
        decode_lengths=lengths,
        prefills=[PrefillSpan(_DECODES, tokens, _START, table(end))],
        cross=None if decoder.cross is None else CrossTables(tables, lengths, [CrossSpan(table(end), end)]),
        bias=decoder.bias,
        backend="flex",
    )
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    positions = torch.zeros(geometry.position_rows, tokens, dtype=torch.int64, device=device)
    decoder.forward(decoder.embed(ids), positions, None, metadata)
