"""Choice of a PD worker for a request: by model, role, length, store and load, from what is known now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from triptych.proxy.pd.lengths import prompt_tokens, takes
from triptych.proxy.ports import Link
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.routing import PDLoad, PrefixAffinity, choose_pd, of_role, role_for
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.matching import BOTH, DECODE, PREFILL

DEFAULT_SEQS = 64
#: Output tokens that are still to come for which a hand-over is worth its while.
FEWEST_LEFT = 8


class PDChoice:
    """The PD workers that may take a request, and the one that does. `apart` are kept for suspects.

    `threshold`: estimated prompt tokens from which a request goes to a prefill worker, where any is.
    """

    def __init__(
        self,
        pool: KnownWorkers,
        links: Mapping[str, Link],
        affinity: PrefixAffinity,
        apart: Callable[[], Collection[str]],
        clock: Callable[[], float],
        threshold: int,
    ) -> None:
        self._pool = pool
        self._links = links
        self._affinity = affinity
        self._apart = apart
        self._clock = clock
        self._threshold = threshold

    def candidates(self, request: InFlightRequest) -> Sequence[PDLoad]:
        """Workers of its role that can take it; with items those that reach the store, where any does."""
        able = self._able(request)
        if all(load.role == BOTH for load in able):
            return able
        return of_role(able, self._role(request))

    def choose(self, request: InFlightRequest, *, open: bool = False) -> Link | None:
        """The worker for the request; `open`: among those that may get one more now."""
        loads = self.candidates(request)
        if open:
            tenant = request.call.tenant
            loads = [load for load in loads if self._links[load.address].open_to(tenant)]
        return self._best(request, loads)

    def choose_successor(self, request: InFlightRequest) -> Link | None:
        """The worker that takes it over at once from the prefill worker that has it; None where none can."""
        tenant, now = request.call.tenant, self._clock()
        loads = []
        for load in self._able(request, now):
            if load.role == PREFILL or load.address == request.pd_address or not load.has_place:
                continue
            if self._links[load.address].open_to(tenant):
                loads.append(load)
        return self._best(request, [load for load in loads if load.role == DECODE] or loads)

    def may_hand_over(self, request: InFlightRequest, link: Link) -> bool:
        """Whether the worker is a prefill worker, and another one has room to take the request over."""
        workers = self._pool.well("pd")
        if not any(each.role == PREFILL and each.info.address == link.address for each in workers):
            return False
        loads = self._able(request, self._clock()) if worth_while(request) else []
        return any(load.role != PREFILL and load.has_place for load in loads)

    def _best(self, request: InFlightRequest, loads: Sequence[PDLoad]) -> Link | None:
        address = choose_pd(loads, request.content.chain, self._affinity)
        return None if address is None else self._links[address]

    def _role(self, request: InFlightRequest) -> str:
        machine = request.lifecycle
        known = len(machine.prompt_token_ids or ())
        if not known and self._threshold:
            plans = [item.plan for item in machine.items.values()]
            known = prompt_tokens(request.call, [plan.length for plan in plans if plan is not None])
        begun = bool(machine.output_token_ids)
        return role_for(begun=begun, prompt_tokens=known, threshold=self._threshold)

    def _able(self, request: InFlightRequest, now: float | None = None) -> list[PDLoad]:
        if request.content.items and (able := self._loads(request, self._pool.reaching("pd"), now)):
            return able
        return self._loads(request, self._pool.well("pd"), now)

    def _loads(self, request: InFlightRequest, workers: Sequence[Worker], now: float | None) -> list[PDLoad]:
        """Those that take the request; where `now` is given, with what they report of themselves."""
        loads = []
        apart = self._apart()
        for worker in workers:
            info = worker.info
            link = self._links.get(info.address)
            if link is None or not link.attached or link.set_aside:
                continue
            if info.address in request.refused_by or info.address in apart:
                continue
            if not takes(info.capacity.get("max_model_len", 0), request.min_tokens):
                continue
            if request.bound.served_by(info):
                seqs = max(info.capacity.get("max_num_seqs", DEFAULT_SEQS), 1)
                report = None if now is None else link.load(now)
                said = (0, 0.0) if report is None else (report.running + report.waiting, report.kv_usage)
                loads.append(PDLoad(info.address, link.in_flight, seqs, worker.role, *said))
        return loads


def worth_while(request: InFlightRequest) -> bool:
    """Whether so much of the output is still to come that another worker is to take the request over."""
    most = request.call.sampling.max_tokens
    return most is None or most - len(request.lifecycle.output_token_ids) >= FEWEST_LEFT
