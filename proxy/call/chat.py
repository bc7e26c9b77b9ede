"""A chat request as both front doors hand it on, and what comes back: plain values."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.base.delta import Delta
from triptych.base.errors import InvalidRequest
from triptych.base.request import (
    MAX_LANGUAGE,
    MAX_NAME,
    MAX_SPOKEN_PROMPT,
    AudioSlot,
    ItemSlot,
    Message,
    MessageToolCall,
    Role,
    Slot,
    TemplateOptions,
    TextPart,
    VideoSlot,
)
from triptych.base.types import FinishReason, SamplingParams, Usage
from triptych.protos import pd_pb2
from triptych.proxy.media.source import AudioPart, ImagePart, ItemPart, VideoPart
from triptych.proxy.media.spool import MediaHold

#: Form of a text item whose media are token ids, little-endian uint32.
TOKEN_IDS = "token_ids"


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """A text, token ids, audio or a picture for the encoder; `param` is the request field that holds it.

    `start_frame` is where a window of a long audio file begins.
    """

    source: str | tuple[int, ...] | AudioPart | ImagePart
    param: str
    start_frame: int = 0

    @property
    def modality(self) -> str:
        if isinstance(self.source, AudioPart):
            return "audio"
        return "image" if isinstance(self.source, ImagePart) else "text"

    @property
    def options(self) -> Mapping[str, object]:
        """Processor options of the item: part of its key."""
        if self.start_frame:
            return {"start_frame": self.start_frame}
        return {"form": TOKEN_IDS} if isinstance(self.source, tuple) else {}

    def text_bytes(self) -> bytes:
        """The item's media, where the prompt is no file; InvalidRequest for text that is no Unicode."""
        if isinstance(self.source, tuple):
            return struct.pack(f"<{len(self.source)}I", *self.source)
        assert isinstance(self.source, str)
        try:
            return self.source.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{self.param} holds text that is not valid Unicode", param=self.param
            ) from None


@dataclass(frozen=True, slots=True)
class Transcription:
    """What a speech model shall do; empty fields are the model's defaults. See `common.proto`.

    InvalidRequest for a text that is too long.
    """

    language: str = ""
    task: str = ""
    prompt: str = ""
    timestamps: bool = False
    detect_language: bool = False

    def __post_init__(self) -> None:
        check_length("language", self.language, MAX_LANGUAGE)
        check_length("task", self.task, MAX_LANGUAGE)
        check_length("prompt", self.prompt, MAX_SPOKEN_PROMPT)


def check_length(param: str, text: str, limit: int = MAX_NAME) -> None:
    """InvalidRequest for a text that is too long."""
    if len(text) > limit:
        raise InvalidRequest(f"{param} must be at most {limit} characters long", param=param)


