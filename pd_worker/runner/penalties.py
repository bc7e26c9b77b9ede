"""Penalties, biases and masks of the sampler: what requests change in their logits, for all rows at once.

Every kind is one list of places in the flattened logits with a number each, made on the host: a step takes a
few copies and operators, whatever its number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile

import numpy as np
import torch

from triptych.base.machine.device import Device
from triptych.models.base import Forbids, LogitsRule
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
        place[: len(tokens)] = tokens
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
