"""Calls of vLLM that requests become, never with media, and the embeddings that they need stored."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.hashing import framed_digest
from triptych.base.source_tickets import SourceTickets
from triptych.base.types import DRAWING, ItemPlan, JsonObject, OutputFormat
from triptych.base.vllm_classes import VLLMClass
from triptych.ec_connector.base import SourceTable
from triptych.ec_connector.connectors.store_loads import SAVED_POLL_SECONDS, SAVING_SECONDS
from triptych.models.generic.layout import ItemLayout
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.frontend.grammar import Formats
from triptych.pd_worker.vllm.http.call import EngineCall
from triptych.store.bulk import LoadResult, Missing
from triptych.store.bulk_reader import Into
from triptych.store.control import StoreUnavailable

if TYPE_CHECKING:
    import numpy as np


class EngineFormat:
    """The output format of one request. It constrains nothing here: vLLM has a grammar of its own."""

    def __init__(self, output_format: OutputFormat) -> None:
        self.output_format = output_format
        self.error: RequestError | None = None

    def follow(self, output_ids: Sequence[int]) -> bool:
        # Output of vLLM's grammar, whose blanks are not those of ours.
        return True

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None:
        return None


class EngineFormats:
    """Makes the formats of requests. What the native engine refuses is refused here by the same names."""

    #: vLLM's grammar begins with the first token of the output.
    after_reasoning = False

    def __init__(self, native: Formats) -> None:
        self._native = native

    def state(self, output_format: OutputFormat) -> EngineFormat:
        """InvalidRequest for what is not supported."""
        return EngineFormat(self._native.state(output_format).output_format)


def structured_outputs(output_format: OutputFormat) -> JsonObject:
    """vLLM's `structured_outputs` of a format that has been checked."""
    match output_format.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            schema = json.loads(output_format.text)
            # The client's own settings for a parser are no part of JSON schema.
            schema.pop("x-guidance", None)
            return {"json": schema}
        case "regex":
            return {"regex": output_format.text}
    return {"choice": list(dict.fromkeys(output_format.choices))}


_MAX_TEMPERATURE = 2.0
_MAX_LOGPROBS = 20


def check_sampling(
    sampling: ResolvedSampling, output_format: OutputFormat | None, *, speculates: bool = False
) -> None:
    """InvalidRequest, naming the field, for what vLLM does otherwise than documented here."""
    if speculates and (field := sampling.not_speculated):
        raise _refusal(field, "none beside speculative decoding")
    if sampling.temperature > _MAX_TEMPERATURE:
        raise _refusal("temperature", f"at most {_MAX_TEMPERATURE:g}")
    if sampling.min_tokens and output_format is not None:
        # Where its grammar allows nothing but the end, vLLM would have no token left.
        raise _refusal("min_tokens", "no output format beside it")


def sampling_params(
    sampling: ResolvedSampling,
    received: Sequence[int],
    output_format: OutputFormat | None,
    *,
    replay: bool,
    speculates: bool = False,
) -> JsonObject:
    """vLLM's sampling_params of a request that has put out `received` already.

    Those tokens are the end of its prompt; with `replay` they are generated again, as at first. Stop strings
    are not vLLM's: they are looked for in the text as it comes.
    """
    done = 0 if replay else len(received)
    params: JsonObject = {
        "max_tokens": max(1, sampling.max_tokens - done),
        "min_tokens": max(0, sampling.min_tokens - done),
        # The checkpoint's end-of-sequence tokens are among these, unless they are to be ignored.
        "ignore_eos": True,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "detokenize": False,
        **_temperature(sampling, done),
        # Beside speculative decoding vLLM takes no biases: a replay that has diverged goes on without them.
        **_penalties(sampling, [] if replay or speculates else received),
    }
    if sampling.bad_words:
        params["bad_words"] = list(sampling.bad_words)
    if sampling.logprobs is not None:
        # One more: the chosen token takes the place of the last where it is none of the likeliest.
        params["logprobs"] = min(sampling.logprobs + 1, _MAX_LOGPROBS) if sampling.logprobs else 0
    if output_format is not None:
        params["structured_outputs"] = structured_outputs(output_format)
    return params


def replays(
    sampling: ResolvedSampling,
    received: Sequence[int],
    output_format: OutputFormat | None,
    *,
    speculates: bool = False,
) -> bool:
    """Whether a continuation has to begin at the prompt, and the tokens received are to come again.

    A grammar begins with the first generated token, and vLLM takes the presence penalty of generated tokens,
    among which it also looks for the beginnings of bad words. Beside speculative decoding it takes no biases
    in place of a frequency penalty.
    """
    if speculates and received and sampling.frequency_penalty != 0:
        return True
    split_words = any(len(ids) > 1 for ids in sampling.bad_word_ids)
    return bool(received) and (output_format is not None or sampling.presence_penalty != 0 or split_words)


def _temperature(sampling: ResolvedSampling, done: int) -> JsonObject:
    if sampling.greedy:
        return {"temperature": 0.0}
    return {
        **{name: getattr(sampling, name) for name in DRAWING},
        "seed": engine_seed(sampling.seed, sampling.choice, done),
    }


def engine_seed(seed: int, choice: int, done: int) -> int:
    """The seed of one choice from output token `done` on.

    vLLM seeds a generator for every request: an equal seed would repeat the earlier random numbers.
    """
    parts = (("seed", str(seed).encode()), ("choice", str(choice).encode()), ("done", str(done).encode()))
    return int(framed_digest((("domain", b"triptych.vllm.seed"), *parts))[:15], 16)


