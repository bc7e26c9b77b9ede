"""Chooses the next token: a pure function of logits, parameters, output so far, seed and position.

Every row is computed alone and its random number comes from a counter, so that a token depends neither
on the batch around it nor on the attempt that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from triptych.pd_worker.sampling import ResolvedSampling

#: A request has one choice today; the counter leaves room for more.
_CHOICE = 0
_WORD = (1 << 64) - 1
#: So many tokens nearly always hold the nucleus; to sort a whole vocabulary takes 20 times as long.
_LIKELY = 1024


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """One row's request. `position` counts the output tokens before the one to choose, all attempts."""

    params: ResolvedSampling
    output_ids: Sequence[int]
    position: int
    eos_token_ids: Sequence[int] = ()


@torch.no_grad()
def sample(logits: torch.Tensor, requests: Sequence[SamplerInput]) -> list[int]:
    """One token id per row of `logits` [N, V]. Does not change `logits`."""
    masks = [_masked_ids(request, logits.shape[1]) for request in requests]
    if all(request.params.greedy for request in requests) and not any(masks):
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    return [
        _sample_row(row, request, mask) for row, request, mask in zip(logits, requests, masks, strict=True)
    ]


def uniform(seed: int, position: int, choice: int = _CHOICE) -> float:
    """The number in [0, 1) that belongs to (seed, choice, position), on every machine."""
    key = np.array([seed & _WORD, 0], dtype=np.uint64)
    counter = np.array([position, choice, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def _masked_ids(request: SamplerInput, vocab_size: int) -> list[int]:
    """Ids that may not come yet: whatever would end the output before `min_tokens`."""
    params = request.params
    if len(request.output_ids) >= params.min_tokens:
        return []
    ending = set(params.stop_token_ids)
    if not params.ignore_eos:
        ending.update(request.eos_token_ids)
    return sorted(token for token in ending if token < vocab_size)


def _sample_row(row: torch.Tensor, request: SamplerInput, mask: list[int]) -> int:
    """The token of one row [V]."""
    params = request.params
    if mask:
        row = row.clone()
        row[mask] = -torch.inf
    if params.greedy:
        return int(row.argmax())
    weights, ids = _candidates(row.float() / params.temperature, params)
    cumulative = weights.cumsum(dim=-1)
    last = cumulative.shape[0] - 1
    if params.top_p < 1:
        last = min(int(torch.searchsorted(cumulative, params.top_p)), last)
    index = _pick(cumulative[: last + 1], uniform(params.seed, request.position))
    return index if ids is None else int(ids[index])


def _candidates(scaled: torch.Tensor, params: ResolvedSampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights of the tokens that may come, largest first, and their ids; ids None: all, in their order."""
    if 0 < params.top_k < scaled.shape[0]:
        kept, ids = scaled.topk(params.top_k)
        return kept.softmax(dim=-1), ids
    weights = scaled.softmax(dim=-1)
    if params.top_p == 1:
        return weights, None
    if weights.shape[0] > _LIKELY:
        likely, ids = weights.topk(_LIKELY)
        if float(likely.sum()) >= params.top_p:
            return likely, ids
    return weights.sort(descending=True, stable=True)


def _pick(cumulative: torch.Tensor, number: float) -> int:
    """The first index whose cumulative weight exceeds `number` of the whole; never one of weight zero."""
    total = cumulative[-1]
    index = int(torch.searchsorted(cumulative, number * total, right=True))
    if index < cumulative.shape[0]:
        return index
    return int(torch.searchsorted(cumulative, total))
