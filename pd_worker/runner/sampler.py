"""The sampler: a pure function of logits, parameters, prompt, output, seed and position, for all rows.

A row's random number comes from a counter, and no other row decides how many of its logits are sorted, so
that for equal logits a token depends neither on the batch around it nor on the attempt that computes it.
Logits are equal on a CPU in float32, but for their last bits. In 16 bits, and on CUDA, the batch, its graph,
the chunks of the prompt and prefix hits choose other kernels, whose sums differ: there a seed repeats an
answer as long as no two tokens are nearly as likely.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import dropwhile

import numpy as np
import torch

from triptych.base.machine.device import Device
from triptych.models.base import Forbids, LogitsRule
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.core.sampling import ResolvedSampling, banned_ids


@dataclass(frozen=True, slots=True)
class SamplerInput:
    """One row's request. `position` counts the output tokens before the one to choose, all attempts."""

    params: ResolvedSampling
    output_ids: Sequence[int]
    position: int
    eos_token_ids: Sequence[int] = ()
    #: The prompt's tokens, in any order; used by the repetition penalty.
    prompt_ids: Sequence[int] = ()
    #: Of the tokenizer's tokens those that the grammar allows, bool; None: all. Further ones are not allowed.
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


def penalises(params: ResolvedSampling) -> bool:
    """Whether penalties or logit_bias change the logits."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
    )


def apply_rules(rows: torch.Tensor, requests: Sequence[SamplerInput]) -> None:
    """Changes `rows` [N, V] by the rules: first those that only forbid, all at once, the rest row by row."""
    if places := _places(requests, rows.shape[1], _forbidden):
        rows.view(-1).index_fill_(0, _on(rows, np.array(places)), -torch.inf)
    for row, request in zip(rows, requests, strict=True):
        for rule in dropwhile(lambda rule: isinstance(rule, Forbids), request.rules):
            rule.apply(row, request.prompt, request.output_ids)


def penalise(rows: torch.Tensor, requests: Sequence[SamplerInput]) -> None:
    """Changes `rows` [N, V], float32: bias, then repetition, then frequency and presence.

    Repetition counts tokens of prompt and output, once each; the other two those of the output.
    """
    flat = rows.view(-1)
    for change, of in ((_add, _biases), (_repeat, _repeated), (_add, _used)):
        pairs = [(index, *of(request)) for index, request in enumerate(requests)]
        places = [np.asarray(ids, np.int64) + index * rows.shape[1] for index, ids, _ in pairs if len(ids)]
        if not places:
            continue
        numbers = np.concatenate([np.broadcast_to(n, len(ids)) for _, ids, n in pairs if len(ids)])
        change(flat, _on(rows, np.concatenate(places)), _on(rows, numbers.astype(np.float32)))


def mask(rows: torch.Tensor, requests: Sequence[SamplerInput]) -> None:
    """Masks what grammars forbid, bad words, and what would end an output before `min_tokens`.

    Where a grammar or a rule leaves nothing else, an output ends before `min_tokens`.
    """
    _mask_grammars(rows, requests)
    size, flat = rows.shape[1], rows.view(-1)
    if banned := _places(requests, size, lambda r: banned_ids(r.params.bad_word_ids, r.output_ids)):
        flat.index_fill_(0, _on(rows, np.array(banned)), -torch.inf)
    if ending := _places(requests, size, _ending_ids):
        places = _on(rows, np.array(ending))
        kept = flat[places]
        flat.index_fill_(0, places, -torch.inf)
        emptied = (rows.amax(dim=-1) == -torch.inf)[places // size]
        flat.index_copy_(0, places, torch.where(emptied, kept, -torch.inf))


def _forbidden(request: SamplerInput) -> Iterable[int]:
    for rule in request.rules:
        if not isinstance(rule, Forbids):
            return
        yield from rule.forbidden(request.prompt, request.output_ids)


def _biases(request: SamplerInput) -> tuple[Sequence[int], Sequence[float]]:
    bias = request.params.logit_bias
    return [token for token, _ in bias], [value for _, value in bias]


def _repeated(request: SamplerInput) -> tuple[Sequence[int], float]:
    factor = request.params.repetition_penalty
    return ((*request.prompt_ids, *request.output_ids) if factor != 1 else ()), factor


def _used(request: SamplerInput) -> tuple[Sequence[int] | np.ndarray, np.ndarray | float]:
    params = request.params
    if not request.output_ids or not (params.frequency_penalty or params.presence_penalty):
        return (), 0.0
    used, counts = np.unique(np.asarray(request.output_ids, dtype=np.int64), return_counts=True)
    return used, -(counts * params.frequency_penalty + params.presence_penalty)


def _add(flat: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor) -> None:
    flat.index_copy_(0, places, flat[places] + numbers)


def _repeat(flat: torch.Tensor, places: torch.Tensor, factors: torch.Tensor) -> None:
    logits = flat[places]
    flat.index_copy_(0, places, torch.where(logits < 0, logits * factors, logits / factors))


def _mask_grammars(rows: torch.Tensor, requests: Sequence[SamplerInput]) -> None:
    held = [(index, r.allowed) for index, r in enumerate(requests) if r.allowed is not None]
    if not held:
        return
    allowed = np.zeros((len(held), rows.shape[1]), dtype=bool)
    for place, (_, tokens) in zip(allowed, held, strict=True):
        known = tokens[: len(place)]
        place[: len(known)] = known
    index = _on(rows, np.array([index for index, _ in held]))
    kept = rows.index_select(0, index).masked_fill_(~_on(rows, allowed), -torch.inf)
    rows.index_copy_(0, index, kept)


def _places(
    requests: Sequence[SamplerInput], size: int, of: Callable[[SamplerInput], Iterable[int]]
) -> list[int]:
    """The places in the flattened rows of each request's ids; vocabularies differ, and some are not there."""
    rows = enumerate(requests)
    return [index * size + id for index, request in rows for id in of(request) if 0 <= id < size]


