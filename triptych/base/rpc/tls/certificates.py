"""The certificate of a service, which is read again when its files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from triptych.base.config.service import ServiceConfig
from triptych.base.config.tls import TlsFiles, internal_tls
from triptych.base.rpc.tls.material import TlsMaterial, read_material

logger = logging.getLogger(__name__)

#: Between two looks at the files.
LOOK_SECONDS = 1.0
#: Files that could not be used are tried again after so long: their time may not have begun.
RETRY_SECONDS = 30.0

_Signature = tuple[tuple[int, int, int], ...]


class Certificates:
    """The newest usable content of TLS files; may be asked by any thread, at every handshake.

    Files that are gone, half written or do not fit together change nothing, and are logged once.
    """

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._tried = _signature(files)
        self._material = read_material(files)
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
        found = _signature(self._files)
        again = self._retry_at is not None and now >= self._retry_at
        if found == self._tried and not again:
            return
        known, self._tried = found == self._tried, found
        try:
            self._material = read_material(self._files)
        except Exception as error:  # whatever it is: gRPC is in the middle of a handshake
            self._retry_at = now + RETRY_SECONDS
            if not known:
                logger.error("the certificate stays as it was: %s", error)
            return
        self._retry_at = None
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._material.not_after))
        logger.info("%s %s is in use from now on, until %s", self._files.flags[0], self._files.cert, until)


def internal_certificates(config: ServiceConfig) -> Certificates | None:
    """The certificates of gRPC between services; None without TLS. ConfigError for unusable files."""
    files = internal_tls(config)
    return None if files is None else Certificates(files)


def _signature(files: TlsFiles) -> _Signature:
    """Changes when a file does."""
    return tuple(_stamp(path) for _, path in files.named if path)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)
