"""Conversion of protobuf messages of encoder jobs to this worker's types and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.base.hashing import canonical, check_mm_hash
from triptych.encoder_worker.job_spec import ItemFormat, JobSpec
from triptych.encoder_worker.jobs.job import Failed, JobEvent, MediaWanted, Planned, Ready, Waits
from triptych.encoder_worker.media.formats import MAX_MEDIA_BYTES
from triptych.protos import encoder_pb2
from triptych.protos.convert import error_to_proto, plan_to_proto

#: Longest timeout of a job in seconds.
MAX_TIMEOUT = 3600.0
_MAX_OPTIONS_CHARS = 64 << 10
#: Longest fields that are stored or logged unchanged.
_MAX_CHARS = {"job_id": 512, "request_id": 256, "label": 256, "salt": 1024, "failed_lease_token": 256}
_DIGEST = re.compile(r"([0-9a-f]{40})?")


def parse_job(job: encoder_pb2.EncodeJob, format: ItemFormat) -> JobSpec:
    """The job, checked against what this worker encodes; InvalidRequest naming the field."""
    if job.namespace != format.namespace:
        raise InvalidRequest("namespace: not the one that this worker encodes for", param="namespace")
    if job.modality != format.modality:
        raise InvalidRequest(f"modality: this worker encodes {format.modality!r} only", param="modality")
    if job.media_bytes < 1:
        raise InvalidRequest("media_bytes: the item has no media", param="media_bytes")
    if job.media_bytes > MAX_MEDIA_BYTES:
        raise TooLarge(f"media_bytes: more than {MAX_MEDIA_BYTES} bytes", param="media_bytes")
    if not job.timeout > 0:
        raise InvalidRequest("timeout: seconds that the job may take, above 0", param="timeout")
    if not _DIGEST.fullmatch(job.damaged_digest):
        raise InvalidRequest("damaged_digest: 40 lower-case hex characters", param="damaged_digest")
    for field, limit in _MAX_CHARS.items():
        if len(getattr(job, field)) > limit:
            raise InvalidRequest(f"{field}: more than {limit} characters", param=field)
    return JobSpec(
        job_id=job.job_id,
        request_id=job.request_id,
        label=job.label,
        mm_hash=check_mm_hash(job.mm_hash),
        namespace=job.namespace,
        modality=job.modality,
        processor_options=_options(job.processor_options),
        salt=job.salt,
        media_bytes=job.media_bytes,
        timeout=min(job.timeout, MAX_TIMEOUT),
        failed_lease_token=job.failed_lease_token,
        damaged_digest=job.damaged_digest,
        re_encode=job.re_encode,
    )


def _options(text: str) -> Mapping[str, object]:
    error = InvalidRequest("processor_options: a small JSON object of options", param="processor_options")
    if len(text) > _MAX_OPTIONS_CHARS:
        raise error
    try:
        options = json.loads(text or "{}")
        if not isinstance(options, dict):
            raise error
        canonical(options)  # raises for what cannot be hashed: huge numbers, lone surrogates, deep nesting
    except (ValueError, OverflowError, RecursionError):
        raise error from None
    return options


def event_message(event: JobEvent) -> encoder_pb2.EncodeEvent:
    """The event as a protobuf message."""
    match event:
        case Planned(plan):
            return encoder_pb2.EncodeEvent(planned=plan_to_proto(plan))
        case Waits():
            return encoder_pb2.EncodeEvent(waits=encoder_pb2.JobWaits())
        case MediaWanted():
            return encoder_pb2.EncodeEvent(need_media=encoder_pb2.NeedMedia())
        case Ready(plan, already_stored, timings):
            ready = encoder_pb2.ItemReady(
                plan=plan_to_proto(plan),
                already_stored=already_stored,
                queue_seconds=timings.queue,
                preprocess_seconds=timings.preprocess,
                encode_seconds=timings.encode,
                save_seconds=timings.save,
                work_seconds=timings.work,
            )
            return encoder_pb2.EncodeEvent(ready=ready)
        case Failed(error, retryable, owner_address, owner_token):
            failed = encoder_pb2.JobFailed(
                error=error_to_proto(error),
                retryable=retryable,
                owner_address=owner_address,
                owner_token=owner_token,
            )
            return encoder_pb2.EncodeEvent(failed=failed)
