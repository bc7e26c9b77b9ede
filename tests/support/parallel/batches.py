"""A flattened batch for a decoder side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from support.encdec.checkpoints import FAMILIES as CROSSING
from support.encdec.reference import NAME as CROSS
from support.encdec.reference import DenseBatch
from support.engine.reference_attention import NAME as MERGED
from triptych.models.base import DecoderSide, MergedEmbeds
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.registry import family_of, load_decoder


@dataclass(frozen=True)
class RankBatch:
    """Whole prompts, one behind the other. `rows` are merged at `index`, or each prompt's encoder output."""

    lengths: list[int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: list[torch.Tensor]
    index: torch.Tensor | None = None


def open_decoder(
    path: Path, dtype: str, quantization: str, parallel: TensorParallel | None = None
) -> DecoderSide:
    """The decoder side, or a rank's share of it, with dense attention for whole prompts."""
    return load_decoder(
        path,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        attn_implementation=CROSS if family_of(path).name in CROSSING else MERGED,
        quantization=quantization,
        parallel=parallel,
    )


@torch.no_grad()
def compute(decoder: DecoderSide, batch: RankBatch) -> dict[str, torch.Tensor]:
    """`hidden` [T, hidden_size], `logits` [T, vocabulary], and one item's keys as `cross`."""
    merged, attention, found = None, batch.lengths, {}
    embeds = decoder.embed(batch.token_ids)
    if decoder.cross is not None:
        tables = [decoder.project_cross(rows) for rows in batch.rows]
        attention = DenseBatch(batch.lengths, tables, decoder.bias)  # type: ignore[assignment]
        found["cross"] = tables[0][0][0]
    elif batch.index is not None:
        merged = MergedEmbeds(batch.index, torch.cat(batch.rows).to(decoder.dtype))
    hidden = decoder.forward(embeds, batch.positions, merged, attention)
    return found | {"hidden": hidden, "logits": decoder.logits(hidden)}
