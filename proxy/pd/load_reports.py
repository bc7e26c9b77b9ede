"""What a PD worker says of its load, with every beat of its stream."""

from __future__ import annotations

from triptych.protos import pd_pb2
from triptych.proxy.ports import PDLoadReport

#: A report that is older says nothing of now: a worker sends one every second.
FRESH_SECONDS = 10.0


class LoadReports:
    """The newest load report of one worker, updated at every beat of its stream."""

    def __init__(self) -> None:
        self._report: PDLoadReport | None = None
        self._at = 0.0
        self._tokens = 0

    def observe(self, beat: pd_pb2.Beat, now: float) -> None:
        """One beat; one without a load is of a worker of an earlier release."""
        if not beat.HasField("load"):
            return
        load, seconds = beat.load, now - self._at
        # Fewer tokens than before are those of a process that was restarted.
        tokens = load.generated_tokens - self._tokens
        known = self._report is not None and seconds > 0 and tokens >= 0
        self._report = PDLoadReport(
            running=load.running,
            waiting=load.waiting,
            kv_usage=_share(load.kv_usage),
            cache_usage=_share(load.cache_usage),
            tokens_per_second=tokens / seconds if known else 0.0,
        )
        self._at, self._tokens = now, load.generated_tokens

    def latest(self, now: float) -> PDLoadReport | None:
        return self._report if now - self._at < FRESH_SECONDS else None


def _share(value: float) -> float:
    """Between 0 and 1, whatever a worker sends; 0 for NaN."""
    return min(max(value, 0.0), 1.0) if value == value else 0.0