def _penalties(sampling: ResolvedSampling, received: Sequence[int]) -> JsonObject:
    """Penalties and biases. vLLM does not count the tokens of a prompt: `received` become biases."""
    params: JsonObject = dict(sampling.penalties)
    biases = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(received).items():
            taken = sampling.presence_penalty + sampling.frequency_penalty * count
            biases[token] = biases.get(token, 0.0) - taken
    if biases:
        params["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    return params


def _refusal(field: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: this worker's engine, vLLM, takes {allowed}", param=field)


def check_request(request: EngineRequest, known: VLLMClass, *, speculates: bool = False) -> None:
    """InvalidRequest for what vLLM cannot do as it is asked for, with a model of the `known` class."""
    check_sampling(request.sampling, output_format(request), speculates=speculates)
    check_items([feature.plan for feature in request.features], known)


def check_items(plans: Sequence[ItemPlan], known: VLLMClass) -> None:
    """InvalidRequest for items that vLLM cannot be given of the `known` class."""
    if others := sorted({plan.modality for plan in plans} - set(known.modalities)):
        raise InvalidRequest(
            f"messages: an item of the kind {others[0]}: with this model, this worker's engine, vLLM, takes "
            f"{' and '.join(known.modalities)} items alone: send it to a worker of --engine native",
            param="messages",
        )
    if not known.segments and any(plan.layout and ItemLayout.decode(plan.layout).continues for plan in plans):
        raise InvalidRequest(
            "messages: a video in segments, of which this worker's engine, vLLM, would count positions anew: "
            "ask for fewer frames, or start the encoder workers with --video-segment-frames 0",
            param="messages",
        )


def output_format(request: EngineRequest) -> OutputFormat | None:
    grammar = request.grammar
    return grammar.output_format if isinstance(grammar, EngineFormat) else None


@dataclass(frozen=True, slots=True)
class DirectItems:
    """The items that vLLM's connector can read at their encoder workers, with their source tickets."""

    tickets: SourceTickets
    sources: SourceTable

    def served(self, plans: Iterable[ItemPlan]) -> set[str]:
        """Those of the items that an encoder worker has said it serves."""
        return {plan.mm_hash for plan in plans if self.sources.get(plan.mm_hash) is not None}

    def entries(self, plans: Iterable[ItemPlan], attempt: str) -> dict[str, JsonObject]:
        """The tickets of one call."""
        known = [(plan, self.sources.get(plan.mm_hash)) for plan in plans]
        return {
            plan.mm_hash: self.tickets.entry(plan, source, attempt)
            for plan, source in known
            if source is not None
        }


def call_of(
    request: EngineRequest,
    *,
    replay: bool = False,
    direct: DirectItems | None = None,
    speculates: bool = False,
    image_kind: str = "image",
    attempt: str = "",
) -> EngineCall:
    """The call that continues `request` after the tokens it has put out.

    With `replay` it begins at the prompt: those tokens are generated again. `image_kind` is what vLLM calls
    pictures, `attempt` the call's id where another vLLM knows it.
    """
    received = request.output_token_ids
    attempt = attempt or (secrets.token_hex(16) if direct is not None else "")
    plans = [feature.plan for feature in request.features]
    return EngineCall(
        [*request.prompt_token_ids, *(() if replay else received)],
        sampling_params(
            request.sampling, received, output_format(request), replay=replay, speculates=speculates
        ),
        # Of model, adapter and tenant: tenants share no blocks of vLLM's prefix cache.
        request.prefix_root.hex(),
        request.features,
        attempt,
        {} if direct is None else direct.entries(plans, attempt),
        adapter=request.adapter,
        image_kind=image_kind,
    )


logger = logging.getLogger(__name__)

#: Pauses while the store does not answer, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
#: Values that are read at once to verify them.
_VERIFIED_AT_ONCE = 2


class ItemStore(Protocol):
    """The part of the embedding store that is used."""

    async def look_up(self, keys_: list[tuple[str, str]]) -> list[ItemPlan | None]: ...

    async def load(self, plan: ItemPlan, into: Into) -> LoadResult: ...


class Embeddings:
    """The store, as a request's items are looked for in it. Waits while it does not answer."""

    def __init__(self, store: ItemStore) -> None:
        self._store = store
        self._reading = asyncio.Semaphore(_VERIFIED_AT_ONCE)

    async def missing(
        self,
        plans: Iterable[ItemPlan],
        *,
        verify: bool = False,
        on_way: Collection[str] = (),
        away_is_missing: bool = False,
    ) -> dict[str, str]:
        """The keys without a usable value, each with the digest of a damaged one, or "".

        With `verify` all values are read whole: a damaged body has an intact header. Those of `on_way`, which
        an encoder worker has computed and may still be saving, are waited for a moment. `away_is_missing`:
        where the store does not answer, all are missing, since they can be had without it.
        """
        pause, began = _FIRST_PAUSE, time.monotonic()
        left = list(plans)
        while True:
            try:
                found = await self._missing(left, verify)
            except StoreUnavailable as error:
                logger.warning("items cannot be looked up, trying again: %s", error)
                if away_is_missing:
                    return {plan.mm_hash: "" for plan in left}
            else:
                coming = {key for key, damaged in found.items() if key in on_way and not damaged}
                if not coming or time.monotonic() > began + SAVING_SECONDS:
                    return found
                await asyncio.sleep(SAVED_POLL_SECONDS)
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _missing(self, plans: list[ItemPlan], verify: bool) -> dict[str, str]:
        suspects = plans
        if not verify:
            infos = await self._store.look_up([(plan.mm_hash, plan.namespace) for plan in plans])
            suspects = [plan for plan, there in zip(plans, infos, strict=True) if there is None]
        missing = {}
        for plan in suspects:
            async with self._reading:
                result = await self._store.load(plan, _memory)
            if isinstance(result, Missing):
                missing[plan.mm_hash] = result.damaged_digest
        return missing


def _memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))
