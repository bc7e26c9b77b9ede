"""KEDA's scaler over real gRPC, asked with stubs that were compiled apart from ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc import aio

from support.certificates import NAME, CertificateFolder, issue, pem_of
from support.keda.stubs import ScalerStub, message, scaled_object
from support.waiting import until, within
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.scaling import ScalingDecision
from triptych.protos import externalscaler_pb2 as ours
from triptych.proxy.scaling import keda
from triptych.proxy.scaling.keda import ScalerServer

#: As KEDA sends it: every key of the trigger's metadata.
ENCODERS = scaled_object({"pool": "encoder", "scalerAddress": "proxy:8002", "metricType": "AverageValue"})
PD = scaled_object({"pool": "pd"})


class Decisions:
    """Decisions that the test sets."""

    def __init__(self) -> None:
        self.found: dict[str, ScalingDecision] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def targets(self) -> list[str]:
        return list(self.found)

    def decision(self, pool: str) -> ScalingDecision | None:
        return self.found.get(pool)

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def set(self, pool: str, workers: int, *, active: bool) -> None:
        self.found[pool] = ScalingDecision(workers, "flow", active)
        for listener in self._listeners:
            listener()


@pytest.fixture
def decisions() -> Decisions:
    return Decisions()


@pytest.fixture
async def stub(decisions: Decisions) -> AsyncIterator[Any]:
    """KEDA's stub of a scaler's server."""
    server = ScalerServer(decisions)
    await server.start("127.0.0.1", 0)
    async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = ScalerStub(channel)
        stub.server = server
        yield stub
    await server.stop()


def metrics_of(name: str, reference: Any = ENCODERS) -> Any:
    return message("GetMetricsRequest")(scaledObjectRef=reference, metricName=name)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as error:
        await call
    return error.value.code(), str(error.value.details())


async def test_the_metric_is_the_number_of_workers_with_a_target_of_one(
    stub: Any, decisions: Decisions
) -> None:
    decisions.set("encoder", 3, active=True)
    decisions.set("pd", 2, active=False)
    (spec,) = (await stub.GetMetricSpec(ENCODERS)).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (
        "triptych-encoder-workers",
        1,
        1.0,
    )
    (value,) = (await stub.GetMetrics(metrics_of(spec.metricName))).metricValues
    assert (value.metricName, value.metricValue, value.metricValueFloat) == (spec.metricName, 3, 3.0)
    (other,) = (await stub.GetMetrics(metrics_of("", PD))).metricValues
    assert (other.metricName, other.metricValueFloat) == ("triptych-pd-workers", 2.0)
    assert (await stub.IsActive(ENCODERS)).result is True
    assert (await stub.IsActive(PD)).result is False


async def test_while_nothing_is_known_there_is_no_number_but_the_metric_has_its_name(stub: Any) -> None:
    for call in (stub.IsActive(ENCODERS), stub.GetMetrics(metrics_of(""))):
        code, why = await refusal(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "no decision about encoder is in force" in why
    assert (await stub.GetMetricSpec(ENCODERS)).metricSpecs[0].targetSizeFloat == 1.0


@pytest.mark.parametrize("call", ["IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"])
@pytest.mark.parametrize("metadata", [{}, {"pool": "Encoder"}, {"pool": "x" * 10_000}])
async def test_a_pool_that_does_not_exist_is_refused_with_the_names_of_those_that_do(stub, call, metadata):
    request = scaled_object(metadata)
    if call == "GetMetrics":
        request = metrics_of("", request)
    reply = getattr(stub, call)(request)
    code, why = await refusal(anext(aiter(reply)) if call == "StreamIsActive" else reply)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert why.endswith("set pool to encoder or pd")
    assert len(why) < 200


async def test_a_stream_says_what_is_when_it_opens_and_then_every_change_and_nothing_else(
    stub: Any, decisions: Decisions
) -> None:
    decisions.set("encoder", 0, active=False)
    stream = stub.StreamIsActive(ENCODERS)
    assert (await stream.read()).result is False
    decisions.set("pd", 5, active=True)
    decisions.set("encoder", 0, active=False)
    decisions.set("encoder", 1, active=True)
    assert (await stream.read()).result is True
    decisions.set("encoder", 4, active=True)
    decisions.set("encoder", 0, active=False)
    assert (await stream.read()).result is False
    stream.cancel()


async def test_every_stream_gets_the_push_and_those_that_went_away_leave_nothing(
    stub: Any, decisions: Decisions
) -> None:
    decisions.set("encoder", 0, active=False)
    streams = [stub.StreamIsActive(ENCODERS) for _ in range(8)]
    assert [(await stream.read()).result for stream in streams] == [False] * 8
    for stream in streams[:4]:
        stream.cancel()
    await until(lambda: stub.server._scaler._streams == 4, "the end of four streams")
    decisions.set("encoder", 1, active=True)
    assert [(await within("a push", stream.read())).result for stream in streams[4:]] == [True] * 4
    async with aio.insecure_channel(f"127.0.0.1:{stub.server.port}") as channel:
        lost: Any = ScalerStub(channel)
        assert (await lost.StreamIsActive(ENCODERS).read()).result is True
    await until(lambda: stub.server._scaler._streams == 4, "the end of the lost connection's stream")
    for stream in streams[4:]:
        stream.cancel()


async def test_streams_beyond_the_limit_are_refused_and_the_others_go_on(stub, decisions, monkeypatch):
    monkeypatch.setattr(keda, "MAX_STREAMS", 2)
    decisions.set("encoder", 0, active=False)
    streams = [stub.StreamIsActive(ENCODERS) for _ in range(2)]
    for stream in streams:
        await stream.read()
    code, why = await refusal(anext(aiter(stub.StreamIsActive(ENCODERS))))
    assert (code, "poll IsActive" in why) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    decisions.set("encoder", 1, active=True)
    assert [(await stream.read()).result for stream in streams] == [True, True]


async def test_a_proxy_that_leaves_ends_its_streams_without_an_error(stub: Any, decisions: Decisions) -> None:
    """After an error KEDA waits twice as long each time, up to a minute, before it opens a stream again."""
    decisions.set("encoder", 0, active=False)
    streams = [stub.StreamIsActive(ENCODERS), stub.StreamIsActive(PD)]
    await streams[0].read()
    await until(lambda: stub.server._scaler._streams == 2, "both streams")
    await stub.server.stop()
    assert [await within("the end", stream.read()) for stream in streams] == [aio.EOF, aio.EOF]
    assert [await stream.code() for stream in streams] == [grpc.StatusCode.OK] * 2


async def test_with_certificates_the_port_speaks_tls_and_asks_keda_for_none(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = issue(authority, NAME, "triptych-scaler.models.svc")
    folder = CertificateFolder(tmp_path).write(pair, pem_of(authority))
    server = ScalerServer(Decisions(), Certificates(folder.internal))
    await server.start("127.0.0.1", 0)
    try:
        # As KEDA verifies it: by the name that it dials, with the CA of the trigger's `caCert`.
        options = [("grpc.ssl_target_name_override", "triptych-scaler.models.svc")]
        credentials = grpc.ssl_channel_credentials(pem_of(authority))
        place = f"127.0.0.1:{server.port}"
        async with aio.secure_channel(place, credentials, options=options) as channel:
            reply = await ScalerStub(channel).GetMetricSpec(ENCODERS, timeout=10.0)
            assert reply.metricSpecs[0].metricName == "triptych-encoder-workers"
        async with aio.insecure_channel(place) as channel:
            code, _ = await refusal(ScalerStub(channel).GetMetricSpec(ENCODERS, timeout=10.0))
            assert code is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop()


def test_the_wire_has_kedas_numbers() -> None:
    """Bytes written by hand from the contract: key = number * 8 + wire type."""
    assert ours.IsActiveResponse(result=True).SerializeToString() == b"\x08\x01"
    value = ours.MetricValue(metricName="m", metricValue=2, metricValueFloat=1.0)
    one = b"\x00\x00\x00\x00\x00\x00\xf0\x3f"
    assert value.SerializeToString() == b"\x0a\x01m\x10\x02\x19" + one
    spec = ours.MetricSpec(metricName="m", targetSize=1, targetSizeFloat=1.0)
    assert spec.SerializeToString() == b"\x0a\x01m\x10\x01\x19" + one
    reference = ours.ScaledObjectRef(name="a", namespace="b", scalerMetadata={"pool": "pd"})
    wire = b"\x0a\x01a\x12\x01b\x1a\x0a\x0a\x04pool\x12\x02pd"
    assert reference.SerializeToString() == wire
    request = ours.GetMetricsRequest(scaledObjectRef=reference, metricName="m")
    assert request.SerializeToString() == b"\x0a" + bytes([len(wire)]) + wire + b"\x12\x01m"
