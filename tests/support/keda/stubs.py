"""KEDA's side of the external scaler's contract: messages and calls compiled apart from the product's stubs.

They live in a descriptor pool of their own, since the product's have the same full names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc import aio
from grpc_tools import protoc

_CONTRACT = Path(__file__).with_name("keda_contract.proto")
_SERVICE = "externalscaler.ExternalScaler"


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "contract")
        code = protoc.main(["", f"-I{_CONTRACT.parent}", f"--descriptor_set_out={out}", str(_CONTRACT)])
        assert code == 0, f"{_CONTRACT} does not compile"
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def message(name: str) -> Any:
    """The class of a message of the contract."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"externalscaler.{name}"))


def scaled_object(metadata: Mapping[str, str]) -> Any:
    """What KEDA sends of a ScaledObject: its name and all metadata of the trigger."""
    return message("ScaledObjectRef")(name="encoders", namespace="triptych", scalerMetadata=dict(metadata))


class ScalerStub:
    """The calls of the contract over one channel, by their names."""

    def __init__(self, channel: aio.Channel) -> None:
        service = _pool().FindServiceByName(_SERVICE)
        for method in service.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call: Any = make(
                f"/{_SERVICE}/{method.name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the contract has no call {name}")
