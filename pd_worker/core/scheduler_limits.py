"""What bounds a step, and what is left of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.pd_worker.core.outputs import Projection, ScheduledChunk

#: Rows whose projection costs about as much as one token of prefill: two of a layer's sixteen or so squares.
_ROWS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """From PDConfig; `max_num_batched_tokens` is the token budget of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def prefill_cap(self) -> int:
        """Prefill tokens of a step while text decodes: half the budget, so that tokens keep coming."""
        return max(1, self.max_num_batched_tokens // 2)


@dataclass(slots=True)
class Latencies:
    """Seconds that metrics have not seen yet."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Budget:
    """Tokens left in this step."""

    tokens: int
    prefill: int
    prefilling: bool = False

    def take(self, chunk: ScheduledChunk) -> None:
        self.tokens -= chunk.count

    def take_prefill(self, chunk: ScheduledChunk) -> None:
        self.tokens -= chunk.count
        self.prefill -= chunk.count
        self.prefilling = True

    def take_projection(self, projection: Projection) -> None:
        """A projection enters whole, also where it costs more than is left."""
        cost = -(-projection.rows // _ROWS_PER_TOKEN)
        self.tokens = max(0, self.tokens - cost)
        self.prefill -= cost

    @property
    def for_prefill(self) -> int:
        return max(0, min(self.tokens, self.prefill))
