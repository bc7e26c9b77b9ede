"""Fields that several bodies have: sampling, what is accepted or refused without effect, and the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.request import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICE_TEXTS,
    MAX_NAME,
    MAX_SALT,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
    LogitBias,
    Seed,
    TokenId,
)
from triptych.base.types import (
    Logprobs,
    MinP,
    MinTokens,
    OutputFormat,
    OutputTokens,
    Penalty,
    RepetitionPenalty,
    SamplingParams,
    Temperature,
    TopK,
    TopP,
)
from triptych.proxy.call.output_formats import ResponseFormat, format_of
from triptych.proxy.call.tools import ToolBody
from triptych.proxy.call.validation import check_sampling, seed_of

_ADVICE = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "answers are text",
    "web_search_options": "the server searches nothing",
    "documents": "put their text into messages",
    "chat_template": "the checkpoint's template is used; chat_template_kwargs are passed to it",
    "use_beam_search": "use n",
    "best_of": "use n",
    "echo": "the prompt is not repeated",
    "prompt_embeds": "embeddings are computed here, never taken: send text or token ids",
    "prompt_logprobs": "only output tokens have logprobs",
    "truncate_prompt_tokens": "shorten messages",
    "allowed_token_ids": "use logit_bias",
    "logits_processors": "use logit_bias",
    "guided_grammar": "use guided_json, guided_regex or guided_choice",
    "guided_whitespace_pattern": "use guided_regex",
    "structural_tag": "use response_format",
    "return_tokens_as_token_ids": "use return_token_ids",
    "add_special_tokens": "the chat template writes them",
    "kv_transfer_params": "the cluster decides itself what goes where",
}
_unserved = attrgetter(*_ADVICE)


class UnservedBody(msgspec.Struct, kw_only=True):
    """Fields of OpenAI and vLLM that are refused unless they are off: null, false, 0 or empty."""

    functions: object = None
    function_call: object = None
    audio: object = None
    web_search_options: object = None
    documents: object = None
    chat_template: object = None
    use_beam_search: object = None
    best_of: object = None
    echo: object = None
    prompt_embeds: object = None
    prompt_logprobs: object = None
    truncate_prompt_tokens: object = None
    allowed_token_ids: object = None
    logits_processors: object = None
    guided_grammar: object = None
    guided_whitespace_pattern: object = None
    structural_tag: object = None
    return_tokens_as_token_ids: object = None
    add_special_tokens: object = None
    kv_transfer_params: object = None
    skip_special_tokens: object = None
    modalities: object = None


def refuse_unserved(body: UnservedBody, served: frozenset[str] = frozenset()) -> None:
    """InvalidRequest when the body asks for something that is not served; `served` names exceptions."""
    if any(values := _unserved(body)):
        for (name, advice), value in zip(_ADVICE.items(), values, strict=True):
            if value and name not in served and not (name == "best_of" and value == 1):
                raise InvalidRequest(f"{name} is not supported: {advice}", param=name)
    if body.skip_special_tokens is False:
        raise InvalidRequest(
            "skip_special_tokens: special tokens are never part of the text; see return_token_ids",
            param="skip_special_tokens",
        )
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest('modalities must be ["text"]', param="modalities")


#: Types of parts of bodies that are converted after it; LATE_KEY in a field's schema is the index of one.
LATE: list[Any] = []
LATE_KEY = "late"
Text = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)]


def late(kind: Any) -> Meta:
    """Has the OpenAPI document show `kind` for a field that its parser converts after the body."""
    if kind not in LATE:  # msgspec evaluates annotations more than once
        LATE.append(kind)
    return Meta(extra_json_schema={LATE_KEY: LATE.index(kind)})


CacheSalt = Annotated[str, Meta(extra_json_schema={"maxLength": MAX_SALT})]
Priority = Annotated[
    Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None,
    Meta(description="Among the key's own requests the lower one goes first; 0 by default."),
]
_Biases = Annotated[
    dict[str, LogitBias],
    Meta(max_length=MAX_BIASES, extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
]


class SamplingBody(UnservedBody, kw_only=True):
    """The part of a request body that every generating endpoint shares. Unknown fields do not fail.

    The OpenAPI document shows the fields that have a description.
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
        StopText | StopTexts | None,
        Meta(description="Texts that end the answer and are not part of it."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="Leave the stop text or stop token that ends the answer in its text.")
    ] = None
    bad_words: Annotated[
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Meta(max_length=MAX_BAD_WORDS),
        ]
        | None,
        Meta(description="Texts that the answer does not hold, by their tokens."),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None,
        Meta(description="Token ids that end the answer."),
    ] = None
    ignore_eos: Annotated[
        bool | None, Meta(description="Go on past the end-of-sequence token, up to max_tokens.")
    ] = None
    priority: Priority = None
    thinking_token_budget: Annotated[
        MinTokens | None, Meta(description="Largest number of reasoning tokens, of models that reason.")
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
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
        Annotated[list[Text], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)] | None,
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
            thinking_token_budget=body.thinking_token_budget,
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


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


