from triptych.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("job", "media", "run")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job: EncodeJob
    media: bytes
    run: RunJob
    def __init__(self, job: _Optional[_Union[EncodeJob, _Mapping]] = ..., media: _Optional[bytes] = ..., run: _Optional[_Union[RunJob, _Mapping]] = ...) -> None: ...

class EncodeJob(_message.Message):
    __slots__ = ("job_id", "request_id", "mm_hash", "namespace", "modality", "processor_options", "salt", "media_bytes", "timeout", "failed_lease_token", "damaged_digest", "re_encode", "label", "direct", "tenant", "priority")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MM_HASH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    FAILED_LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RE_ENCODE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    request_id: str
    mm_hash: str
    namespace: str
    modality: str
    processor_options: str
    salt: str
    media_bytes: int
    timeout: float
    failed_lease_token: str
    damaged_digest: str
    re_encode: bool
    label: str
    direct: bool
    tenant: str
    priority: int
    def __init__(self, job_id: _Optional[str] = ..., request_id: _Optional[str] = ..., mm_hash: _Optional[str] = ..., namespace: _Optional[str] = ..., modality: _Optional[str] = ..., processor_options: _Optional[str] = ..., salt: _Optional[str] = ..., media_bytes: _Optional[int] = ..., timeout: _Optional[float] = ..., failed_lease_token: _Optional[str] = ..., damaged_digest: _Optional[str] = ..., re_encode: _Optional[bool] = ..., label: _Optional[str] = ..., direct: _Optional[bool] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class RunJob(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncodeEvent(_message.Message):
    __slots__ = ("planned", "ready", "need_media", "failed", "waits", "mm_hash", "address", "store_epoch", "clock_jumps")
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NEED_MEDIA_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    MM_HASH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLOCK_JUMPS_FIELD_NUMBER: _ClassVar[int]
    planned: _common_pb2.ItemPlan
    ready: ItemReady
    need_media: NeedMedia
    failed: JobFailed
    waits: JobWaits
    mm_hash: str
    address: str
    store_epoch: str
    clock_jumps: int
    def __init__(self, planned: _Optional[_Union[_common_pb2.ItemPlan, _Mapping]] = ..., ready: _Optional[_Union[ItemReady, _Mapping]] = ..., need_media: _Optional[_Union[NeedMedia, _Mapping]] = ..., failed: _Optional[_Union[JobFailed, _Mapping]] = ..., waits: _Optional[_Union[JobWaits, _Mapping]] = ..., mm_hash: _Optional[str] = ..., address: _Optional[str] = ..., store_epoch: _Optional[str] = ..., clock_jumps: _Optional[int] = ...) -> None: ...

class VideoSegments(_message.Message):
    __slots__ = ("ends", "extra_rows", "seconds")
    ENDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    extra_rows: int
    seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ends: _Optional[_Iterable[int]] = ..., extra_rows: _Optional[int] = ..., seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class NeedMedia(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobWaits(_message.Message):
    __slots__ = ("origin",)
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    origin: str
    def __init__(self, origin: _Optional[str] = ...) -> None: ...

class ItemReady(_message.Message):
    __slots__ = ("plan", "already_stored", "queue_seconds", "preprocess_seconds", "encode_seconds", "save_seconds", "work_seconds", "source")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ALREADY_STORED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    plan: _common_pb2.ItemPlan
    already_stored: bool
    queue_seconds: float
    preprocess_seconds: float
    encode_seconds: float
    save_seconds: float
    work_seconds: float
    source: _common_pb2.EmbeddingSource
    def __init__(self, plan: _Optional[_Union[_common_pb2.ItemPlan, _Mapping]] = ..., already_stored: _Optional[bool] = ..., queue_seconds: _Optional[float] = ..., preprocess_seconds: _Optional[float] = ..., encode_seconds: _Optional[float] = ..., save_seconds: _Optional[float] = ..., work_seconds: _Optional[float] = ..., source: _Optional[_Union[_common_pb2.EmbeddingSource, _Mapping]] = ...) -> None: ...

class JobFailed(_message.Message):
    __slots__ = ("error", "retryable", "owner_address", "owner_token")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OWNER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    retryable: bool
    owner_address: str
    owner_token: str
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., retryable: _Optional[bool] = ..., owner_address: _Optional[str] = ..., owner_token: _Optional[str] = ...) -> None: ...
