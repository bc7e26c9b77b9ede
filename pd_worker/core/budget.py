"""The token budget of a step, and the bounds of prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.pd_worker.core.outputs import Projection, ScheduledChunk
from triptych.pd_worker.core.request import RequestState

#: Encoder rows whose projection costs about as much as one prefill token: keys and values are two of a
#: layer's matrix products, which together have the size of about sixteen of them.
_ROWS_PER_TOKEN = 8


@dataclass(slots=True)
class Budget:
    """Tokens left in this step's budget; `prefill` bounds those of prefill chunks."""

    tokens: int
    prefill: int
    prefilling: bool = False

    def spend_prefill(self, chunk: ScheduledChunk) -> None:
        self.tokens -= chunk.count
        self.prefill -= chunk.count
        self.prefilling = True

    def spend_projection(self, projection: Projection) -> None:
        """Subtracts a projection's cost; it is never split, even where it costs more than is left."""
        cost = -(-projection.rows // _ROWS_PER_TOKEN)
        self.tokens = max(0, self.tokens - cost)
        self.prefill -= cost

    @property
    def for_prefill(self) -> int:
        return max(0, min(self.tokens, self.prefill))

    def prefill_end(self, state: RequestState, start: int, num_tokens: int) -> int:
        """End of a prefill chunk from `start` up to `num_tokens`, by the budget and by atomic spans."""
        end = min(num_tokens, start + self.for_prefill)
        for first, last in state.spans:
            if first < end < last:
                # Decodes must not starve it: the first prefill chunk of a step may exceed the budget.
                whole = start if self.prefilling else last
                end = first if first > start else whole
        return end
