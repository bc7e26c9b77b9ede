"""What the jobs of one worker have in common: the format of their plans, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.models.base import PreparedItem
from triptych.types import ItemPlan


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Hard bounds of the worker; the proxy's credit keeps well below them.

    Jobs before their plan are bounded by credit. Planned ones hold little and wait for admission, which
    may need further plans: refusing those would leave half-planned requests waiting for each other.
    """

    unplanned_jobs: int
    jobs: int = 16384
    waiters_per_job: int = 256
    #: The tower pauses while saves of this many bytes are under way.
    saving_bytes: int = 256 << 20
    look_up_seconds: float = 1.0
    save_retry_seconds: float = 0.5


@dataclass(frozen=True, slots=True)
class ItemFormat:
    """What this worker's plans have in common."""

    namespace: str
    modality: str
    width: int
    dtype: str

    def plan(self, mm_hash: str, prepared: PreparedItem) -> ItemPlan:
        """The plan of a preprocessed item."""
        return ItemPlan(
            mm_hash=mm_hash,
            namespace=self.namespace,
            modality=self.modality,
            rows=prepared.rows,
            width=self.width,
            dtype=self.dtype,
            length=prepared.length,
            runs=prepared.runs,
            grid_thw=prepared.grid_thw,
        )
