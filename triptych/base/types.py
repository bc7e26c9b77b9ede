"""Values that the proxy, the workers and the store exchange: plain, frozen, without torch."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

T = TypeVar("T")

#: A JSON object as the parser gives it.
JsonObject = dict[str, Any]
#: Options by name, of kinds that their reader checks.
Options = Mapping[str, Any]
#: The option of an item that is a segment of a video: its first sampled frame, its end, and the rows that the
#: tower adds behind the video's. Set by proxies, never by clients.
SEGMENT = "segment"

#: The dtype of rows that are stored in 8 bits: each with its scales behind it.
INT8 = "int8"
#: Bytes of one element, by the dtype names that may cross a process.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, INT8: 1}
#: Bytes of one of the scales of a row of int8, a float32.
SCALE_BYTES = 4

_prepared: set[object] = set()
_preparing = threading.Lock()


def prepared(kind: type[T]) -> type[T]:
    """The type, for msgspec to decode or convert to, once msgspec has read all of its fields.

    msgspec reads a class where it first meets it, and other threads that meet it meanwhile decode by the
    fields that it has by then: such a process ends (msgspec 0.22).
    """
    if kind not in _prepared:
        with _preparing:
            if kind not in _prepared:
                msgspec.json.Decoder(kind)
                _prepared.add(kind)
    return kind


@dataclass(frozen=True, slots=True)
class Placement:
    """The span of prompt tokens that an item's encoder output fills.

    `offset` and `length` count prompt tokens. `runs` are the (start, count) stretches inside the span
    that take an embedding (`is_embed`); None means all of them. `length == 0` is a cross-attention item:
    it has no span and must be resident before decoder position 0.
    """

    offset: int
    length: int
    runs: tuple[tuple[int, int], ...] | None = None
    atomic: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.length

    def num_embeds(self) -> int:
        """Embedding rows that the whole span consumes."""
        if self.runs is None:
            return self.length
        return sum(count for _, count in self.runs)

    def embeds_in(self, lo: int, hi: int) -> tuple[int, int]:
        """Rows [a, b) of the output that tokens [lo, hi), counted from the span's start, consume."""
        lo, hi = max(lo, 0), min(hi, self.length)
        if self.runs is None:
            return (lo, max(lo, hi))
        return (self._embeds_before(lo), self._embeds_before(max(lo, hi)))

    def _embeds_before(self, index: int) -> int:
        assert self.runs is not None
        return sum(min(max(index - start, 0), count) for start, count in self.runs)


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """An item's sizes, known once it is preprocessed: all that a PD worker needs but the rows.

    `rows` x `width` elements of `dtype` are stored; `width` may exceed the hidden size (deepstack levels
    are further columns). `length` placeholder tokens stand in the prompt, `runs` as in `Placement`.
    `grid_thw` is the family's patch grid (frames, rows, columns) or, for audio, (first frame, real frames of
    the window, frames of the file); empty where there is none. `layout` is what a model without a family of
    its own makes the placeholder and its positions from (`triptych.models.generic.layout`). Rows of int8 have
    `scales` scales each; others none.
    """

    mm_hash: str
    namespace: str
    modality: str
    rows: int
    width: int
    dtype: str
    length: int
    runs: tuple[tuple[int, int], ...] | None = None
    grid_thw: tuple[int, ...] = ()
    layout: tuple[int, ...] = ()
    scales: int = 0

    @property
    def columns(self) -> int:
        """Elements of a stored row: `width`, and of int8 the bytes of its scales."""
        return self.width + SCALE_BYTES * self.scales

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor's body, and the item's size wherever memory is counted.

        Admission, encoder cache and host buffers agree on it to the byte: items whose sum is the limit fit.
        """
        return self.rows * self.columns * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class EmbeddingSource:
    """Where an embedding can be read besides the store: at the encoder worker that computed it.

    `name` is random; `socket` an abstract unix socket that passes shared memory, `address` the host:port of a
    data port; either may be empty.
    """

    name: str
    socket: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class KeptKV:
    """A prompt's KV that a worker's engine keeps for one read: where, in that engine's own words, and up to
    which moment of `time.monotonic`."""

    params: bytes
    until: float


@dataclass(frozen=True, slots=True)
class MMFeature:
    """An item as the engine sees it: its plan and where it stands in the prompt."""

    plan: ItemPlan
    placement: Placement

    @property
    def mm_hash(self) -> str:
        return self.plan.mm_hash


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format that structured output is constrained to.

    `kind` is "json_object" (any object; `text` empty), "json_schema" (`text` is the schema), "regex"
    (`text` matches the whole output) or "choices" (the output is one of `choices`). `open`: the schema is
    held to as it is written, nothing is closed and bounded beyond it. `param` is the request field that asked
    for it.
    """

    kind: str
    text: str = ""
    choices: tuple[str, ...] = ()
    open: bool = False
    param: str = field(default="response_format", compare=False)


