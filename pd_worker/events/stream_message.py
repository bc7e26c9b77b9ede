"""Message of a stream: what is new in a step for one proxy."""

from __future__ import annotations

from array import array

from triptych.protos import pd_pb2


class StreamMessage:
    """A StepEvents whose tokens are lists: a message for each request's tokens costs ten times as much."""

    def __init__(self) -> None:
        self.events: list[pd_pb2.RequestEvent] = []
        self._request_ids: list[str] = []
        self._attempts: list[int] = []
        self._positions: list[int] = []
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._counts: list[int] = []

    def add_tokens(
        self, request_id: str, attempt: int, position: int, token_ids: array[int], text: str
    ) -> None:
        """New output of one request, at most once for each."""
        self._request_ids.append(request_id)
        self._attempts.append(attempt)
        self._positions.append(position)
        self._texts.append(text)
        self._token_ids += token_ids
        self._counts.append(len(token_ids))

    def to_proto(self, beat: pd_pb2.Beat | None) -> pd_pb2.StepEvents | None:
        """The message; None where there is nothing to say."""
        if not self._request_ids:
            return pd_pb2.StepEvents(events=self.events, beat=beat) if self.events or beat else None
        one_each = len(self._token_ids) == len(self._counts) and 0 not in self._counts
        tokens = pd_pb2.StepTokens(
            request_ids=self._request_ids,
            attempts=self._attempts,
            positions=self._positions,
            texts=self._texts,
            token_ids=self._token_ids,
            counts=() if one_each else self._counts,
        )
        return pd_pb2.StepEvents(events=self.events, beat=beat, tokens=tokens)
