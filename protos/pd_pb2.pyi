from triptych.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ItemState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_STATE_PENDING: _ClassVar[ItemState]
    ITEM_STATE_READY: _ClassVar[ItemState]
    ITEM_STATE_UNENCODED: _ClassVar[ItemState]
ITEM_STATE_PENDING: ItemState
ITEM_STATE_READY: ItemState
ITEM_STATE_UNENCODED: ItemState

class ItemSlot(_message.Message):
    __slots__ = ("plan", "state", "source")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    plan: _common_pb2.ItemPlan
    state: ItemState
    source: _common_pb2.EmbeddingSource
    def __init__(self, plan: _Optional[_Union[_common_pb2.ItemPlan, _Mapping]] = ..., state: _Optional[_Union[ItemState, str]] = ..., source: _Optional[_Union[_common_pb2.EmbeddingSource, _Mapping]] = ...) -> None: ...

class ItemPlacement(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("prompt_token_ids", "placements", "output_token_ids", "text_sent_chars", "planned", "kv", "cached_tokens")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_SENT_CHARS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    placements: _containers.RepeatedCompositeFieldContainer[ItemPlacement]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_sent_chars: int
    planned: bool
    kv: KVHandOff
    cached_tokens: int
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., placements: _Optional[_Iterable[_Union[ItemPlacement, _Mapping]]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., text_sent_chars: _Optional[int] = ..., planned: _Optional[bool] = ..., kv: _Optional[_Union[KVHandOff, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "proxy_id", "model_key", "timeout", "messages", "items", "sampling", "salt", "resume", "template", "prompt", "encoder_prompt", "transcription", "label", "traceparent", "tracestate", "pooling", "tenant", "may_hand_over", "adapter", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_KEY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ENCODER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAY_HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    proxy_id: str
    model_key: str
    timeout: float
    messages: bytes
    items: _containers.RepeatedCompositeFieldContainer[ItemSlot]
    sampling: _common_pb2.SamplingParams
    salt: str
    resume: Resume
    template: TemplateOptions
    prompt: RawPrompt
    encoder_prompt: _common_pb2.EncoderPrompt
    transcription: _common_pb2.Transcription
    label: str
    traceparent: str
    tracestate: str
    pooling: Pooling
    tenant: str
    may_hand_over: bool
    adapter: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., proxy_id: _Optional[str] = ..., model_key: _Optional[str] = ..., timeout: _Optional[float] = ..., messages: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[ItemSlot, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., salt: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., template: _Optional[_Union[TemplateOptions, _Mapping]] = ..., prompt: _Optional[_Union[RawPrompt, _Mapping]] = ..., encoder_prompt: _Optional[_Union[_common_pb2.EncoderPrompt, _Mapping]] = ..., transcription: _Optional[_Union[_common_pb2.Transcription, _Mapping]] = ..., label: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., tenant: _Optional[str] = ..., may_hand_over: _Optional[bool] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("task", "method", "normalize", "dimensions", "query")
    class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TASK_EMBED: _ClassVar[Pooling.Task]
        TASK_SCORE: _ClassVar[Pooling.Task]
        TASK_TOKEN_EMBED: _ClassVar[Pooling.Task]
    TASK_EMBED: Pooling.Task
    TASK_SCORE: Pooling.Task
    TASK_TOKEN_EMBED: Pooling.Task
    TASK_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    task: Pooling.Task
    method: str
    normalize: bool
    dimensions: int
    query: bytes
    def __init__(self, task: _Optional[_Union[Pooling.Task, str]] = ..., method: _Optional[str] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., query: _Optional[bytes] = ...) -> None: ...

class TemplateOptions(_message.Message):
    __slots__ = ("tools", "variables", "no_generation_prompt", "continue_final_message")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    NO_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    tools: bytes
    variables: bytes
    no_generation_prompt: bool
    continue_final_message: bool
    def __init__(self, tools: _Optional[bytes] = ..., variables: _Optional[bytes] = ..., no_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class RawPrompt(_message.Message):
    __slots__ = ("text", "token_ids", "unmodified")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    UNMODIFIED_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _common_pb2.TokenIds
    unmodified: bool
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., unmodified: _Optional[bool] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("messages", "template", "prompt", "tenant")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    messages: bytes
    template: TemplateOptions
    prompt: RawPrompt
    tenant: str
    def __init__(self, messages: _Optional[bytes] = ..., template: _Optional[_Union[TemplateOptions, _Mapping]] = ..., prompt: _Optional[_Union[RawPrompt, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class TokenizeReply(_message.Message):
    __slots__ = ("token_ids", "max_model_len", "error")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    error: _common_pb2.Error
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens", "tenant")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    tenant: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., tenant: _Optional[str] = ...) -> None: ...

class DetokenizeReply(_message.Message):
    __slots__ = ("text", "error")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    text: str
    error: _common_pb2.Error
    def __init__(self, text: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("status", "error")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_QUEUED: _ClassVar[SubmitReply.Status]
        STATUS_ADMITTED: _ClassVar[SubmitReply.Status]
        STATUS_REFUSED: _ClassVar[SubmitReply.Status]
    STATUS_QUEUED: SubmitReply.Status
    STATUS_ADMITTED: SubmitReply.Status
    STATUS_REFUSED: SubmitReply.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    status: SubmitReply.Status
    error: _common_pb2.Error
    def __init__(self, status: _Optional[_Union[SubmitReply.Status, str]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class ItemsNotice(_message.Message):
    __slots__ = ("proxy_id", "mm_hashes", "sources")
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    MM_HASHES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    proxy_id: str
    mm_hashes: _containers.RepeatedScalarFieldContainer[str]
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.EmbeddingSource]
    def __init__(self, proxy_id: _Optional[str] = ..., mm_hashes: _Optional[_Iterable[str]] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.EmbeddingSource, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("proxy_id", "request_ids")
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    proxy_id: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, proxy_id: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("proxy_id", "paused", "resumed")
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    proxy_id: str
    paused: _containers.RepeatedScalarFieldContainer[str]
    resumed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, proxy_id: _Optional[str] = ..., paused: _Optional[_Iterable[str]] = ..., resumed: _Optional[_Iterable[str]] = ...) -> None: ...

class SetApartRequest(_message.Message):
    __slots__ = ("proxy_id", "request_id", "tokens")
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    proxy_id: str
    request_id: str
    tokens: int
    def __init__(self, proxy_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class SetApartReply(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("proxy_id", "requests", "round", "named_before", "reads_step_tokens")
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NAMED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    READS_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    proxy_id: str
    requests: _containers.RepeatedCompositeFieldContainer[Reattach]
    round: str
    named_before: int
    reads_step_tokens: bool
    def __init__(self, proxy_id: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[Reattach, _Mapping]]] = ..., round: _Optional[str] = ..., named_before: _Optional[int] = ..., reads_step_tokens: _Optional[bool] = ...) -> None: ...

class Reattach(_message.Message):
    __slots__ = ("request_id", "attempt", "position")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    position: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class StepEvents(_message.Message):
    __slots__ = ("events", "beat", "tokens")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    beat: Beat
    tokens: StepTokens
    def __init__(self, events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., tokens: _Optional[_Union[StepTokens, _Mapping]] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("request_ids", "attempts", "positions", "texts", "token_ids", "counts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("count", "patience", "load")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    count: int
    patience: float
    load: PDLoad
    def __init__(self, count: _Optional[int] = ..., patience: _Optional[float] = ..., load: _Optional[_Union[PDLoad, _Mapping]] = ...) -> None: ...

class PDLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "cache_usage", "generated_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    cache_usage: float
    generated_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., cache_usage: _Optional[float] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "admitted", "item_loaded", "item_missing", "tokens", "finished", "lost", "proxy_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ITEM_LOADED_FIELD_NUMBER: _ClassVar[int]
    ITEM_MISSING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    PROXY_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    admitted: Admitted
    item_loaded: ItemLoaded
    item_missing: ItemMissing
    tokens: Tokens
    finished: Finished
    lost: Lost
    proxy_id: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., item_loaded: _Optional[_Union[ItemLoaded, _Mapping]] = ..., item_missing: _Optional[_Union[ItemMissing, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., proxy_id: _Optional[str] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("prompt_token_ids", "placements", "encoder_prompt_token_ids", "timestamps", "reasoning", "tool_format", "frames")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    placements: _containers.RepeatedCompositeFieldContainer[ItemPlacement]
    encoder_prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    timestamps: TimestampTokens
    reasoning: ReasoningMarkers
    tool_format: str
    frames: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., placements: _Optional[_Iterable[_Union[ItemPlacement, _Mapping]]] = ..., encoder_prompt_token_ids: _Optional[_Iterable[int]] = ..., timestamps: _Optional[_Union[TimestampTokens, _Mapping]] = ..., reasoning: _Optional[_Union[ReasoningMarkers, _Mapping]] = ..., tool_format: _Optional[str] = ..., frames: _Optional[_Iterable[int]] = ...) -> None: ...

class ReasoningMarkers(_message.Message):
    __slots__ = ("start", "end", "label", "begun")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    start: str
    end: str
    label: str
    begun: bool
    def __init__(self, start: _Optional[str] = ..., end: _Optional[str] = ..., label: _Optional[str] = ..., begun: _Optional[bool] = ...) -> None: ...

class TimestampTokens(_message.Message):
    __slots__ = ("first", "seconds")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    first: int
    seconds: float
    def __init__(self, first: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ItemLoaded(_message.Message):
    __slots__ = ("mm_hash", "seconds", "path")
    MM_HASH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    mm_hash: str
    seconds: float
    path: str
    def __init__(self, mm_hash: _Optional[str] = ..., seconds: _Optional[float] = ..., path: _Optional[str] = ...) -> None: ...

class ItemMissing(_message.Message):
    __slots__ = ("mm_hash", "damaged_digest")
    MM_HASH_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    mm_hash: str
    damaged_digest: str
    def __init__(self, mm_hash: _Optional[str] = ..., damaged_digest: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("position", "token_ids", "text", "logprobs", "offered", "kv", "cached_tokens")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    offered: bool
    kv: KVHandOff
    cached_tokens: int
    def __init__(self, position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., offered: _Optional[bool] = ..., kv: _Optional[_Union[KVHandOff, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "error", "prompt_tokens", "completion_tokens", "cached_tokens", "queue_seconds", "load_seconds", "prefill_seconds", "decode_seconds", "stop_sequence", "pooled", "work_seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    WORK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    error: _common_pb2.Error
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    stop_sequence: str
    pooled: bytes
    work_seconds: float
    def __init__(self, reason: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., stop_sequence: _Optional[str] = ..., pooled: _Optional[bytes] = ..., work_seconds: _Optional[float] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KVHandOff(_message.Message):
    __slots__ = ("params", "seconds")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    params: bytes
    seconds: float
    def __init__(self, params: _Optional[bytes] = ..., seconds: _Optional[float] = ...) -> None: ...
