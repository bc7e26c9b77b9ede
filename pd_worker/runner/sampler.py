"""The sampler: a pure function of logits, parameters, prompt, output, seed and position.

Every row is computed alone and its random number comes from a counter, so that for equal logits a token
depends neither on the batch around it nor on the attempt that computes it. Logits are equal on a CPU in
float32, but for their last bits. In 16 bits, and on CUDA, the batch, its graph, the chunks of the prompt and
prefix hits choose other kernels, whose sums differ: there a seed repeats an answer as long as no two tokens
are nearly as likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from triptych.models.base import LogitsRule
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.core.sampling import ResolvedSampling, banned_ids

_WORD = (1 << 64) - 1
#: So many tokens nearly always hold the nucleus; on a CPU, sorting a whole vocabulary takes 20 times as long.
_LIKELY = 1024


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """One row's request. `position` counts the output tokens before the one to choose, all attempts."""

    params: ResolvedSampling
    output_ids: Sequence[int]
    position: int
    eos_token_ids: Sequence[int] = ()
    #: The prompt's tokens, in any order; used by the repetition penalty.
    prompt_ids: Sequence[int] = ()
    #: Tokens that the grammar allows, bool [V' ≤ V]; None: all. Those from V' on are not allowed.
    allowed: np.ndarray | None = None
    #: Logits rules of the checkpoint or the task, applied first, with the whole prompt in order.
    rules: Sequence[LogitsRule] = ()
    prompt: Sequence[int] = ()

    @property
    def plain(self) -> bool:
        """Greedy, and the logits are used unchanged."""
        params = self.params
        return (
            params.temperature == 0
            and self.allowed is None
            and not penalises(params)
            and not self.rules
            and not params.bad_word_ids
            and len(self.output_ids) >= params.min_tokens
        )


@torch.no_grad()
def sample(logits: torch.Tensor, requests: Sequence[SamplerInput]) -> torch.Tensor:
    """int64 [N], one token id per row of `logits` [N, V], which are not changed. Never waits for the device.

    -1 where no token can be chosen: logits with NaN or +inf, or -inf for all allowed tokens.

    In this order, as transformers does it: the checkpoint's rules, logit_bias, repetition penalty, frequency
    and presence penalty, min_tokens, the grammar, temperature; then, as vLLM does it, min_p, top_k, top_p.
    """
    # NaN counts as the largest, so that a finite largest logit means that all are usable.
    largest, tokens = logits.max(dim=-1)
    for index, request in enumerate(requests):
        if not request.plain:
            tokens[index] = _sample_row(logits[index], request)
    return torch.where(largest.isfinite(), tokens, -1)


