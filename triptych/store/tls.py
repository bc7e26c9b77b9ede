"""TLS to the store: the files that a connection needs, and the SSL context made of them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Connection

from triptych.base.config.tls import TlsFiles
from triptych.base.errors import ConfigError
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.material import TlsMaterial

_FLAGS = ("--store-cert-file", "--store-key-file", "--store-ca-file")


@dataclass(frozen=True, slots=True)
class StoreTls:
    """The PEM files of TLS to the store, empty where none is given: then the system's CAs count."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    #: The name in the server's certificate; empty: the host's.
    name: str = ""

    def context(self) -> ssl.SSLContext:
        """The context for a new connection, which follows the files; ConfigError when it cannot be made."""
        if (used := _used.get(self)) is None:
            files = TlsFiles(self.cert_file, self.key_file, self.ca_file, flags=_FLAGS)
            used = _used[self] = Certificates(files, read=_client_material)
        return used.current().context


#: The certificates of each set of files.
_used: dict[StoreTls, Certificates] = {}


def _client_material(files: TlsFiles) -> TlsMaterial:
    (cert_flag, cert), (key_flag, key), (ca_flag, ca) = files.named
    if ca:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with _named(ca_flag, ca, "certificates of CAs as PEM"):
            context.load_verify_locations(cafile=ca)
    else:
        context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert:
        with _named(cert_flag, cert, "a certificate as PEM"):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=cert)
        with _named(key_flag, key, f"the key of {cert_flag} as PEM, unencrypted"):
            # Without a password, OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(cert, key, password="")
    return TlsMaterial(b"", b"", b"", "", 0.0, context)


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


class TlsConnection(Connection):
    """redis-py's connection over TLS, whose files are read again when they were renewed.

    asyncio verifies the host's name, as the context demands.
    """

    def __init__(self, *, tls: StoreTls, **options: Any) -> None:
        self._tls = tls
        super().__init__(**options)

    def _connection_arguments(self) -> Mapping[str, object]:
        return {**super()._connection_arguments(), "ssl": self._tls.context()}
