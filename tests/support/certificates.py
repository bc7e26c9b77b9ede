"""Certificates of made-up CAs, as files that TLS flags name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from triptych.base.config import ServiceConfig, TlsFiles

#: The name that all services' certificates carry.
NAME = ServiceConfig().tls_name


def pem_of(*authorities: trustme.CA) -> bytes:
    """A bundle of CA certificates."""
    return b"".join(one.cert_pem.bytes() for one in authorities)


def issue(authority: trustme.CA, *names: str, days: float = 30.0, age: float = 1.0) -> tuple[bytes, bytes]:
    """(certificate, key) that began `age` days ago and ends in `days`."""
    now = datetime.now(UTC)
    made = authority.issue_cert(
        *(names or (NAME,)), not_before=now - timedelta(days=age), not_after=now + timedelta(days=days)
    )
    return b"".join(one.bytes() for one in made.cert_chain_pems), made.private_key_pem.bytes()


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the file in one step, as Kubernetes and certificate managers do."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(content)
    os.replace(scratch, path)


@dataclass(frozen=True, slots=True)
class CertificateFolder:
    """The folder of one service: tls.crt, tls.key and ca.crt, as cert-manager writes them."""

    path: Path

    @property
    def cert(self) -> Path:
        return self.path / "tls.crt"

    @property
    def key(self) -> Path:
        return self.path / "tls.key"

    @property
    def ca(self) -> Path:
        return self.path / "ca.crt"

    def write(self, pair: tuple[bytes, bytes], ca: bytes = b"") -> CertificateFolder:
        """Replaces all of the files."""
        self.path.mkdir(parents=True, exist_ok=True)
        for file, content in ((self.ca, ca), (self.cert, pair[0]), (self.key, pair[1])):
            replace_file(file, content)
        return self

    @property
    def internal(self) -> TlsFiles:
        """As --tls-cert-file and its like name them."""
        return TlsFiles(str(self.cert), str(self.key), str(self.ca), NAME)

    @property
    def front_door(self) -> TlsFiles:
        """As --http-cert-file and --http-key-file name them."""
        return TlsFiles(str(self.cert), str(self.key), flags=("--http-cert-file", "--http-key-file"))

    @property
    def flags(self) -> list[str]:
        """The flags of mutual TLS between services."""
        files = self.internal
        return [word for flag, path in files.named for word in (flag, path)]

    @property
    def front_flags(self) -> list[str]:
        return [word for flag, path in self.front_door.named for word in (flag, path)]