def _ending_ids(request: SamplerInput) -> set[int]:
    """Ids that would end the output before `min_tokens`, and the end-of-sequence tokens even if ignored."""
    params = request.params
    if len(request.output_ids) >= params.min_tokens:
        return set()
    return {*params.stop_token_ids, *request.eos_token_ids}


def _on(rows: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    return Device.of(rows.device).upload(torch.from_numpy(array))


#: Sizes of the candidates: a row takes the first that holds its top_k, whatever the rows beside it.
_CANDIDATES = (64, 1024)
#: Tokens that nearly always hold the nucleus; on a CPU, sorting a whole vocabulary takes 20 times as long.
_LIKELY = 1024
#: Logits that a CPU's cache holds: more are computed part by part.
_CACHED = 1 << 19
#: The maximum of `logprobs`: that many are found for every row.
_TOP_LOGPROBS = 20
_WORD = (1 << 64) - 1


@torch.no_grad()
def sample(logits: torch.Tensor, requests: Sequence[SamplerInput]) -> torch.Tensor:
    """int64 [N], one token id per row of `logits` [N, V], which are not changed. Never waits for the device.

    -1 where no token can be chosen: logits with NaN or +inf, or -inf for all allowed tokens.

    In this order, as transformers does it: the checkpoint's rules, logit_bias, repetition penalty, frequency
    and presence penalty, min_tokens, the grammar, temperature; then, as vLLM does it, min_p, top_k, top_p.
    """
    step = max(1, _CACHED // logits.shape[1])
    if logits.is_cpu and len(logits) > step:
        parts = range(0, len(logits), step)
        return torch.cat([sample(logits[i : i + step], requests[i : i + step]) for i in parts])
    # NaN counts as the largest, so that a finite largest logit means that all are usable.
    largest, tokens = logits.max(dim=-1)
    changed = [index for index, request in enumerate(requests) if not request.plain]
    if changed:
        rows = select(logits, changed).to(torch.float32, copy=len(changed) == len(logits)).contiguous()
        chosen = _sample_rows(rows, [requests[index] for index in changed])
        tokens = _replace(tokens, changed, chosen)
    return torch.where(largest.isfinite(), tokens, -1)


def uniform(seed: int, position: int, choice: int = 0) -> float:
    """The number in [0, 1) that belongs to (seed, choice, position), on every machine."""
    words = struct.pack("<QQQ", seed & _WORD, position, choice)
    return (int.from_bytes(blake2b(words, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _sample_rows(rows: torch.Tensor, requests: Sequence[SamplerInput]) -> torch.Tensor:
    """The tokens of `rows` [N, V], which change; -1 where rules and masks leave none."""
    apply_rules(rows, requests)
    penalise(rows, requests)
    mask(rows, requests)
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(_candidates(request.params, rows.shape[1]), []).append(index)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    for (count, nucleus), places in groups.items():
        drawn = _draw(select(rows, places), [requests[index] for index in places], count, nucleus)
        tokens = _replace(tokens, places, drawn)
    return tokens


def _candidates(params: ResolvedSampling, vocab_size: int) -> tuple[int, bool]:
    """How many of a row's largest logits are looked at, 0 for all in their order; and whether top_p cuts.

    1 for greedy rows.
    """
    if params.greedy:
        return 1, False
    if not 0 < params.top_k < vocab_size:
        return 0, params.top_p < 1
    return next((size for size in _CANDIDATES if params.top_k <= size < vocab_size), vocab_size), True


def _draw(rows: torch.Tensor, requests: Sequence[SamplerInput], count: int, nucleus: bool) -> torch.Tensor:
    """The tokens of a group of rows [n, V] with as many candidates."""
    if count == 1:
        largest, tokens = rows.max(dim=-1)
        return torch.where(largest.isfinite(), tokens, -1)
    table = [
        (p.temperature, p.min_p, p.top_p, p.top_k, uniform(p.seed, request.position, p.choice))
        for request in requests
        for p in (request.params,)
    ]
    columns = torch.tensor(table, dtype=torch.float64).T.contiguous()
    temperature, min_p, top_p, top_k, number = _moved(columns, rows)[:, :, None].to(torch.float32)
    ids: torch.Tensor | None = None
    if count:
        rows, ids = _largest(rows, count)
        place = torch.arange(rows.shape[1], device=rows.device)
        rows = rows.masked_fill_(place >= top_k, -torch.inf)
    # In place where it can be: new memory of the size of all logits costs a CPU more than the numbers in it.
    weights = rows.div_(temperature).softmax(dim=-1)
    if any(request.params.min_p for request in requests):
        weights.masked_fill_(weights < min_p * weights.amax(-1, keepdim=True), 0)
    # What top_p is a share of.
    mass = top_p * weights.sum(-1, keepdim=True)
    if nucleus and ids is None:
        weights, ids = _nucleus(weights, mass)
    cumulative = weights.cumsum_(dim=-1)
    last = torch.full_like(mass, cumulative.shape[1] - 1, dtype=torch.int64)
    if nucleus:
        last = torch.where(top_p < 1, torch.searchsorted(cumulative, mass).minimum(last), last)
    index, total = _pick(cumulative, last, number)
    tokens = index if ids is None else ids.gather(1, index)
    return torch.where(total.isfinite(), tokens, -1)[:, 0]


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row [n, V], in order, and their ids; of equal ones the first, if all."""
    if count < values.shape[1]:
        top = values.topk(count)
        return top.values, top.indices
    return torch.sort(values, dim=-1, descending=True, stable=True)


def _nucleus(weights: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in order, and their ids: all of them, or on a CPU as many as hold the mass of every row."""
    if not weights.is_cpu or weights.shape[1] <= _LIKELY:
        return _largest(weights, weights.shape[1])
    likely, ids = _largest(weights, _LIKELY)
    flat = [row for row, held in enumerate((likely.sum(-1) >= mass[:, 0]).tolist()) if not held]
    if flat:
        # Their further tokens come behind; those of the other rows are never reached.
        rest, its_ids = _largest(weights[flat], weights.shape[1])
        likely = torch.nn.functional.pad(likely, (0, rest.shape[1] - _LIKELY))
        ids = torch.nn.functional.pad(ids, (0, rest.shape[1] - _LIKELY))
        likely[flat], ids[flat] = rest, its_ids
    return likely, ids


def _pick(
    cumulative: torch.Tensor, last: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1], the first index up to `last` whose cumulative weight exceeds `number` of all, and what all is.

    Its weight is not 0.
    """
    total = cumulative.gather(1, last)
    index = torch.searchsorted(cumulative, number * total, right=True)
    # Also where weights are NaN, which must not fail the whole batch.
    end = torch.searchsorted(cumulative, total).minimum(last)
    return torch.where(index <= last, index, end), total


def _moved(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return Device.of(like.device).upload(tensor)


def select(rows: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """The rows [n, ...] at these places; `rows` itself for all of them."""
    if len(places) == len(rows):
        return rows
    return rows.index_select(0, _moved(torch.tensor(places), rows))


def _replace(rows: torch.Tensor, places: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    if len(places) == len(rows):
        return values
    return rows.index_copy(0, _moved(torch.tensor(places), rows), values)


@torch.no_grad()
def raw_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [N, 1 + 2 * k]: the logprob of each row's token, then ids and logprobs of its likeliest.

    Float32 whatever the dtype of the logits.
    """
    values = logits.float().log_softmax(dim=-1)
    top = values.topk(min(_TOP_LOGPROBS, values.shape[1]))
    chosen = values.gather(1, tokens.clamp(min=0)[:, None])
    return torch.cat([chosen.double(), top.indices.double(), top.values.double()], dim=1)


def read_logprobs(row: Sequence[float], token: int, count: int) -> RawLogprobs:
    """One row of `raw_logprobs`, of which the `count` likeliest are asked for."""
    half = 1 + len(row) // 2
    pairs = zip(map(int, row[1:half]), row[half:], strict=True)
    return RawLogprobs((token, row[0]), tuple(pairs)[:count])
