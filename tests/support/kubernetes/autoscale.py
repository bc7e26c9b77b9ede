"""ScaledObjects of a small cluster, followed by KEDA's loops over the address that their trigger names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from grpc import aio

from support.keda.hpa import Behavior
from support.keda.operator import KedaOperator, ScaledObject
from support.kubernetes.cluster import MiniCluster


@dataclass(frozen=True, slots=True)
class DeploymentTarget:
    """A Deployment of the cluster, as its scale subresource."""

    cluster: MiniCluster
    name: str

    @property
    def replicas(self) -> int:
        found = self.cluster.object("Deployment", self.name)
        assert found is not None, f"the ScaledObject names {self.name}, which is no Deployment"
        return int(found["spec"]["replicas"])

    def scale(self, replicas: int) -> None:
        self.cluster.scale("Deployment", self.name, replicas)


def scaled_object_of(manifest: dict[str, Any]) -> ScaledObject:
    """The manifest's fields, without the scaler's address; an error for a trigger of another type."""
    spec = manifest["spec"]
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (up,) = behavior["scaleUp"]["policies"]
    fallback = spec.get("fallback")
    return ScaledObject(
        {name: value for name, value in trigger["metadata"].items() if name != "scalerAddress"},
        least=spec["minReplicaCount"],
        most=spec["maxReplicaCount"],
        polling_interval=spec["pollingInterval"],
        cooldown_period=spec["cooldownPeriod"],
        behavior=Behavior(
            down_stabilization=behavior["scaleDown"]["stabilizationWindowSeconds"],
            up_pods=up["value"],
            up_period=up["periodSeconds"],
        ),
        fallback=fallback["replicas"] if fallback else None,
        failure_threshold=fallback["failureThreshold"] if fallback else 3,
    )


@contextlib.asynccontextmanager
async def keda(cluster: MiniCluster, name: str, speed: float = 1.0) -> AsyncIterator[KedaOperator]:
    """KEDA and the HPA at work on the ScaledObject `name`; their seconds are divided by `speed`."""
    manifest = cluster.object("ScaledObject", name)
    assert manifest is not None, f"there is no ScaledObject {name}"
    place = cluster.resolved(manifest["spec"]["triggers"][0]["metadata"]["scalerAddress"])
    target = DeploymentTarget(cluster, manifest["spec"]["scaleTargetRef"]["name"])
    async with (
        aio.insecure_channel(place) as channel,
        KedaOperator(scaled_object_of(manifest), target, channel, speed).running() as operator,
    ):
        yield operator