Name = Annotated[str, Meta(max_length=MAX_NAME)]
ModelName = Annotated[
    Name | None, Meta(description="A name from GET /v1/models; optional when only one model is served.")
]
Stream = Annotated[
    bool | None, Meta(description="Send the answer as server-sent events while it is generated.")
]
StreamUsage = Annotated[
    StreamOptions | None, Meta(description="include_usage: send the usage in a last event.")
]
ChoiceCount = Annotated[int | None, Meta(description="Number of answers, at most --max-choices.")]
TopLogprobs = Annotated[
    Logprobs | None, Meta(description="Number of most likely tokens to report beside each chosen one.")
]
#: As they were sent, since chat templates print them.
ChatTools = Annotated[
    Annotated[list[Annotated[dict[str, object], late(ToolBody)]], Meta(max_length=MAX_TOOLS)] | None,
    Meta(description="Functions that the model may call."),
]
ParallelCalls = Annotated[
    bool | None, Meta(description="Whether an answer may hold several calls; true by default.")
]
TemplateVariables = Annotated[
    dict[str, object] | None, Meta(description="Additional variables for the chat template.")
]
GenerationPrompt = Annotated[
    bool | None, Meta(description="Open the assistant's turn at the end of the prompt; true by default.")
]
ContinueFinal = Annotated[
    bool | None, Meta(description="Continue the last message instead of starting a new one.")
]
ReturnTokenIds = Annotated[bool | None, Meta(description="Report the token ids of prompt and output.")]
ProcessorOptions = Annotated[
    dict[str, object] | None,
    Meta(description="Options of the image processor; they change embeddings and their keys."),
]
Salt = Annotated[
    CacheSalt | None, Meta(description="Requests with different salts share no embeddings and no KV blocks.")
]
TimingsWanted = Annotated[bool | None, Meta(description="Report how long each stage of the request took.")]
SpecialTokens = Annotated[
    bool | None,
    Meta(
        extra_json_schema={"enum": [True, None]},
        description="Only true is supported: the tokenizer adds its own special tokens to a text.",
    ),
]


#: A message, and a field of it that has a place of its own in some APIs.
_MESSAGE = re.compile(
    r"((messages\[\d+\])(?:\.content)?)(?:\[\d+\]\.image_url\b|\.tool_calls\[\d+\]\.function\.arguments)?"
)


class FieldNames:
    """`places` has the client's path of every message, and of fields of messages; `names` what others are
    called, in the order in which they are looked for."""

    def __init__(self, places: Mapping[str, str], names: Sequence[tuple[re.Pattern[str], str]]) -> None:
        self._places = places
        self._names = names

    def translated(self, error: RequestError) -> RequestError:
        param = error.param and self.of(error.param)
        return type(error)(self.of(error.message), param=param, retry_after=error.retry_after)

    def of(self, text: str) -> str:
        """`text` with the paths of chat fields replaced."""
        text = _MESSAGE.sub(self._place, text)
        for pattern, name in self._names:
            text = pattern.sub(name, text)
        return text

    def _place(self, match: re.Match[str]) -> str:
        """The longest part of the path that has a place, led back to it."""
        path = match[0]
        known = next((name for name in (path, match[1], match[2]) if name in self._places), "")
        return self._places[known] + path[len(known) :] if known else path
