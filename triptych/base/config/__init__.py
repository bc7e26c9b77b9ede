"""The configuration of every service: a frozen dataclass whose fields are command-line options."""

from triptych.base.config.access import (
    check_advertise,
    check_bind,
    check_front_door,
    is_loopback,
    is_on_this_machine,
    read_internal_token,
)
from triptych.base.config.cluster import (
    ClusterConfig,
    DoctorConfig,
    ServeConfig,
    WorkerCounts,
    WorkerRange,
    check_scaled,
    parse_workers,
)
from triptych.base.config.memory import (
    CPU_SHARE,
    CUDA_CONTEXT_BYTES,
    CUDA_SHARE,
    EMBEDDING_MEMORY,
    GIB,
    MIB,
    format_size,
    parse_size,
)
from triptych.base.config.proxy import ProxyConfig, ScalingConfig, check_scaling, check_times
from triptych.base.config.service import ServiceConfig, check_drain_timeout
from triptych.base.config.tls import (
    TlsFiles,
    check_front_encryption,
    check_worker_encryption,
    front_door_tls,
    internal_tls,
    with_tls_of,
)
from triptych.base.config.worker import ColocatedConfig, EncoderConfig, PDConfig, WorkerConfig

__all__ = [
    "CPU_SHARE",
    "CUDA_CONTEXT_BYTES",
    "CUDA_SHARE",
    "ClusterConfig",
    "WorkerCounts",
    "ColocatedConfig",
    "DoctorConfig",
    "EMBEDDING_MEMORY",
    "EncoderConfig",
    "GIB",
    "MIB",
    "PDConfig",
    "ProxyConfig",
    "ScalingConfig",
    "ServeConfig",
    "ServiceConfig",
    "TlsFiles",
    "WorkerConfig",
    "WorkerRange",
    "check_advertise",
    "check_bind",
    "check_drain_timeout",
    "check_front_door",
    "check_front_encryption",
    "check_scaled",
    "check_scaling",
    "check_times",
    "check_worker_encryption",
    "format_size",
    "front_door_tls",
    "internal_tls",
    "is_loopback",
    "is_on_this_machine",
    "parse_size",
    "parse_workers",
    "read_internal_token",
    "with_tls_of",
]
