"""A chat as Submit carries it from a proxy to a PD worker, and the limits of a request's values.

Proxies check every limit at the door, before anything is done for the request, and PD workers again: any
process that can reach their port may have sent one. Without its media a request is bounded, see `MAX_SUBMIT`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from triptych.base.errors import InvalidRequest
from triptych.base.types import SamplingParams

#: Characters of all texts of one request, and token ids of one prompt: above what any model takes.
MAX_TEXT = 8 << 20
MAX_TOKEN_IDS = 1 << 18
#: No vocabulary's token is longer, so that a longer text is too long before it is tokenised.
MAX_CHARS_PER_TOKEN = 128
#: Bytes of the vectors of a query's tokens with which a document's are compared, and of those of one prompt.
MAX_QUERY_VECTORS = 1 << 20
MAX_TOKEN_VECTORS = 16 << 20
#: Bytes of a Submit without its items: characters have up to four bytes, and what is no text has a share of
#: the rest.
MAX_SUBMIT = 4 * MAX_TEXT + MAX_QUERY_VECTORS + (1 << 20)
#: Characters of the texts of all pairs to be scored, a query counted with each of its documents.
MAX_PAIRS_TEXT = 8 * MAX_TEXT
#: Characters of what names a model, a user, a schema or a file, and of what describes a schema.
MAX_NAME = 1024
MAX_DESCRIPTION = 64 << 10
#: Messages, content parts and tool calls of one request.
MAX_PARTS = 4096
#: Tools of one request, and the bytes of their JSON.
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 384 << 10
#: Nested lists and objects in a field that holds any JSON: tools, arguments, variables.
MAX_DEPTH = 64
#: Bytes of options and variables.
MAX_OPTIONS_BYTES = 16 << 10
#: Characters of a client's salt; and of it with the tenant's name, which has as many at most.
MAX_SALT = 256
MAX_TENANT_SALT = 1024
#: Characters of a schema, of a regular expression or of all choices together; and those choices.
MAX_FORMAT = 64 << 10
MAX_CHOICE_TEXTS = 1024
#: Characters of what a speech model takes as said before; of a language's code.
MAX_SPOKEN_PROMPT = 32 << 10
MAX_LANGUAGE = 40
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
#: Tokens that `logit_bias` names.
MAX_BIASES = 1024
MAX_TOKEN_ID = (1 << 32) - 1

#: Bytes of what an engine says of a prompt's KV that it keeps: the numbers of its blocks.
MAX_KV_PARAMS = 256 << 10

LogitBias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


def check_limits(param: str, value: float | None, kind: object) -> None:
    """InvalidRequest that names `param` unless the value is within the limits of its type. None passes."""
    limits = limits_of(kind)
    if value is not None and limits is not None:
        check_within(param, value, limits)


def check_within(param: str, value: float, limits: Meta) -> None:
    """InvalidRequest that names `param` unless the value is within the limits."""
    above_low = value > limits.gt if limits.gt is not None else limits.ge is None or value >= limits.ge
    if not (above_low and math.isfinite(value)) or (limits.le is not None and value > limits.le):
        raise out_of_limits(param, limits)


def check_lists(sampling: SamplingParams) -> None:
    """InvalidRequest that names the first list with too many values, or with one out of its limits."""
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings", param="stop")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in sampling.stop):
        raise InvalidRequest(f"stop takes strings of 1 to {MAX_STOP_CHARS} characters", param="stop")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    words = sampling.bad_words
    if len(words) > MAX_BAD_WORDS or not all(
        len(word) <= MAX_BAD_WORD_CHARS and word.strip() for word in words
    ):
        limits = f"up to {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARS} characters that are not all blank"
        raise InvalidRequest(f"bad_words takes {limits}", param="bad_words")
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias takes at most {MAX_BIASES} tokens", param="logit_bias")
    for token, bias in sampling.logit_bias:
        if not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequest("logit_bias must name token ids", param="logit_bias")
        check_limits("logit_bias", bias, LogitBias)


def check_tools_size(size: int) -> None:
    """InvalidRequest for tools whose JSON has more bytes than any chat template's prompt could use."""
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"tools holds {size} bytes of JSON; this server takes at most {MAX_TOOLS_BYTES}: shorten "
            "descriptions, or send fewer tools",
            param="tools",
        )