def uniform(seed: int, position: int, choice: int = 0) -> float:
    """The number in [0, 1) that belongs to (seed, choice, position), on every machine."""
    key = np.array([seed & _WORD, 0], dtype=np.uint64)
    counter = np.array([position, choice, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def _sample_row(row: torch.Tensor, request: SamplerInput) -> torch.Tensor:
    """The token of one row [V]; -1 where rules and masks leave none."""
    params = request.params
    row = row.to(torch.float32, copy=True)
    for rule in request.rules:
        rule.apply(row, request.prompt, request.output_ids)
    if penalises(params):
        penalise(row, params, request.prompt_ids, request.output_ids)
    _mask(row, request)
    if not params.greedy:
        row = row / params.temperature
    largest, token = row.max(dim=-1)
    if not params.greedy:
        token = _draw(row, params, uniform(params.seed, request.position, params.choice))
    return torch.where(largest.isfinite(), token, -1)


def _draw(scaled: torch.Tensor, params: ResolvedSampling, number: float) -> torch.Tensor:
    """The token of `scaled` logits [V] that `number` in [0, 1) falls on."""
    weights, ids, mass = _candidates(scaled, params)
    cumulative = weights.cumsum(dim=-1)
    count = cumulative.shape[0]
    last = torch.full_like(cumulative[0], count - 1, dtype=torch.int64)
    if params.min_p > 0 and ids is not None:
        last = (weights >= params.min_p * weights[0]).sum().clamp(1, count) - 1
    if params.top_p < 1:
        last = last.minimum(torch.searchsorted(cumulative, params.top_p * mass))
    index = _pick(cumulative, last, number)
    return index if ids is None else ids.take(index)


def _mask(row: torch.Tensor, request: SamplerInput) -> None:
    """Masks what the grammar forbids, bad words, and what would end the output before `min_tokens`.

    Where a grammar or a rule leaves nothing else, the output ends before `min_tokens`.
    """
    if request.allowed is not None:
        allowed = torch.from_numpy(request.allowed).to(row.device)
        row[: allowed.shape[0]].masked_fill_(~allowed, -torch.inf)
        row[allowed.shape[0] :] = -torch.inf
    if banned := banned_ids(request.params.bad_word_ids, request.output_ids):
        row[[token for token in banned if token < row.shape[0]]] = -torch.inf
    ending = _ending_ids(request, row.shape[0])
    if not ending:
        return
    kept = row[ending]
    row[ending] = -torch.inf
    row[ending] = torch.where(row.max() == -torch.inf, kept, -torch.inf)


def _ending_ids(request: SamplerInput, vocab_size: int) -> list[int]:
    """Ids that would end the output before `min_tokens`, and the end-of-sequence tokens even if ignored."""
    params = request.params
    if len(request.output_ids) >= params.min_tokens:
        return []
    ending = {*params.stop_token_ids, *request.eos_token_ids}
    return sorted(token for token in ending if token < vocab_size)


def _candidates(
    scaled: torch.Tensor, params: ResolvedSampling
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Weights of the tokens that may come, largest first, their ids, and the mass that top_p is a share of.

    Without ids, all tokens in their order. The mass is that of the tokens that min_p leaves.
    """
    if 0 < params.top_k < scaled.shape[0]:
        kept, ids = scaled.topk(params.top_k)
        weights = kept.softmax(dim=-1)
        return weights, ids, _mass(weights, params.min_p)
    weights = scaled.softmax(dim=-1)
    mass = _mass(weights, params.min_p)
    if params.top_p == 1:
        least = params.min_p * weights.max()
        return (torch.where(weights < least, 0, weights) if params.min_p > 0 else weights), None, mass
    if weights.is_cpu and weights.shape[0] > _LIKELY:
        likely, ids = weights.topk(_LIKELY)
        if bool(likely.sum() >= params.top_p * mass):
            return likely, ids, mass
    ordered, ids = weights.sort(descending=True, stable=True)
    return ordered, ids, mass


def _mass(weights: torch.Tensor, min_p: float) -> torch.Tensor:
    """The sum of the weights that min_p leaves."""
    if min_p == 0:
        return torch.ones_like(weights[0])
    return torch.where(weights >= min_p * weights.max(), weights, 0).sum()


def _pick(cumulative: torch.Tensor, last: torch.Tensor, number: float) -> torch.Tensor:
    """The first index up to `last` whose cumulative weight exceeds `number` of all; its weight is not 0."""
    total = cumulative.take(last)
    index = torch.searchsorted(cumulative, number * total, right=True)
    # Weights that are NaN must not fail the whole batch.
    end = torch.searchsorted(cumulative, total).minimum(last)
    return torch.where(index <= last, index, end)


def penalises(params: ResolvedSampling) -> bool:
    """Whether penalties or logit_bias change the logits."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
    )


def penalise(
    row: torch.Tensor, params: ResolvedSampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> None:
    """Changes `row` [V], float32: bias, then repetition, then frequency and presence.

    Repetition counts tokens of prompt and output, once each; the other two those of the output.
    """
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        row[_tensor(ids, row)] += torch.tensor(values, dtype=row.dtype, device=row.device)
    if params.repetition_penalty != 1:
        seen = _tensor([*prompt_ids, *output_ids], row)
        logits = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(logits < 0, logits * factor, logits / factor)
    if output_ids and (params.frequency_penalty or params.presence_penalty):
        used, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
        loss = counts * params.frequency_penalty + params.presence_penalty
        row[torch.from_numpy(used).to(row.device)] -= torch.from_numpy(loss).to(row)


def _tensor(ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=row.device)


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
