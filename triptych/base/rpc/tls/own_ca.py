"""A CA of one's own in a folder, and the certificate that all services of a try-out share.

Imports cryptography, which only `triptych cert` needs.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from triptych.base.errors import ConfigError

CA, CA_KEY, CERT, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"
_CA_DAYS = 3650
#: Clocks of other machines may be behind.
_EARLIER = timedelta(hours=1)
#: Reached from the machine itself, beside the hosts that are named.
_LOCAL = ("localhost", "127.0.0.1", "::1")


def write_certificates(folder: Path, hosts: list[str], name: str, days: int) -> None:
    """Writes cert.pem and key.pem for these hosts and the services' name, of the CA in the folder.

    A CA that is not there yet is made. ConfigError for what is no host, and for files that cannot be used.
    """
    names = [_general_name(host) for host in dict.fromkeys((name, *hosts, *_LOCAL))]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, authority_key = _authority(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        made = (
            _builder("triptych", key, days, ca=False)
            .issuer_name(authority.subject)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(usage, critical=False)
            .add_extension(issuer, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        # The key last: services notice that it does not fit yet, and look again.
        _write(folder / CERT, made.public_bytes(serialization.Encoding.PEM))
        _write_key(folder / KEY, key)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The CA of the folder, which is made where there is none."""
    if (folder / CA).exists() or (folder / CA_KEY).exists():
        return _read_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        _builder("Triptych's CA", key, _CA_DAYS, ca=True)
        .issuer_name(_subject("Triptych's CA"))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(folder / CA_KEY, key)
    _write(folder / CA, made.public_bytes(serialization.Encoding.PEM))
    return made, key


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        if isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == authority.public_key():
            return authority, key
    except (OSError, ValueError, TypeError):
        pass
    raise ConfigError(
        f"{folder / CA} and {folder / CA_KEY} are no CA of `triptych cert`: name an empty folder"
    )


def _builder(name: str, key: ec.EllipticCurvePrivateKey, days: int, *, ca: bool) -> x509.CertificateBuilder:
    """A certificate of this key, but for its issuer and further extensions."""
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not host or not host.isascii() or set(host) & set(" /:,@"):
            raise ConfigError(f"--host {host!r} is no host name or address that clients use") from None
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form, password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, password))


def _write(path: Path, content: bytes) -> None:
    """Replaces the file in one step; its mode is 0600."""
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(scratch, path)
