"""Pooled requests: prompts without generation, whose hidden states become one vector or one score."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.types import FinishReason
from triptych.pd_worker.core.sampling import ResolvedSampling


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a request's hidden states are pooled, without gaps.

    With `scores` the last token's logits give the score; `score_ids` as in `PoolingDefaults`. Else `method`
    gives a vector, of which `dimensions` elements are left (0: all), with a length of 1 if `normalize`.
    """

    method: str = "last"
    normalize: bool = True
    dimensions: int = 0
    scores: bool = False
    score_ids: tuple[int, ...] = ()

    @property
    def reads_all_rows(self) -> bool:
        """Whether hidden states before the last one count: the KV cache does not keep them."""
        return not self.scores and self.method != "last"


#: Of requests that sample nothing here.
NO_SAMPLING = ResolvedSampling(
    max_tokens=1,
    min_tokens=0,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    seed=0,
    stop=(),
    stop_token_ids=frozenset(),
    ignore_eos=False,
    eos_token_ids=(),
)


class NoText:
    """The output of a request whose tokens are not detokenized here, or that has none."""

    finished: FinishReason | None = None
    stop_sequence = ""

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        raise NotImplementedError("the request puts out no text here")

    def flush(self) -> str:
        return ""
