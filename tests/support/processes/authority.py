"""A certificate authority, and the files and servers that its certificates are for."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from triptych.store.tls import StoreTls

_LONG_AGO = datetime.now(UTC) - timedelta(days=30)


class Authority:
    """A CA whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca_file = folder / "ca.pem"
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *hosts: str, expired: bool = False) -> tuple[Path, Path]:
        """The files NAME.pem and NAME.key, of a certificate for these hosts; those there are replaced."""
        ended = _LONG_AGO + timedelta(days=1) if expired else None
        made = self._ca.issue_cert(*hosts, not_before=_LONG_AGO if expired else None, not_after=ended)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        key.write_bytes(made.private_key_pem.bytes())
        cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        return cert, key

    def client(self, name: str = "client", *, expired: bool = False) -> StoreTls:
        """The files of a client of this CA."""
        cert, key = self.issue(name, f"{name}@triptych", expired=expired)
        return StoreTls(str(self.ca_file), str(cert), str(key))

    def server(
        self,
        *hosts: str,
        expired: bool = False,
        clients: bool = True,
        version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    ) -> ssl.SSLContext:
        """A server for these hosts, or 127.0.0.1; `clients`: it wants certificates of this CA."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue("server", *(hosts or ("127.0.0.1",)), expired=expired))
        context.maximum_version = version
        if clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca_file)
        return context
