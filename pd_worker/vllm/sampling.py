"""Our sampling parameters as vLLM's, or their refusal where vLLM cannot do what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from triptych.base.errors import InvalidRequest
from triptych.base.hashing import framed_digest
from triptych.base.types import JsonObject, OutputFormat
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.vllm.formats import structured_outputs

#: Below this vLLM samples at this temperature.
LEAST_TEMPERATURE = 0.01
_MOST_TEMPERATURE = 2.0
_MOST_LOGPROBS = 20


def check_sampling(sampling: ResolvedSampling, output_format: OutputFormat | None) -> None:
    """InvalidRequest, naming the field, for what vLLM does otherwise than documented here."""
    if sampling.temperature > _MOST_TEMPERATURE:
        raise _refusal("temperature", f"at most {_MOST_TEMPERATURE:g}")
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise _refusal("temperature", f"0, or {LEAST_TEMPERATURE:g} and more")
    if sampling.min_tokens and output_format is not None:
        # Where its grammar allows nothing but the end, vLLM would have no token left.
        raise _refusal("min_tokens", "no output format beside it")


def sampling_params(
    sampling: ResolvedSampling, received: Sequence[int], output_format: OutputFormat | None, *, replay: bool
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
        **_penalties(sampling, [] if replay else received),
    }
    if sampling.bad_words:
        params["bad_words"] = list(sampling.bad_words)
    if sampling.logprobs is not None:
        # One more: the chosen token takes the place of the last where it is none of the likeliest.
        params["logprobs"] = min(sampling.logprobs + 1, _MOST_LOGPROBS) if sampling.logprobs else 0
    if output_format is not None:
        params["structured_outputs"] = structured_outputs(output_format)
    return params


def replays(sampling: ResolvedSampling, received: Sequence[int], output_format: OutputFormat | None) -> bool:
    """Whether a continuation has to begin at the prompt, and the tokens received are to come again.

    A grammar begins with the first generated token, and vLLM takes the presence penalty of generated tokens,
    among which it also looks for the beginnings of bad words.
    """
    split_words = any(len(ids) > 1 for ids in sampling.bad_word_ids)
    return bool(received) and (output_format is not None or sampling.presence_penalty != 0 or split_words)


def _temperature(sampling: ResolvedSampling, done: int) -> JsonObject:
    if sampling.greedy:
        return {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": engine_seed(sampling.seed, sampling.choice, done),
    }


def engine_seed(seed: int, choice: int, done: int) -> int:
    """The seed of one choice from output token `done` on.

    vLLM's generator begins anew with every request: equal seeds would repeat the random numbers before.
    """
    parts = (("seed", str(seed).encode()), ("choice", str(choice).encode()), ("done", str(done).encode()))
    return int(framed_digest((("domain", b"triptych.vllm.seed"), *parts))[:15], 16)


def _penalties(sampling: ResolvedSampling, received: Sequence[int]) -> JsonObject:
    """Penalties and biases. vLLM does not count the tokens of a prompt: `received` become biases."""
    params: JsonObject = {}
    for name, off in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
        if (value := getattr(sampling, name)) != off:
            params[name] = value
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
