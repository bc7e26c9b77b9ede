"""gRPC's server reflection: what grpcurl and other clients read in place of the .proto files."""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from triptych.protos import common_pb2, proxy_pb2

METHOD = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
#: The longest message of a reflection call, whose reply repeats it, and seconds that one may take to come:
#: clients leave the call open, and one that needs it again makes a new one.
MAX_BYTES = 16 << 10
IDLE_SECONDS = 2.0


def add_reflection(server: aio.Server) -> None:
    """Serves the descriptors of what clients may call; the workers' services are not among them."""
    pool = DescriptorPool()
    for module in (common_pb2, proxy_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    services = [proxy_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    names = [service.full_name for file in services for service in file.services_by_name.values()]
    reflection.enable_server_reflection(names, server, pool=pool)