#: A client's word for a role, and the one that templates know.
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation with its items; `name` and what follows is for chat templates."""

    role: Role
    content: str | tuple[TextPart | ItemPart, ...]
    name: str | None = None
    tool_calls: tuple[MessageToolCall, ...] = ()
    tool_call_id: str | None = None
    #: Of an earlier answer.
    reasoning: str | None = None

    @property
    def text_length(self) -> int:
        """Characters of its text."""
        reasoning = len(self.reasoning or "")
        if isinstance(self.content, str):
            return reasoning + len(self.content)
        return reasoning + sum(len(part.text) for part in self.content if isinstance(part, TextPart))

    def items(self) -> list[ItemPart]:
        if isinstance(self.content, str):
            return []
        return [part for part in self.content if not isinstance(part, TextPart)]

    def without_media(self) -> Message:
        """The message as a PD worker gets it: an empty slot for every item."""
        content: str | list[TextPart | Slot]
        if isinstance(self.content, str):
            content = self.content
        else:
            content = [part if isinstance(part, TextPart) else _SLOTS[type(part)] for part in self.content]
        calls = list(self.tool_calls) or None
        return Message(self.role, content, self.name, calls, self.tool_call_id, self.reasoning)


_SLOTS: dict[type[ItemPart], Slot] = {ImagePart: ItemSlot(), VideoPart: VideoSlot(), AudioPart: AudioSlot()}


def modality_of(part: ItemPart) -> str:
    return _SLOTS[type(part)].modality


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """What a request without generation asks for; empty fields are the checkpoint's own way. See `pd.proto`.

    With `scores` its messages are a query and a document. With `tokens` each token has a vector; with
    `query`, the vectors of one, the result is their MaxSim.
    """

    scores: bool = False
    tokens: bool = False
    query: bytes = b""
    method: str = ""
    normalize: bool | None = None
    dimensions: int = 0

    def __post_init__(self) -> None:
        check_length("pooling", self.method)


#: A prompt that no chat template touches: text, or token ids.
RawPrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A valid request for `n` answers. `sampling.seed` is drawn already; `timeout` is in seconds.

    `label` is the client's X-Request-ID, or one made in its place: for logs and replies. Any two calls may
    have the same one, of one tenant or of two; what a call is known by is `InFlightRequest.request_id`.
    """

    label: str
    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    timeout: float
    cache_salt: str = ""
    processor_options: Mapping[str, object] = field(default_factory=dict)
    n: int = 1
    #: Among its tenant's requests the lower one goes first.
    priority: int = 0
    template: TemplateOptions = TemplateOptions()
    #: Stands in the place of messages, which are empty then.
    prompt: RawPrompt | None = None
    #: The request's field that holds it.
    prompt_param: str = "prompt"
    #: What the encoder of an encoder-decoder model reads; `prompt` is the decoder's then, None its default.
    encoder: EncoderPrompt | None = None
    transcription: Transcription | None = None
    #: Nothing is generated: the call ends with a vector or a score.
    pooling: PoolingOptions | None = None
    #: One of several of a reply, another one of which holds the reply's place until its client has it.
    is_part: bool = False
    #: A later window of audio that is being transcribed: it goes before new requests.
    continues: bool = False
    #: A question of the proxy's own for another request, which alone is counted and logged.
    internal: bool = False
    #: The reply is sent in one piece: output may come in large batches.
    whole: bool = False
    #: The principal's id where keys are in use.
    tenant: str = ""
    #: The LoRA adapter that the client has named as its model: `model` is then the one it is of.
    adapter: str = ""
    #: Shared by copies of the call, so that all its choices are about the same bytes.
    media: MediaHold = field(default_factory=MediaHold, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_length("model", self.model)

    @property
    def served_name(self) -> str:
        """The adapter's or the model's name, for people and replies; may be empty."""
        return self.adapter or self.model

    @property
    def salt(self) -> str:
        """Keeps apart what tenants and salts share: embeddings, text blocks, routes."""
        if not self.tenant:
            return self.cache_salt
        # With its length in front, no tenant's end can be a salt's beginning; and no client's salt alone
        # begins with a NUL.
        return f"\0{len(self.tenant)}:{self.tenant}{self.cache_salt}"

    @property
    def has_items(self) -> bool:
        """Whether something of the request goes to an encoder worker."""
        return self.encoder is not None or bool(self.items())

    @property
    def prompt_unmodified(self) -> bool:
        """Whether the decoder gets the token ids of `prompt` without the model's start token before them.

        So it is for one prompt of token ids beside media; a `decoder_prompt` gets the start token.
        """
        return self.encoder is not None and isinstance(self.prompt, tuple) and self.prompt_param == "prompt"

    @property
    def text_param(self) -> str:
        """The request's field that has the prompt's text, of messages too."""
        return "messages" if self.prompt is None and self.prompt_param == "prompt" else self.prompt_param

    @property
    def text_length(self) -> int:
        """Characters of all messages."""
        return sum(message.text_length for message in self.messages)

    def items(self) -> list[ItemPart]:
        return [item for message in self.messages for item in message.items()]


@dataclass(frozen=True, slots=True)
class ItemTiming:
    """Where one item's embedding came from: "store", "encoded", or "joined", which is another request's job;
    "pd": from nowhere, its PD worker holds what it gave."""

    mm_hash: str
    cache: str


@dataclass(slots=True)
class Timings:
    """Seconds of a request by stage; of items in parallel the longest counts."""

    queue: float = 0.0
    fetch: float = 0.0
    encode: float = 0.0
    save: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    items: list[ItemTiming] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a choice that was served; `final`: of the request's last one, with the usage of all."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    choice: int = 0
    final: bool = True
    #: The stop string that has ended it, if one has.
    stop_sequence: str = ""
    #: Of a pooled call: the vector, those of all tokens, or the score, as little-endian float32.
    pooled: bytes = b""


#: The prompt as the PD worker expanded it, once and before all text; of audio with its `frames`.
Admitted = pd_pb2.Admitted
Output = Admitted | Delta | Done
