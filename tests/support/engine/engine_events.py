"""Events of a PD worker's engine, as tests read them."""

from __future__ import annotations

from typing import Any

from triptych.base.delta import Delta
from triptych.base.types import FinishReason
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.protos.convert import error_from_proto
from triptych.protos.pd_pb2 import Finished


def kind(event: EngineEvent) -> str:
    """The event's alternative."""
    return "tokens" if isinstance(event, Delta) else event.WhichOneof("body") or ""


class End:
    """The end of a request, as a test reads it: `error` as the worker meant it."""

    def __init__(self, end: Finished) -> None:
        self._end = end
        self.reason = FinishReason(end.reason)
        self.error = error_from_proto(end.error) if end.HasField("error") else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)
