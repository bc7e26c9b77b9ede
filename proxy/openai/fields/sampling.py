"""The request fields that say how tokens are chosen, as OpenAI's endpoints and vLLM's clients send them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.request.limits import (
    MAX_BAD_WORDS,
    MAX_STOP_STRINGS,
    LogitBias,
    MinP,
    MinTokens,
    OutputTokens,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TokenId,
    TopK,
    TopP,
)
from triptych.base.types import OutputFormat, SamplingParams
from triptych.proxy.call.output_format import MAX_CHOICE_TEXTS, format_of
from triptych.proxy.call.validation import MAX_SALT, check_sampling, seed_of
from triptych.proxy.openai.fields import schemas
from triptych.proxy.openai.fields.unserved import UnservedBody

CacheSalt = Annotated[str, Meta(extra_json_schema={"maxLength": MAX_SALT})]
_Biases = Annotated[
    dict[str, LogitBias], Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}})
]


class SamplingBody(UnservedBody, kw_only=True):
    """The part of a request body that every generating endpoint shares. Unknown fields do not fail.

    The OpenAPI page shows the fields that have a description.
    """

    max_tokens: Annotated[
        OutputTokens | None,
        Meta(
            description="Most output tokens; completions have 16 by default, chat as many as the model takes."
        ),
    ] = None
    min_tokens: Annotated[MinTokens | None, Meta(description="No end before this many output tokens.")] = None
    temperature: Annotated[
        Temperature | None,
        Meta(description="0 takes the likeliest token; the checkpoint's own default where none is given."),
    ] = None
    top_p: Annotated[TopP | None, Meta(description="Probability mass of the candidates kept.")] = None
    top_k: Annotated[TopK | None, Meta(description="Candidates kept; 0 and -1: all.")] = None
    min_p: Annotated[
        MinP | None, Meta(description="Least probability of a candidate, as a share of the likeliest one's.")
    ] = None
    presence_penalty: Annotated[
        Penalty | None,
        Meta(description="Taken once from the logit of every token that stands in the output."),
    ] = None
    frequency_penalty: Annotated[
        Penalty | None,
        Meta(description="Taken from a token's logit for each time it stands in the output."),
    ] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None,
        Meta(description="Divides the logits of tokens that stand in prompt or output."),
    ] = None
    logit_bias: Annotated[_Biases | None, Meta(description="Added to the logits of token ids.")] = None
    seed: Annotated[
        Seed | None,
        Meta(description="Equal requests with equal seeds get equal answers; drawn where none is given."),
    ] = None
    stop: Annotated[
        schemas.Text
        | Annotated[list[schemas.Text], Meta(extra_json_schema={"maxItems": MAX_STOP_STRINGS})]
        | None,
        Meta(description="Texts that end the answer and are not part of it."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="Leave the stop text or stop token that ends the answer in its text.")
    ] = None
    bad_words: Annotated[
        Annotated[list[schemas.Text], Meta(extra_json_schema={"maxItems": MAX_BAD_WORDS})] | None,
        Meta(description="Texts that the answer does not hold, by their tokens."),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, Meta(description="Token ids that end the answer.")] = None
    ignore_eos: Annotated[
        bool | None, Meta(description="Go on past the end-of-sequence token, up to max_tokens.")
    ] = None
    response_format: Annotated[
        schemas.ResponseFormat | None,
        Meta(description="The form that the answer has to have."),
    ] = None
    structured_outputs: Annotated[
        dict[str, object] | None,
        Meta(description="vLLM's spelling of a form: json, regex, choice or json_object."),
    ] = None
    guided_json: Annotated[
        str | dict[str, object] | bool | None, Meta(description="A JSON schema that the answer fits.")
    ] = None
    guided_regex: Annotated[
        str | None, Meta(description="A regular expression that the whole answer matches.")
    ] = None
    guided_choice: Annotated[
        Annotated[list[schemas.Text], Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_CHOICE_TEXTS})]
        | None,
        Meta(description="The answer is one of these texts."),
    ] = None


def sampling_of(
    body: SamplingBody,
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    output_format: OutputFormat | None = None,
) -> SamplingParams:
    """The values in range, or InvalidRequest that names the field. The seed is drawn where none is given.

    `max_tokens`, `logprobs` (likeliest tokens to report; None: no report) and `output_format` are what an
    endpoint spells in fields of its own: they go before the body's.
    """
    stop = body.stop
    return check_sampling(
        SamplingParams(
            max_tokens=body.max_tokens if max_tokens is None else max_tokens,
            min_tokens=body.min_tokens or 0,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=seed_of(body.seed),
            stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty,
            min_p=body.min_p,
            logit_bias=_bias_of(body.logit_bias or {}),
            logprobs=logprobs,
            output_format=output_format or format_of(body),
            bad_words=tuple(body.bad_words or ()),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
        )
    )


def chat_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """How many likeliest tokens a chat request wants reported; None: no log-probabilities at all."""
    if not logprobs:
        if top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true beside it", param="top_logprobs")
        return None
    return top_logprobs or 0


def _bias_of(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """The (token id, bias) pairs of a JSON object, whose keys are strings."""
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())