class TokenLogprob(Struct, frozen=True, gc=False):
    """A token with the natural logarithm of its probability before penalties, bias, temperature and cuts.

    `text` has half characters as U+FFFD; `utf8` are the token's bytes. Whole answers keep twenty of them for
    each token: the garbage collector, which holds everybody up, does not walk over these.
    """

    token_id: int
    logprob: float
    text: str
    utf8: bytes


class PositionLogprobs(Struct, frozen=True, gc=False):
    """The log-probabilities of one output position; `top` has the likeliest tokens, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


_MAX_TOKENS = 1 << 24
_MIN_DIVISOR = 0.01

OutputTokens = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
MinTokens = Annotated[int, Meta(ge=0, le=_MAX_TOKENS)]
#: 0 is greedy.
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
#: 0 and -1 are off.
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]
MinP = Annotated[float, Meta(ge=0, le=1)]
#: Presence and frequency penalties.
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=_MIN_DIVISOR, le=10)]
#: What logits can be divided by; a checkpoint's default may be above what clients may ask for.
RepetitionDivisor = Annotated[float, Meta(ge=_MIN_DIVISOR, le=100)]
#: Likeliest tokens of one position.
Logprobs = Annotated[int, Meta(ge=0, le=20)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's sampling parameters. None means: the checkpoint's generation_config decides.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1`, `min_p == 0` and `repetition_penalty == 1` are
    off. `max_tokens` None means: up to the model length. `seed` is drawn by the proxy when the client gives
    none, so that a resumed request continues as it began; `choice` is its index among the choices of one
    request. `logprobs` is the number of likeliest tokens to report beside the chosen one; None reports none.
    `thinking_token_budget` is the largest number of reasoning tokens; None means no limit.
    """

    max_tokens: OutputTokens | None = None
    min_tokens: MinTokens = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty | None = None
    min_p: MinP | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    choice: int = 0
    logprobs: Logprobs | None = None
    output_format: OutputFormat | None = None
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    thinking_token_budget: MinTokens | None = None


#: The parameters that checkpoints have defaults of: the first count where tokens are drawn only.
DRAWING = ("temperature", "top_p", "top_k", "min_p")
DEFAULTED = (*DRAWING, "repetition_penalty")
#: With each of them off.
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Texts before and after the reasoning in a model's output.

    `label` is a line after `start` that names the part. `begun`: the prompt ends inside the reasoning,
    so that the output begins with it, without `start`.
    """

    start: str
    end: str
    label: str = ""
    begun: bool = False


@dataclass(frozen=True, slots=True)
class TimestampTokens:
    """A speech model's tokens for times.

    Token `first + n` says: n * `seconds` from the start of the window.
    """

    first: int
    seconds: float


#: What a checkpoint is made for.
Task = Literal["generate", "embed", "score", "token_embed"]
#: Of a PD worker's registration: its `capacity["task"]` is a place in this list.
TASKS: tuple[Task, ...] = ("generate", "embed", "score", "token_embed")
#: Modalities of the items of a prompt, in the order of the bits with which PD workers name theirs.
ITEMS = ("image", "video", "audio")


class FinishReason(enum.StrEnum):
    """The reason why a request ended, named as by OpenAI where it has a name."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A live worker's registration.

    `incarnation` is new for every process start; `namespaces` are those an encoder writes, or
    one of each tower and form of rows that a PD worker takes (`triptych.base.hashing.tower_of`). `capacity`
    holds small numbers by name, such as `plan_credit`, `tower_credit` (encoders) or `encoder_cache_bytes` (PD
    workers); `encoder_decoder` is 1 for models whose items are consumed through
    cross-attention. `modality` is that of the model's items: "image", "audio" or "text". `proof` signs
    all other fields with the internal token (`triptych.base.rpc.channels`); empty where none is in use.
    `kind` names the device: workers of one kind are equally fast; empty where the writer is of an older
    release. `adapters` are the LoRA adapters of a PD worker: by name, the key of each, which like the model
    key names weights and not a folder.
    """

    address: str
    pool: str
    incarnation: str
    model_key: str
    model: str
    namespaces: tuple[str, ...] = ()
    capacity: dict[str, int] = field(default_factory=dict)
    modality: str = "image"
    proof: str = ""
    kind: str = ""
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def written(self) -> JsonObject:
        """The fields as they are stored and signed: releases without adapters read what names none."""
        fields = asdict(self)
        if not self.adapters:
            del fields["adapters"]
        return fields

    @property
    def cost_kind(self) -> str:
        """What costs are learnt for: its kind of device with its model."""
        return f"{self.kind}\n{self.model}"


def scales_fit(dtype: str, width: int, scales: int) -> bool:
    """Whether rows of `width` elements may have so many scales: of int8 one for each equal part of a row."""
    return width % scales == 0 if dtype == INT8 and scales else dtype != INT8 and not scales


def runs_of(mask: Sequence[bool]) -> tuple[tuple[int, int], ...] | None:
    """The (start, count) runs of True in `mask`; None when all are True."""
    if all(mask):
        return None
    runs: list[tuple[int, int]] = []
    for index, flag in enumerate(mask):
        if not flag:
            continue
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(runs)
