"""The parameters of an encoder job, and the format of all embeddings of one encoder worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.base.types import ItemPlan
from triptych.models.base import PreparedItem
from triptych.store.codec import check_plan


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The parameters of a stream's job; see `EncodeJob` in the proto. `timeout` is in seconds."""

    job_id: str
    request_id: str
    mm_hash: str
    namespace: str
    modality: str
    processor_options: Mapping[str, object]
    salt: str
    media_bytes: int
    timeout: float
    failed_lease_token: str = ""
    damaged_digest: str = ""
    re_encode: bool = False
    label: str = ""
    direct: bool = False
    #: The digest of the tenant; empty where no keys are in use, and from older proxies.
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ItemFormat:
    """The fields that all plans of this worker share."""

    namespace: str
    modality: str
    width: int
    dtype: str
    #: Of int8: scales of a row.
    scales: int = 0

    @property
    def modalities(self) -> tuple[str, ...]:
        """Those of the jobs that this worker takes: who encodes pictures is asked about the others, too."""
        return ("image", "video", "audio") if self.modality == "image" else (self.modality,)

    def plan(self, mm_hash: str, prepared: PreparedItem) -> ItemPlan:
        """The plan of a preprocessed item; InvalidRequest for one that cannot be stored."""
        plan = ItemPlan(
            mm_hash=mm_hash,
            namespace=self.namespace,
            modality=prepared.modality or self.modality,
            rows=prepared.rows,
            width=self.width,
            dtype=self.dtype,
            length=prepared.length,
            runs=prepared.runs,
            grid_thw=prepared.grid_thw,
            layout=prepared.layout,
            scales=self.scales,
        )
        check_plan(plan)
        return plan
