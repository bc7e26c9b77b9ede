"""Work of PD workers: prompts, the seconds that they take, and what requests hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from triptych.base.scaling import ScalingRules, ScalingTarget
from triptych.proxy.encoders.arrivals import Arrivals, Outstanding
from triptych.proxy.encoders.work_model import WorkModel
from triptych.proxy.events import WorkerEvent, served
from triptych.proxy.ports import Link, PDLoadReport
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.workers import KnownWorkers


@dataclass(frozen=True, slots=True)
class PDWork:
    """What one proxy's requests ask of the PD workers now.

    Of the requests `in_flight`, `unplaced` ones are at no worker. `kv_usage` is the number of whole KV caches
    that they fill, `token_usage` the number of workers that they slow down to the seconds that a token may
    take. `prompts` are those not prefilled yet; their sizes are tokens.
    """

    in_flight: int = 0
    unplaced: int = 0
    kv_usage: float = 0.0
    token_usage: float = 0.0
    prompts: Outstanding = field(default_factory=Outstanding)


class HasPrompt(Protocol):
    """A request's latest attempt, and its prompt once a PD worker has admitted it."""

    attempt: int
    #: It goes on where a prefill worker's was, which has computed the prompt.
    took_over: bool
    prompt_token_ids: tuple[int, ...] | None


class PromptWork:
    """Seconds of a prompt by its tokens, for each kind of worker as they report, and the prompts that arrive.

    What a prefix cache gives takes no time: a prompt is expected to find as much there as others have.
    """

    def __init__(self) -> None:
        self.model = WorkModel()
        self.arrived = Arrivals()

    def observe(self, request: HasPrompt, event: WorkerEvent, kind: str, now: float, model: str = "") -> None:
        """An event of a model's request at a worker of this kind, before the request has it."""
        if event.attempt != request.attempt:
            return
        if served(event) and not request.took_over:
            self.model.learn(event.finished.prompt_tokens, event.finished.work_seconds, kind)
        elif event.HasField("admitted") and request.prompt_token_ids is None:
            self.arrived.of(model).count(len(event.admitted.prompt_token_ids), now)


def outstanding_prompts(prompts: Iterable[tuple[int | None, str]]) -> Outstanding:
    """The prompts not prefilled yet: of each its tokens (None: unknown) and its worker ("": none).

    A prompt waits if it has no worker or another prompt is before it there.
    """
    busy = {""}

    def waits(address: str) -> bool:
        is_busy = address in busy
        busy.add(address)
        return is_busy

    return Outstanding.of((tokens, waits(address)) for tokens, address in prompts)


def token_share(in_flight: int, report: PDLoadReport | None, seconds: float) -> float:
    """The part of a token's `seconds` that `in_flight` of a worker's requests use, counted as `kv_share`."""
    if report is None or report.tokens_per_second <= 0.0 or report.running <= 1:
        return 0.0
    requests = max(report.running + report.waiting, in_flight)
    return report.running / report.tokens_per_second / seconds * in_flight / requests


def kv_share(in_flight: int, report: PDLoadReport | None) -> float:
    """The fraction of a worker's KV cache that `in_flight` of its requests use, an equal share for each.

    0 for a worker with a single request: no further worker would share it.
    """
    if report is None or (requests := max(report.running + report.waiting, in_flight)) <= 1:
        return 0.0
    return report.kv_usage * in_flight / requests


def work_of(
    target: ScalingTarget,
    rules: ScalingRules,
    requests: Collection[InFlightRequest],
    waits: Callable[[InFlightRequest], bool],
    links: Mapping[str, Link],
    workers: KnownWorkers,
    now: float,
) -> PDWork:
    """What one proxy's requests ask of the workers that a target counts.

    Where roles are scaled apart, prompts and what waits for a worker ask for prefill workers, and what is
    under way at a decode worker asks for those.
    """
    here = {}
    for address, link in links.items():
        worker = workers.workers.get(("pd", address))
        if worker is not None and target.covers(worker.info.model, worker.role):
            here[address] = link
    own = [request for request in requests if target.model in ("", request.call.model)]
    twice = sum(
        request.pd_address in here
        and request.successor_link is not None
        and request.successor_link.address in here
        for request in own
    )
    at_workers = sum(link.in_flight for link in here.values()) - twice
    kv_usage = sum(kv_share(link.in_flight, link.load(now)) for link in here.values())
    if target.role == "decode":
        late = sum(token_share(link.in_flight, link.load(now), rules.slo) for link in here.values())
        # A worker of its own for each request is as fast as it gets.
        return PDWork(at_workers, 0, kv_usage, min(late, float(at_workers)))
    unplaced = sum(map(waits, own))
    waiting = (request for request in own if request.lifecycle.awaits_prefill)
    prompts = outstanding_prompts((each.lifecycle.prompt_tokens, each.pd_address) for each in waiting)
    return PDWork(at_workers + unplaced, unplaced, kv_usage, 0.0, prompts)
