"""Record of one call: what its waterfall is made of, in flight and afterwards."""

from __future__ import annotations

import msgspec

from triptych.proxy.requests.request import Choices
from triptych.proxy.requests.timeline import RequestTimeline


class CallRecord(msgspec.Struct, frozen=True):
    """`row` names it to everybody, and is empty until a snapshot has shown it; `label` names it to its tenant
    alone. `started` and `ended` are moments of the proxy's clock, `started_at` is the time of day; without
    `ended` and `status` it is in flight."""

    row: str
    label: str
    tenant: str
    model: str
    started_at: float
    started: float
    timeline: RequestTimeline
    choices: int
    prompt_tokens: int
    completion_tokens: int
    ended: float | None = None
    status: int | None = None


def record_of(
    choices: Choices, row: str, model: str, started_at: float, ended: float | None = None
) -> CallRecord:
    """The record of a call as it stands now; it keeps nothing of the call's content."""
    first = choices.first
    return CallRecord(
        row=row,
        label=first.call.label,
        tenant=first.call.tenant,
        model=model,
        started_at=started_at,
        started=choices.started,
        timeline=first.timeline,
        choices=len(choices.requests),
        prompt_tokens=choices.prompt_tokens,
        completion_tokens=choices.completion_tokens,
        ended=ended,
        status=None if ended is None else choices.status,
    )
