"""An engine of two tensor-parallel ranks: rank 0 in this process, rank 1 in its own, over a real store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.engine.engine_cell import EngineCell, engine_cell
from triptych.base.config import MIB, PDConfig
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.connectors.host_buffers import bytes_of
from triptych.models.base import DecoderSide
from triptych.pd_worker.ranks.decoder_ranks import DecoderRanks
from triptych.pd_worker.ranks.share import load_share
from triptych.pd_worker.runner.capacity import block_bytes
from triptych.store.embedding_store import EmbeddingStore

PATIENCE = 240.0


@asynccontextmanager
async def rank_pair(
    path: Path, url: str, opened: Callable[[DecoderSide], Any], *, blocks: int = 0, **flags: Any
) -> AsyncIterator[tuple[EngineCell, DecoderRanks]]:
    """A running engine of two ranks, with `blocks` KV blocks, or as many as fit into 4 MiB of each rank.

    `opened` makes what `engine_cell` calls a checkpoint of rank 0's share of the decoder.
    """
    size = 2
    flags = {"max_model_len": 512, "kv_memory": 4 * MIB, "encoder_cache_memory": 8 * MIB, **flags}
    config = PDConfig(model=str(path), tensor_parallel=size, threads=1, **flags)
    ranks = DecoderRanks(config)
    try:
        ranks.start()
        decoder = load_share(config, 0)
        ranks.join(decoder)
        if blocks:
            flags["kv_memory"] = blocks * block_bytes(decoder.geometry, config.block_size, decoder.dtype)
        with engine_cell(
            opened(decoder), url, "redis", ranks, tensor_parallel=size, threads=1, **flags
        ) as cell:
            # Two processes for each step, on a machine that may be busy.
            cell.patience = PATIENCE
            yield cell, ranks
    finally:
        ranks.close()


async def save(store: EmbeddingStore, outputs: Iterable[EncoderOutput]) -> None:
    for output in outputs:
        await store.save(output.plan, bytes_of(output.data), ttl=60.0)
