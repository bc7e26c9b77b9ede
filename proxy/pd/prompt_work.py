"""Work of prompts at PD workers: what requests ask of them, what a prompt costs, and what waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from triptych.proxy.encoders.arrivals import ArrivedItems, Outstanding
from triptych.proxy.encoders.work_model import WorkModel
from triptych.proxy.events import WorkerEvent, served
from triptych.proxy.ports import PDLoadReport


@dataclass(frozen=True, slots=True)
class PDWork:
    """What one proxy's requests ask of the PD workers now.

    Of the requests `in_flight`, `unplaced` ones are at no worker. `kv_usage` is the number of whole KV caches
    that they fill. `prompts` are those not prefilled yet; their sizes are tokens.
    """

    in_flight: int = 0
    unplaced: int = 0
    kv_usage: float = 0.0
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
        self.arrived = ArrivedItems()

    def observe(self, request: HasPrompt, event: WorkerEvent, kind: str, now: float) -> None:
        """An event of a request at a worker of this kind, before the request has it."""
        if event.attempt != request.attempt:
            return
        if served(event) and not request.took_over:
            self.model.learn(event.finished.prompt_tokens, event.finished.work_seconds, kind)
        elif event.HasField("admitted") and request.prompt_token_ids is None:
            self.arrived.count(len(event.admitted.prompt_token_ids), now)


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


def kv_share(in_flight: int, report: PDLoadReport | None) -> float:
    """The fraction of a worker's KV cache that `in_flight` of its requests use, an equal share for each.

    0 for a worker with a single request: no further worker would share it.
    """
    if report is None or (requests := max(report.running + report.waiting, in_flight)) <= 1:
        return 0.0
    return report.kv_usage * in_flight / requests