@cache
def limits_of(kind: object) -> Meta | None:
    """The limits of a type, or of what it is made of; None when there are none."""
    if isinstance(kind, Meta):
        return kind if kind.le is not None else None
    return next(filter(None, map(limits_of, get_args(kind))), None)


def out_of_limits(param: str, limits: Meta) -> InvalidRequest:
    """The complaint about a value that is not within limits."""
    low = f"above {limits.gt:.15g}" if limits.gt is not None else f"at least {_shown(limits.ge)}"
    return InvalidRequest(f"{param} must be {low} and at most {_shown(limits.le)}", param=param)


def _shown(limit: float | None) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.15g}"


_SHOWN = 64
_LIKELY_MEANT = {"image": "files", "images": "files"}


def unknown_field(name: str, known: Iterable[str], remedy: str) -> InvalidRequest:
    """The error, with `remedy` where no name of `known` is near."""
    known = list(known)
    near = difflib.get_close_matches(name[:_SHOWN], known, n=1)
    meant = near[0] if near else _LIKELY_MEANT.get(name, "")
    advice = f"did you mean {meant}?" if meant in known else remedy
    shown = name[:_SHOWN] if name.isprintable() else ascii(name[:_SHOWN])
    return InvalidRequest(f"{shown} is not a field of this request: {advice}", param=name[:_SHOWN])


#: The last two are of a pair to score, and of no conversation.
Role = Literal["system", "user", "assistant", "tool", "query", "document"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A text among a message's parts."""

    text: str


class ItemSlot(msgspec.Struct, frozen=True, tag="image"):
    """The place of a multimodal item among a message's parts."""

    @property
    def modality(self) -> str:
        """What chat templates call the item."""
        return "image"


class VideoSlot(msgspec.Struct, frozen=True, tag="video"):
    """The place of a video."""

    @property
    def modality(self) -> str:
        return "video"


class AudioSlot(msgspec.Struct, frozen=True, tag="audio"):
    """The place of a sound."""

    @property
    def modality(self) -> str:
        return "audio"


Slot = ItemSlot | VideoSlot | AudioSlot


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name and arguments: a JSON object in a string, as OpenAI has it, or that object."""

    name: str
    arguments: str | dict[str, object] = "{}"

    def parsed_arguments(self) -> dict[str, object] | None:
        """The arguments as an object; None when they are none."""
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            arguments = msgspec.json.decode(self.arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return arguments if isinstance(arguments, dict) else None


class MessageToolCall(msgspec.Struct, frozen=True):
    """A tool call of an earlier answer, as the conversation repeats it."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation; items are slots in it, filled in order."""

    role: Role
    content: str | list[TextPart | Slot] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    #: Of an earlier answer; templates show it or leave it out.
    reasoning_content: str | None = None

    @property
    def characters(self) -> int:
        """Characters of its texts that every chat template writes: of an earlier answer there are none."""
        if self.role == "assistant":
            return 0
        if not isinstance(self.content, list):
            return len(self.content or "")
        return sum(len(part.text) for part in self.content if isinstance(part, TextPart))

    @property
    def slots(self) -> list[str]:
        """The modalities of the items that the message takes. A plain text, however long, has none."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.modality for part in parts if isinstance(part, Slot)]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What the chat template gets beside the messages; `tools` and `variables` are JSON, empty for none.

    `continue_final_message` leaves the last message's turn open, for the model to go on in it.
    """

    tools: bytes = b""
    variables: bytes = b""
    generation_prompt: bool = True
    continue_final_message: bool = False
