"""A certificate with its key and CA, read from files and tried out before anything is served with it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from triptych.base.config.tls import TlsFiles
from triptych.base.errors import ConfigError

#: Larger files are no certificates.
_MAX_BYTES = 1 << 20
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_END = b"-----END CERTIFICATE-----"
#: Keys that gRPC's BoringSSL speaks, by the object identifiers in a certificate: RSA, ECDSA P-256 and P-384.
#: OpenSSL takes others, too, with which every gRPC connection would fail.
_KEY_KINDS = tuple(
    bytes.fromhex(oid) for oid in ("06092a864886f70d010101", "06082a8648ce3d030107", "06052b81040022")
)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificate chain, key and CA as PEM, which fit together; `context` is for connections without gRPC."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    #: DNS name of all services; "" for a front door.
    name: str
    #: When the certificate expires, in seconds since 1970.
    not_after: float
    #: Of a server over HTTP, or of a client of the store.
    context: ssl.SSLContext


def read_material(files: TlsFiles) -> TlsMaterial:
    """The content of the files; ConfigError, which names the flag, when they could not be served with."""
    cert, key, ca = _read(files)
    try:
        context = _server_context(files)
    except (ssl.SSLError, ValueError) as error:
        # Never the parser's own words alone: they name neither file.
        raise ConfigError(
            f"{files.flags[0]} {files.cert} and {files.flags[1]} {files.key} are no certificate and its key, "
            f"both PEM, the key without a password ({_reason(error)})"
        ) from None
    if _BEGIN not in cert or _END not in cert:
        raise ConfigError(f"{files.flags[0]} {files.cert} holds no plain PEM certificate")
    if not any(kind in ssl.PEM_cert_to_DER_cert(_leaf(cert)) for kind in _KEY_KINDS):
        raise ConfigError(
            f"{files.flags[0]} {files.cert} has a key that gRPC does not speak: use ECDSA P-256, P-384 or RSA"
        )
    not_after = _tried(files, cert, ca)
    if _read(files) != (cert, key, ca):
        raise ConfigError(f"{files.flags[0]} {files.cert} changes while it is read: try again")
    return TlsMaterial(cert, key, ca, files.name, not_after, context)


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes]:
    contents = [b"", b"", b""]
    for index, (flag, path) in enumerate(files.named):
        if not path:
            continue
        try:
            with Path(path).open("rb") as file:
                contents[index] = file.read(_MAX_BYTES)
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
    return contents[0], contents[1], contents[2]


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    # A password that is none, in place of OpenSSL's question at the terminal.
    context.load_cert_chain(files.cert, files.key, password="")
    return context


def _tried(files: TlsFiles, cert: bytes, ca: bytes) -> float:
    """When the certificate expires, by a handshake with itself in memory, as a server and as a client.

    So one that is expired, of another CA, without the name or not for both uses is found here, and not by
    the processes that connect.
    """
    server, client = _server_context(files), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if files.ca:
            for context in (server, client):
                context.load_verify_locations(cadata=ca.decode("ascii"))
            server.verify_mode = ssl.CERT_REQUIRED
            client.load_cert_chain(files.cert, files.key, password="")
        else:  # a front door's certificate is its clients' to judge, but for its time
            client.check_hostname = False
            client.load_verify_locations(cadata=_leaf(cert))
    except (ssl.SSLError, ValueError) as error:
        flag, path = (files.flags[2], files.ca) if files.ca else (files.flags[0], files.cert)
        raise ConfigError(
            f"{flag} {path} holds no PEM certificate that can be read ({_reason(error)})"
        ) from None
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    try:
        return _handshake(server, client, files.name)
    except ssl.SSLError as error:
        raise ConfigError(f"{files.flags[0]} {files.cert} cannot be used: {_reason(error)}") from None


def _leaf(cert: bytes) -> str:
    """The first certificate of a chain, as PEM."""
    begin = cert.index(_BEGIN)
    return cert[begin : cert.index(_END, begin) + len(_END)].decode("ascii") + "\n"


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> float:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=name or None)
    waiting = [theirs, ours]
    for _ in range(20):
        for side in tuple(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            break
    shown = theirs.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return str(getattr(error, "reason", None) or type(error).__name__).replace("_", " ").lower()
