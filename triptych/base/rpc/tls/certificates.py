"""Certificates of a service, which are read again when their files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych.base.config.proxy import ProxyConfig
from triptych.base.config.service import ServiceConfig
from triptych.base.config.tls import TlsFiles, check_front_encryption, front_door_tls, internal_tls
from triptych.base.rpc.tls.material import TlsMaterial, read_material

logger = logging.getLogger(__name__)

#: Between two looks at the files.
LOOK_SECONDS = 1.0
#: Files that could not be used are tried again after so long: their time may not have begun.
RETRY_SECONDS = 30.0

_Signature = tuple[tuple[int, int, int], ...]


class Certificates:
    """The newest usable content of TLS files, of servers and clients; any thread may ask, at every handshake.

    Files that are gone, half written or do not fit together change nothing, and are logged once.
    """

    def __init__(
        self,
        files: TlsFiles,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[TlsFiles], TlsMaterial] = read_material,
    ) -> None:
        self._files = files
        self._clock = clock
        self._read = read
        self._lock = threading.Lock()
        self._tried = _signature(files)
        self._material = read(files)
        self._look_at = clock() + LOOK_SECONDS
        #: When files that could not be used are tried again; None where they could be used.
        self._retry_at: float | None = None

    def current(self) -> TlsMaterial:
        """What new connections are made with. Never raises."""
        if self._clock() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._material

    def not_after(self) -> float:
        """When the certificate expires, in seconds since 1970."""
        return self.current().not_after

    def _look(self) -> None:
        now = self._clock()
        self._look_at = now + LOOK_SECONDS
        signature = _signature(self._files)
        again = self._retry_at is not None and now >= self._retry_at
        if signature == self._tried and not again:
            return
        known, self._tried = signature == self._tried, signature
        try:
            self._material = self._read(self._files)
        except Exception as error:  # whatever it is: gRPC is in the middle of a handshake
            self._retry_at = now + RETRY_SECONDS
            if not known:
                logger.error("the certificate stays as it was: %s", error)
            return
        self._retry_at = None
        named = ", ".join(f"{flag} {path}" for flag, path in self._files.named if path)
        logger.info("in use from now on as they are now: %s", named)


def internal_certificates(config: ServiceConfig) -> Certificates | None:
    """The certificates of gRPC between services; None without TLS. ConfigError for unusable files."""
    files = internal_tls(config)
    return None if files is None else Certificates(files)


@dataclass(frozen=True, slots=True)
class ProxyCertificates:
    """Those of a proxy's calls to workers, and of its HTTP and gRPC ports; None where there is no TLS."""

    internal: Certificates | None
    front_door: Certificates | None


def proxy_certificates(config: ProxyConfig) -> ProxyCertificates:
    """As the flags say. ConfigError for unusable files, and for clear text that nobody asked for."""
    check_front_encryption(config)
    files = front_door_tls(config)
    return ProxyCertificates(internal_certificates(config), None if files is None else Certificates(files))


def _signature(files: TlsFiles) -> _Signature:
    """Changes when a file does."""
    return tuple(_stamp(path) for _, path in files.named if path)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_mtime_ns, status.st_size)
