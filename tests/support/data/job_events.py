"""Events of encoder jobs, as a proxy's requests get them."""

from __future__ import annotations

from triptych.base.errors import RequestError
from triptych.base.types import ItemPlan
from triptych.protos import job_events
from triptych.protos.convert import plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady, JobWaits


def of_job(key: str, event: EncodeEvent, address: str = "") -> EncodeEvent:
    """The event as one of this item's job."""
    told = EncodeEvent(mm_hash=key, address=address)
    told.MergeFrom(event)
    return told


def job_waits(key: str, origin: str = "encoded") -> EncodeEvent:
    return EncodeEvent(mm_hash=key, waits=JobWaits(origin=origin))


def job_planned(key: str, plan: ItemPlan, address: str = "") -> EncodeEvent:
    return of_job(key, job_events.planned(plan), address)


def job_ready(
    key: str,
    plan: ItemPlan,
    *,
    already_stored: bool = False,
    preprocess: float = 0.0,
    encode: float = 0.0,
    save: float = 0.0,
    address: str = "",
) -> EncodeEvent:
    ready = ItemReady(
        plan=plan_to_proto(plan),
        already_stored=already_stored,
        preprocess_seconds=preprocess,
        encode_seconds=encode,
        save_seconds=save,
    )
    return EncodeEvent(mm_hash=key, address=address, ready=ready)


def job_failed(key: str, error: RequestError, *, retryable: bool = False, address: str = "") -> EncodeEvent:
    return of_job(key, job_events.failed(error, retryable=retryable), address)
