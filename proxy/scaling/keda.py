"""KEDA's external-push scaler: a gRPC service that answers with the autoscaler's decision.

It has a port of its own, without keys and without the internal token, since KEDA sends neither: who reaches
it can read two small numbers and nothing else. With certificates it serves by TLS, and asks its clients for
none: KEDA's are its own. Any proxy answers for the cluster, as decisions are shared.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
from grpc import aio

from triptych.base.errors import ConfigError
from triptych.base.rpc.channels import listen, make_server
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.scaling import POOLS, SCALED_ROLES, ScalingDecision, ScalingTarget
from triptych.protos import externalscaler_pb2 as messages
from triptych.protos import externalscaler_pb2_grpc

logger = logging.getLogger(__name__)

#: Streams open at once: KEDA's operator has one for each ScaledObject.
MAX_STREAMS = 64
#: Workers for one unit of the metric: the HPA's ceil(sum / target) is then the decision itself.
TARGET = 1
_STOP_SECONDS = 1.0
#: Everybody may connect, so that a client may cost little.
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.max_concurrent_streams", 2 * MAX_STREAMS),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.max_allowed_incoming_connections", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.server.max_pending_requests", 128),
    ("grpc.server.max_pending_requests_hard_limit", 256),
]
Context = aio.ServicerContext[Any, Any]


class Decisions(Protocol):
    """The decisions in force for the whole cluster, as the autoscaler has them."""

    @property
    def targets(self) -> list[str]:
        """The names of what is scaled."""

    def decision(self, pool: str) -> ScalingDecision | None:
        """How many workers this target should have; None while nothing is in force."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """`listener` is called in the event loop when a decision has changed."""


class KedaScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """KEDA's four calls. What is not known is UNAVAILABLE: KEDA's `fallback` holds then, no wrong number."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._changed = asyncio.Event()
        self._closed = False
        self._streams = 0
        decisions.subscribe(self._wake)

    async def IsActive(
        self, request: messages.ScaledObjectRef, context: Context
    ) -> messages.IsActiveResponse:
        decision = await self._known(await _target_of(request, context), context)
        return messages.IsActiveResponse(result=decision.active)

    async def StreamIsActive(
        self, request: messages.ScaledObjectRef, context: Context
    ) -> AsyncIterator[messages.IsActiveResponse]:
        target = await _target_of(request, context)
        if self._streams >= MAX_STREAMS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_STREAMS} streams are open already: close some, or poll IsActive",
            )
        self._streams += 1
        try:
            shown: bool | None = None
            # A stream stays open while nothing is known, and ends without an error: KEDA waits up to a minute
            # before it opens the next one after errors, and 2 s after an end.
            while not self._closed:
                changed = self._changed
                decision = self._decisions.decision(target.name)
                if decision is not None and decision.active is not shown:
                    shown = decision.active
                    yield messages.IsActiveResponse(result=shown)
                else:
                    await changed.wait()
        finally:
            self._streams -= 1

    async def GetMetricSpec(
        self, request: messages.ScaledObjectRef, context: Context
    ) -> messages.GetMetricSpecResponse:
        name = metric_name(await _target_of(request, context))
        spec = messages.MetricSpec(metricName=name, targetSize=TARGET, targetSizeFloat=TARGET)
        return messages.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self, request: messages.GetMetricsRequest, context: Context
    ) -> messages.GetMetricsResponse:
        target = await _target_of(request.scaledObjectRef, context)
        name = metric_name(target)
        if request.metricName not in ("", name):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"metricName {request.metricName[:80]!r} is not known: the metric of {target.name} is {name}",
            )
        workers = (await self._known(target, context)).workers
        # Both fields: 0 is read from the first one, and older operators know no other.
        value = messages.MetricValue(metricName=name, metricValue=workers, metricValueFloat=workers)
        return messages.GetMetricsResponse(metricValues=[value])

    def close(self) -> None:
        """Ends all streams, which KEDA opens again at another proxy."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _known(self, target: ScalingTarget, context: Context) -> ScalingDecision:
        decision = self._decisions.decision(target.name)
        if decision is None:
            scaled = ", ".join(self._decisions.targets[:8]) or "nothing"
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"no decision about {target.name[:200]} is in force: the proxy has just started, the store "
                f"is down, or it is not scaled ({scaled[:600]} is, see --scale)",
            )
        assert decision is not None, "abort does not return"
        return decision


def metric_name(target: ScalingTarget) -> str:
    """The external metric of a target, how many workers it should have: lower-case letters, digits, "-"."""
    more = "-".join(filter(None, (target.model, target.kind, target.role)))
    if not more:
        return f"triptych-{target.pool}-workers"
    # Names that differ in other characters only, or late, are told apart by their digest.
    digest = hashlib.sha256(target.name.encode()).hexdigest()[:8]
    short = re.sub("[^a-z0-9]+", "-", more.lower()).strip("-")[:40].strip("-")
    return f"triptych-{target.pool}-{short}-{digest}-workers"


async def _target_of(request: messages.ScaledObjectRef, context: Context) -> ScalingTarget:
    """The target that the trigger's metadata name; all other keys are KEDA's own, or notes."""
    given = {key: str(request.scalerMetadata.get(key, "")) for key in ("pool", "model", "kind", "role")}
    pool, role = given["pool"], given["role"]
    if pool not in POOLS:
        said = f"pool {pool[:80]!r} is not known" if pool else "the trigger's metadata have no `pool`"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{said}: set pool to {' or '.join(POOLS)}")
    if role and role not in SCALED_ROLES:
        said = f"role {role[:80]!r} is not known: set role to {' or '.join(SCALED_ROLES)}, or leave it out"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
    return ScalingTarget(**given)


class ScalerServer:
    """The gRPC server of KEDA's scaler. `port` is the one that it listens on once started."""

    def __init__(self, decisions: Decisions, certificates: Certificates | None = None) -> None:
        self._certificates = certificates
        self._scaler = KedaScaler(decisions)
        self._server = make_server(options=_OPTIONS)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(self._scaler, self._server)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens; ConfigError where the port is taken."""
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = listen(self._server, place, self._certificates, mutual=False)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {place}: --scaler-port picks another port, --scaler-host another address"
            ) from None
        await self._server.start()
        logger.info("KEDA's scaler is at grpc %s:%d", host, self.port)

    async def stop(self) -> None:
        """Ends the streams without an error, then the server."""
        self._scaler.close()
        await self._server.stop(_STOP_SECONDS)
