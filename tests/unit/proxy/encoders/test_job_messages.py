"""What an encoder is told of a job: its tenant by a digest, which older encoders pass over."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from triptych.base.hashing import tenant_digest
from triptych.base.metrics import ProxyMetrics
from triptych.protos import common_pb2, encoder_pb2
from triptych.proxy.encoders.job import ItemSource
from triptych.proxy.encoders.job_runner import JobRunner


class Transport:
    """Keeps the messages of jobs, whose streams say nothing."""

    def __init__(self) -> None:
        self.sent: list[encoder_pb2.EncodeJob] = []

    def open_job(self, address: str, job: encoder_pb2.EncodeJob, *_: object) -> Any:
        self.sent.append(job)
        return SimpleNamespace(result=asyncio.Event().wait, media_sent=False)


@pytest.mark.parametrize("tenant", ["alice", ""])
async def test_a_job_carries_the_digest_of_its_tenant_and_not_its_name(tenant: str) -> None:
    info = SimpleNamespace(address="e", namespaces=("n",), capacity={}, cost_kind="")
    pool: Any = SimpleNamespace(
        unbound=Counter(),
        encoded_by=lambda _, model: model,
        proxies=1,
        reads_direct=False,
        reaching=lambda _: [SimpleNamespace(info=info)],
    )
    media: Any = SimpleNamespace(nbytes=1, retain=lambda: None, release=lambda: None)
    transport, events = Transport(), SimpleNamespace(deliver=lambda *_: None)
    runner = JobRunner(pool, ProxyMetrics(), transport, events, lambda: 0.0)  # type: ignore[arg-type]
    runner.start(ItemSource("k", "n", "image", media, "", "", "r", "", 9.0, 0.0, tenant))
    await runner.close()
    (job,) = transport.sent
    assert job.tenant == tenant_digest(tenant)
    assert len(job.tenant) == (16 if tenant else 0)


def older() -> Any:
    """The message as releases have it that know no tenants."""
    pool, file = descriptor_pool.DescriptorPool(), descriptor_pb2.FileDescriptorProto()
    common = descriptor_pb2.FileDescriptorProto()
    common_pb2.DESCRIPTOR.CopyToProto(common)
    pool.Add(common)
    encoder_pb2.DESCRIPTOR.CopyToProto(file)
    (job,) = (message for message in file.message_type if message.name == "EncodeJob")
    (field,) = (field for field in job.field if field.name == "tenant")
    job.field.remove(field)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("triptych.v1.EncodeJob"))


def test_an_older_encoder_reads_a_job_with_a_tenant_and_a_newer_one_a_job_without() -> None:
    job = encoder_pb2.EncodeJob(job_id="j", media_bytes=5, direct=True, tenant=tenant_digest("alice"))
    read = older().FromString(job.SerializeToString())
    assert (read.job_id, read.media_bytes, read.direct) == ("j", 5, True)
    assert not hasattr(read, "tenant")
    sent = older()(job_id="j", media_bytes=5, direct=True).SerializeToString()
    assert encoder_pb2.EncodeJob.FromString(sent).tenant == ""
