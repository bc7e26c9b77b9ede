"""Events of a PD worker's stream as the proxy delivers them."""

from __future__ import annotations

from typing import Any

from triptych.protos import common_pb2, pd_pb2
from triptych.proxy.pd.wire import deliver


class Events:
    """Keeps what is delivered; tokens of the request "broken" raise."""

    def __init__(self, *with_logprobs: str) -> None:
        self.with_logprobs = set(with_logprobs)
        self.calls: list[tuple[str, ...]] = []
        self.logprobs: dict[str, int] = {}

    def tokens(self, request_id: str, *args: Any) -> None:
        if request_id == "broken":
            raise ValueError("no such position")
        self.logprobs[request_id] = len(args[-1])
        self.calls.append(("tokens", request_id))

    def lost(self, request_id: str, attempt: int, *, back_off: bool = False) -> None:
        self.calls.append(("back off" if back_off else "lost", request_id))

    def __getattr__(self, name: str) -> Any:
        return lambda request_id, *_: self.calls.append((name, request_id))


def tokens(request_id: str) -> pd_pb2.RequestEvent:
    logprobs = [common_pb2.PositionLogprobs()]
    return pd_pb2.RequestEvent(
        request_id=request_id, attempt=1, tokens=pd_pb2.Tokens(token_ids=[5], text="t", logprobs=logprobs)
    )


def ended(request_id: str, reason: str, code: str = "") -> pd_pb2.RequestEvent:
    error = common_pb2.Error(code=code, message="no") if code else None
    return pd_pb2.RequestEvent(
        request_id=request_id, attempt=1, finished=pd_pb2.Finished(reason=reason, error=error)
    )


def delivered(events: Events, *step: pd_pb2.RequestEvent) -> list[tuple[str, ...]]:
    deliver(step, events)  # type: ignore[arg-type]
    return events.calls


def test_log_probabilities_are_read_only_for_requests_that_asked() -> None:
    events = Events("asked")
    delivered(events, tokens("asked"), tokens("not"))
    assert events.logprobs == {"asked": 1, "not": 0}


def test_an_event_that_makes_no_sense_fails_its_request_alone() -> None:
    assert delivered(Events(), tokens("broken"), tokens("well")) == [("failed", "broken"), ("tokens", "well")]


def test_an_end_without_an_answer_goes_on_elsewhere_unless_the_request_is_at_fault() -> None:
    ends = [ended("a", "abort"), ended("u", "error", "unavailable"), ended("i", "error", "invalid_request")]
    assert delivered(Events(), *ends) == [("back off", "a"), ("back off", "u"), ("refused", "i")]


def test_an_answers_end_is_finished() -> None:
    assert delivered(Events(), ended("r", "stop")) == [("finished", "r")]
