"""TLS to the store: the files that a connection needs, and the SSL context made of them."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Connection

from triptych.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: Modification time, size and inode of each file: a renewed file, or a link set anew, has another.
_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class StoreTls:
    """The PEM files of TLS to the store, empty where none is given: then the system's CAs count."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def context(self) -> ssl.SSLContext:
        """The context for a new connection, of the files as they are now; ConfigError when it cannot be made.

        Files renewed wrongly (half written, or a key of another certificate) are logged once, and the context
        made before stays in use.
        """
        stamp = tuple(_stamp(path) for path in (self.ca_file, self.cert_file, self.key_file) if path)
        made = _made.get(self)
        if made is not None and made[0] == stamp:
            return made[1]
        try:
            context = self._new_context()
        except ConfigError as error:
            if made is None:
                raise
            logger.error("%s; new connections to the store use the files as they were before", error)
            context = made[1]
        _made[self] = (stamp, context)
        return context

    def _new_context(self) -> ssl.SSLContext:
        if self.ca_file:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            with _named("--store-ca-file", self.ca_file, "certificates of CAs as PEM"):
                context.load_verify_locations(cafile=self.ca_file)
        else:
            context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert_file:
            with _named("--store-cert-file", self.cert_file, "a certificate as PEM"):
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=self.cert_file)
            with _named(
                "--store-key-file", self.key_file, "the key of --store-cert-file as PEM, unencrypted"
            ):
                # Without a password, OpenSSL would ask the terminal for that of an encrypted key.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        return context


#: The newest context of each set of files, with their stamp.
_made: dict[StoreTls, tuple[_Stamp, ssl.SSLContext]] = {}


@contextmanager
def _named(flag: str, path: str, what: str) -> Iterator[None]:
    """Turns the errors of a file into a ConfigError with its flag."""
    try:
        yield
    # SSLError is an OSError too.
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{flag} {path} must hold {what}") from None
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class TlsConnection(Connection):
    """redis-py's connection over TLS, whose files are read again when they were renewed.

    asyncio verifies the host's name, as the context demands.
    """

    def __init__(self, *, tls: StoreTls, **options: Any) -> None:
        self._tls = tls
        super().__init__(**options)

    def _connection_arguments(self) -> Mapping[str, object]:
        return {**super()._connection_arguments(), "ssl": self._tls.context()}
