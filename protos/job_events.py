"""Events of encoder jobs: the protocol's own messages, which the state machines of both sides take."""

from __future__ import annotations

from triptych.base.errors import RequestError
from triptych.base.types import ItemPlan
from triptych.protos.convert import error_to_proto, plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, JobFailed, JobWaits, NeedMedia

WAITS = EncodeEvent(waits=JobWaits())
NEED_MEDIA = EncodeEvent(need_media=NeedMedia())


def planned(plan: ItemPlan) -> EncodeEvent:
    return EncodeEvent(planned=plan_to_proto(plan))


def failed(
    error: RequestError, *, retryable: bool, owner_address: str = "", owner_token: str = ""
) -> EncodeEvent:
    """The end of a job, or of a try, without an embedding; `owner_*`: the holder of the item's lease."""
    end = JobFailed(
        error=error_to_proto(error),
        retryable=retryable,
        owner_address=owner_address,
        owner_token=owner_token,
    )
    return EncodeEvent(failed=end)
