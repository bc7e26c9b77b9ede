"""Events of encoder jobs, as a proxy's requests get them."""

from __future__ import annotations

from triptych.base.errors import RequestError
from triptych.base.types import ItemPlan
from triptych.protos import job_events
from triptych.protos.convert import plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady
from triptych.proxy.events import JobEvent


def job_waits(key: str, origin: str = "encoded") -> JobEvent:
    return JobEvent(key, job_events.WAITS, origin=origin)


def job_planned(key: str, plan: ItemPlan) -> JobEvent:
    return JobEvent(key, job_events.planned(plan))


def job_ready(
    key: str,
    plan: ItemPlan,
    *,
    already_stored: bool = False,
    preprocess: float = 0.0,
    encode: float = 0.0,
    save: float = 0.0,
    address: str = "",
) -> JobEvent:
    ready = ItemReady(
        plan=plan_to_proto(plan),
        already_stored=already_stored,
        preprocess_seconds=preprocess,
        encode_seconds=encode,
        save_seconds=save,
    )
    return JobEvent(key, EncodeEvent(ready=ready), address)


def job_failed(key: str, error: RequestError, *, retryable: bool = False, address: str = "") -> JobEvent:
    return JobEvent(key, job_events.failed(error, retryable=retryable), address)
