"""How many processes of which kind a cluster on one machine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Either encoders and PD workers, or replicas that are both."""

    encoders: int = 0
    pd_workers: int = 0
    replicas: int = 0

    @property
    def workers(self) -> int:
        """Processes that hold a model."""
        return self.encoders + self.pd_workers + self.replicas

    @property
    def encoding(self) -> int:
        """Processes with a tower; as many registrations of the encoder pool."""
        return self.encoders + self.replicas

    @property
    def decoding(self) -> int:
        """Processes with a decoder; as many registrations of the PD pool."""
        return self.pd_workers + self.replicas


def shape_of(values: Mapping[str, Any]) -> ClusterShape:
    """The shape that the flags --topology, --replicas, --encoders and --pd-workers ask for."""
    if values["topology"] == "colocated":
        return ClusterShape(replicas=values["replicas"])
    return ClusterShape(encoders=values["encoders"], pd_workers=values["pd_workers"])
