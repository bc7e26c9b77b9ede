"""Which PD worker gets which request, in virtual time: `proxy/pd/router.py` with its real choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.errors import Overloaded, RequestError
from triptych.proxy.requests.lifecycle import Submit
from triptych.proxy.routing import PDLoad, PrefixAffinity, choose_pd
from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.flow import Flow
from triptych.simulator.cluster.pd import SimulatedPD

#: As in the worker: requests that it takes beside those that run.
MAX_WAITING = 1024


class Router:
    """Hands requests over. PD workers neither fail nor end, so none waits for one."""

    def __init__(
        self,
        clock: Clock,
        workers: Sequence[SimulatedPD],
        *,
        rpc: float,
        max_num_seqs: int,
        max_requests: int,
        accepted: Callable[[Flow, int], None],
        refused: Callable[[Flow, int, RequestError], None],
    ) -> None:
        self.workers = {f"pd-{index}": worker for index, worker in enumerate(workers)}
        self._clock = clock
        self._rpc = rpc
        self._max_num_seqs = max_num_seqs
        self._max_requests = max_requests
        self._accepted = accepted
        self._refused = refused
        self._in_flight = dict.fromkeys(self.workers, 0)
        self._affinity = PrefixAffinity()

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    def submit(self, flow: Flow, order: Submit) -> None:
        loads = [PDLoad(name, count, self._max_num_seqs) for name, count in self._in_flight.items()]
        address = choose_pd(loads, flow.request.chain, self._affinity)
        assert address is not None, "there is always a worker"
        flow.address, flow.in_flight = address, True
        self._in_flight[address] += 1
        self._clock.after(self._rpc, self._take, flow, order, address)

    def _take(self, flow: Flow, order: Submit, address: str) -> None:
        """At the worker. A request that has ended meanwhile has its cancellation right behind it."""
        worker = self.workers[address]

        def answer(error: RequestError | None) -> None:
            self._clock.after(self._rpc, self._answered, flow, order.attempt, address, error)

        if worker.held >= self._max_requests:
            answer(Overloaded("too many requests wait for this worker", retry_after=1.0))
        else:
            worker.submit(flow.request, order.attempt, order.ready, flow.deadline + self._rpc, answer)

    def _answered(self, flow: Flow, attempt: int, address: str, error: RequestError | None) -> None:
        if error is not None:
            self._refused(flow, attempt, error)
        elif not flow.lifecycle.ended:
            self._affinity.record(flow.request.chain, address)
            self._accepted(flow, attempt)

    def notify(self, flow: Flow, mm_hashes: tuple[str, ...]) -> None:
        """These items are in the store."""
        self._clock.after(self._rpc, self.workers[flow.address].items_ready, mm_hashes)

    def release(self, flow: Flow, *, cancel: bool) -> None:
        """The request's attempt is over."""
        if not flow.in_flight:
            return
        flow.in_flight = False
        self._in_flight[flow.address] -= 1
        if cancel:
            self._clock.after(self._rpc, self.workers[flow.address].cancel, flow.name)
