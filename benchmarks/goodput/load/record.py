"""What the load generator saw of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times in seconds: `planned` and `sent` since the window's start, the rest since the request was sent.

    `error` is empty for a request that ended as asked. `stages` and `caches` are the server's own
    account, empty where it gives none.
    """

    index: int
    planned: float
    sent: float
    images: int = 0
    ttft: float = math.inf
    e2e: float = math.inf
    itls: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    counted_by: str = "usage"
    error: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)
    caches: tuple[str, ...] = ()
    warm_up: bool = False

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def late(self) -> float:
        """How much later than planned it was sent."""
        return self.sent - self.planned

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 with one token, as vLLM counts it."""
        if self.output_tokens <= 1:
            return 0.0
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    def latencies(self) -> dict[str, float]:
        """Seconds by the names of an SLO; a failure is infinitely late."""
        if not self.ok:
            return dict.fromkeys(("ttft", "tpot", "e2el"), math.inf)
        return {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2e}
