"""What the model itself thought of a token: before bias, penalties, temperature and cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.pd_worker.core.outputs import RawLogprobs


@torch.no_grad()
def raw_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], wanted: Sequence[int | None]
) -> list[RawLogprobs | None]:
    """For each row of `logits` [N, V] that wants them: its token's and its `wanted` likeliest.

    Float32 whatever the dtype of the logits; each row is computed alone.
    """
    return [
        None if count is None else _of_row(row, token, count)
        for row, token, count in zip(logits, tokens, wanted, strict=True)
    ]


def _of_row(row: torch.Tensor, token: int, count: int) -> RawLogprobs:
    values = row.float().log_softmax(dim=-1)
    top = values.topk(min(count, values.shape[0]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return RawLogprobs((token, float(values[token])), tuple(pairs))
