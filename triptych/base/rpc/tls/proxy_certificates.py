"""The certificates of a proxy: those of its calls to workers, and those of its front door."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from triptych.base.config import (
    ProxyConfig,
    check_front_encryption,
    front_door_tls,
    internal_tls,
    is_loopback,
)
from triptych.base.metrics import show_expiry
from triptych.base.rpc.tls.certificates import Certificates, internal_certificates
from triptych.base.rpc.tls.material import read_material

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProxyCertificates:
    """Certificates of calls to workers, and of the HTTP and gRPC ports; None where there is no TLS."""

    internal: Certificates | None
    front_door: Certificates | None

    @classmethod
    def of(cls, config: ProxyConfig) -> ProxyCertificates:
        """As the flags say. ConfigError for unusable files, and for clear text that nobody asked for."""
        check_front_encryption(config)
        files = front_door_tls(config)
        if files is None and not is_loopback(config.host):
            keys = "API keys, " if config.api_key or config.api_key_file else ""
            logger.warning("--insecure: %sprompts and answers come to %s in clear text", keys, config.host)
        front_door = None if files is None else Certificates(files)
        return cls(internal_certificates(config), front_door)

    def show_expiry(self, registry: CollectorRegistry) -> None:
        """Adds the metric of when they expire."""
        show_expiry(registry, internal=self.internal, front_door=self.front_door)


def check_certificates(proxy: ProxyConfig) -> None:
    """ConfigError for TLS files that cannot be used, or a front door in clear text that nobody asked for."""
    check_front_encryption(proxy)
    for files in (internal_tls(proxy), front_door_tls(proxy)):
        if files is not None:
            read_material(files)
