"""Which requests may have ended their PD workers, and which one of them runs alone, and where. Pure.

Suspects of one model run one at a time, alone on a worker; there a request is cleared after its prefill and
some tokens, or is the reason for the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych.proxy.routing import LossRecord, PDLoad

#: Output tokens of its own, alone, after which a suspect is cleared.
CLEARING_TOKENS = 8


@dataclass(slots=True)
class _Trial:
    request_id: str
    address: str
    #: Whether the worker has confirmed that it holds nothing else.
    alone: bool = False
    #: Output tokens that clear the request.
    clearing_at: int = 0


class Suspects:
    """The requests of one proxy that were running on a PD worker when it died.

    `model_key`: of the request's model; workers with the same one can take each other's requests.
    """

    def __init__(self) -> None:
        self._losses: dict[str, LossRecord] = {}
        self._trials: dict[str, _Trial] = {}
        #: Where the last suspect of each model ran.
        self._last: dict[str, str] = {}

    @property
    def apart(self) -> frozenset[str]:
        """Addresses of workers that take no other requests."""
        return frozenset(trial.address for trial in self._trials.values())

    def suspect(self, request_id: str) -> bool:
        """Whether the request may only run alone."""
        record = self._losses.get(request_id)
        return record is not None and record.suspect

    def on_trial(self, request_id: str) -> bool:
        """Whether it has, or is being given, a worker of its own."""
        return self._trial(request_id) is not None

    def lost(self, address: str, incarnation: str, requests: Iterable[str], *, final: bool) -> list[str]:
        """A worker is lost with these requests. Returns those that ended it: they were alone there."""
        guilty = []
        for request_id in requests:
            trial = self._trial(request_id)
            record = self._losses.setdefault(request_id, LossRecord())
            if record.add(address, incarnation, alone=trial is not None and trial.alone, final=final):
                guilty.append(request_id)
        for request_id in guilty:
            self.forget(request_id)
        return guilty

    def returned(self, incarnation: str) -> None:
        """The process never ended, only its connection was lost: no request is suspected for that."""
        for request_id, record in list(self._losses.items()):
            record.withdraw(incarnation)
            if not record:
                del self._losses[request_id]

    def place(self, request_id: str, model_key: str, workers: Sequence[PDLoad]) -> str | None:
        """The worker to set apart for a suspect; None while another one is tried, or none can take it."""
        if model_key in self._trials or not workers:
            return None
        known = self._losses.get(request_id, LossRecord()).addresses
        last = self._last.get(model_key)
        best = min(
            workers, key=lambda w: (w.address in known, w.address != last, w.in_flight, w.address)
        ).address
        self._trials[model_key] = _Trial(request_id, best)
        self._last[model_key] = best
        return best

    def alone(self, request_id: str, tokens: int) -> None:
        """Its worker holds nothing else; `tokens`: output tokens that the request has already."""
        if trial := self._trial(request_id):
            trial.alone, trial.clearing_at = True, tokens + CLEARING_TOKENS

    def progress(self, request_id: str, tokens: int) -> bool:
        """The request has so many output tokens. Whether that cleared it: its losses count no more."""
        trial = self._trial(request_id)
        if trial is None or not trial.alone or tokens < trial.clearing_at:
            return False
        self.forget(request_id)
        return True

    def retreat(self, request_id: str) -> bool:
        """Its attempt is over without a loss: it stays a suspect. Whether it had a worker of its own."""
        for model_key, trial in list(self._trials.items()):
            if trial.request_id == request_id:
                del self._trials[model_key]
                return True
        return False

    def forget(self, request_id: str) -> bool:
        """It has ended, or is cleared. Whether it had a worker of its own."""
        self._losses.pop(request_id, None)
        return self.retreat(request_id)

    def _trial(self, request_id: str) -> _Trial | None:
        return next((trial for trial in self._trials.values() if trial.request_id == request_id), None)
