"""The events of a request's output."""

from __future__ import annotations

from support.engine.engine_requests import make_request
from triptych.base.types import FinishReason
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.request_events import OutputProcessor


class Holding:
    """An output whose last character may yet be the head of a stop string."""

    finished = None
    stop_sequence = ""

    def __init__(self) -> None:
        self._held = ""

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        text, self._held = self._held, chr(token_id)
        return text, None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def test_the_end_of_a_request_at_the_models_length_has_what_was_held_back() -> None:
    request = make_request("r", 2, max_tokens=9)
    request.output = Holding()
    state, processor = RequestState(request, PrefixChain(b"r", (), (), (), 1)), OutputProcessor(5)
    texts, reasons = [], []
    for token in b"abc":
        event, reason, error = processor.append(state, token, None, 1.0)
        assert event is not None and error is None
        texts.append(event.text)
        reasons.append(reason)
    assert texts == ["", "a", "bc"]
    assert reasons == [None, None, FinishReason.LENGTH]
