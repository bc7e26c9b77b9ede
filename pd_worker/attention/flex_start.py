"""FlexAttention before a worker takes requests: refused where it cannot be, else compiled."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch._dynamo.callback import callback_handler

from triptych.models.base import DecoderSide
from triptych.models.checkpoint.support import check_supported, wanted_by_flex
from triptych.pd_worker.attention.flex_kernel import is_compiled
from triptych.pd_worker.attention.metadata import AttentionMetadata, CrossSpan, CrossTables, PrefillSpan
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.watchdog import EngineBeat

logger = logging.getLogger(__name__)

#: Sizes of which no two are alike once they are multiples: the compiler takes equal ones for one.
_DECODES, _LENGTH, _CHUNK, _START = 5, 700, 300, 600


def prepare(path: Path, decoder: DecoderSide, block_size: int) -> None:
    """ConfigError where this model cannot be computed on its device; returns once its programs are there."""
    geometry, device = decoder.geometry, decoder.device
    check_supported(path, wanted_by_flex(device.type, geometry.head_dim))
    if not is_compiled(device):
        return
    began = time.monotonic()
    try:
        warm_up(decoder, block_size)
    except Exception:
        # Torch has errors of many kinds for a compiler, a driver or a chip that will not do.
        logger.exception("FlexAttention could not be compiled on %s", device)
        check_supported(path, ["flex_compile"])
    logger.info("compiled FlexAttention in %.1f s", time.monotonic() - began)


def slow_while_compiling(beat: EngineBeat) -> None:
    """A step that torch compiles something for, sizes that were not foreseen, may take longer than others."""
    callback_handler.register_start_callback(lambda args: beat.begin_slow())
    callback_handler.register_end_callback(lambda args: beat.end_slow())


@torch.inference_mode()
def warm_up(decoder: DecoderSide, block_size: int) -> None:
    """One step of decodes and a chunk, over a cache of its own, so that every size is open afterwards."""
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
