"""One request in flight: its state machine and what the client has seen of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.goodput.load.record import RequestRecord
from triptych.proxy.requests.lifecycle import Lifecycle
from triptych.simulator.cluster.clock import Timer
from triptych.simulator.cluster.requests import Request


@dataclass(slots=True)
class Flow:
    """Times are moments of the clock; `deadline` is the request's own, the client may go earlier."""

    request: Request
    planned: float
    sent: float
    deadline: float
    warm_up: bool
    lifecycle: Lifecycle
    timer: Timer | None = None
    #: The PD worker that has it.
    address: str = ""
    in_flight: bool = False
    looked_up: float = 0.0
    #: Where each item's embedding came from.
    origins: dict[str, str] = field(default_factory=dict)
    #: When the client had each token.
    tokens: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.request.name

    def record(self, now: float, error: str = "") -> RequestRecord:
        """What the load generator writes down. A failure counts none of its tokens."""
        tokens = [] if error else self.tokens
        timings = self.lifecycle.timings
        features = self.request.features
        stages = {name: getattr(timings, name) for name in ("fetch", "queue", "load", "prefill", "decode")}
        stages |= {"encode": timings.encode, "save": timings.save}
        return RequestRecord(
            index=self.request.index,
            planned=self.planned,
            sent=self.sent,
            images=len(features),
            ttft=(tokens[0] if tokens else now) - self.sent,
            e2e=(tokens[-1] if tokens else now) - self.sent,
            itls=tuple(b - a for a, b in zip(tokens, tokens[1:], strict=False)),
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=len(tokens),
            asked_tokens=self.request.output_tokens,
            error=error,
            stages={} if error else stages,
            caches=tuple(self.origins.get(feature.mm_hash, "store") for feature in features),
            warm_up=self.warm_up,
        )
