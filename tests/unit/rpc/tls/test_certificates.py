"""Certificates: reload, names, and an authority of one's own."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes

from support.certificates import NAME, CertificateFolder, issue, pem_of
from support.clock import Clock
from triptych.base.config import TlsFiles
from triptych.base.errors import ConfigError
from triptych.base.rpc.tls.certificates import LOOK_SECONDS, RETRY_SECONDS, Certificates
from triptych.base.rpc.tls.material import TlsMaterial, read_material
from triptych.base.rpc.tls.own_ca import CA, CA_KEY, CERT, KEY, write_certificates


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def folder(tmp_path: Path, authority: trustme.CA) -> CertificateFolder:
    return CertificateFolder(tmp_path).write(issue(authority), pem_of(authority))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def certificates(folder: CertificateFolder, clock: Clock) -> Certificates:
    return Certificates(folder.internal, clock)


def test_files_that_cannot_be_used_are_refused_at_the_start(folder: CertificateFolder) -> None:
    folder.key.unlink()
    with pytest.raises(ConfigError, match="--tls-key-file"):
        Certificates(folder.internal)


def test_replaced_files_are_in_use_a_second_later(certificates, folder, authority, clock):
    first = certificates.current()
    folder.write(issue(authority, days=300), pem_of(authority))
    assert certificates.current() is first
    clock.now += LOOK_SECONDS
    assert certificates.current().cert == folder.cert.read_bytes()
    assert certificates.not_after() > first.not_after


def test_files_that_are_as_they_were_are_not_read_again(certificates: Certificates, clock: Clock) -> None:
    first = certificates.current()
    clock.now += LOOK_SECONDS
    assert certificates.current() is first


def test_a_certificate_without_its_new_key_changes_nothing_until_that_is_there(
    certificates: Certificates,
    folder: CertificateFolder,
    authority: trustme.CA,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = certificates.current()
    cert, key = issue(authority)
    folder.cert.write_bytes(cert)
    for _ in range(5):
        clock.now += LOOK_SECONDS
        assert certificates.current() is first
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "--tls-key-file" in caplog.text and "PRIVATE" not in caplog.text
    folder.key.write_bytes(key)
    clock.now += LOOK_SECONDS
    assert certificates.current().cert == cert


def test_files_that_vanish_change_nothing(certificates, folder, clock, caplog):
    first = certificates.current()
    folder.cert.unlink()
    for _ in range(3):
        clock.now += LOOK_SECONDS
        assert certificates.current() is first
    assert caplog.text.count("cannot be read") == 1


def test_files_that_could_not_be_used_are_tried_again_though_they_are_the_same(folder, clock, authority):
    """Their time has not begun, or a disk fails for a while: their dates show nothing of that."""
    usable = True

    def read(files: TlsFiles) -> TlsMaterial:
        if not usable:
            raise ConfigError("--tls-cert-file: certificate is not yet valid")
        return read_material(files)

    certificates = Certificates(folder.internal, clock, read)
    first = certificates.current()
    cert, key = issue(authority)
    folder.write((cert, key), pem_of(authority))
    usable = False
    clock.now += LOOK_SECONDS
    assert certificates.current() is first
    usable = True
    clock.now += LOOK_SECONDS
    assert certificates.current() is first
    clock.now += RETRY_SECONDS
    assert certificates.current().cert == cert


def test_a_certificate_and_when_it_expires_are_read(tmp_path: Path, authority: trustme.CA) -> None:
    folder = CertificateFolder(tmp_path).write(issue(authority, days=10), pem_of(authority))
    found = read_material(folder.internal)
    assert found.cert == folder.cert.read_bytes() and found.ca == pem_of(authority)
    assert found.not_after == pytest.approx(time.time() + 10 * 86400, abs=60)
    assert "PRIVATE" not in repr(found)


def test_a_front_door_needs_no_ca(tmp_path: Path, authority: trustme.CA) -> None:
    folder = CertificateFolder(tmp_path).write(issue(authority, "models.example.com", days=5))
    assert read_material(folder.front_door).not_after > time.time()


def test_a_certificate_of_an_intermediate_ca_comes_with_its_chain(tmp_path: Path) -> None:
    root = trustme.CA()
    folder = CertificateFolder(tmp_path).write(issue(root.create_child_ca()), pem_of(root))
    assert read_material(folder.internal).cert.count(b"BEGIN CERTIFICATE") == 2


FAULTS: dict[str, tuple[Callable[[trustme.CA], tuple[bytes, bytes, bytes]], str]] = {
    "of another CA": (lambda a: (*issue(trustme.CA()), pem_of(a)), "--tls-cert-file .*issuer certificate"),
    "expired": (lambda a: (*issue(a, days=-0.5), pem_of(a)), "--tls-cert-file .*expired"),
    "not valid yet": (lambda a: (*issue(a, age=-1.0), pem_of(a)), "--tls-cert-file .*not yet valid"),
    "of another name": (lambda a: (*issue(a, "other.internal"), pem_of(a)), f"--tls-cert-file .*{NAME}"),
    "with another's key": (lambda a: (issue(a)[0], issue(a)[1], pem_of(a)), "--tls-key-file .*mismatch"),
    "half written": (lambda a: (issue(a)[0][:300], issue(a)[1], pem_of(a)), "--tls-cert-file"),
    "with an empty key": (lambda a: (issue(a)[0], b"", pem_of(a)), "--tls-key-file"),
    "of a form that gRPC does not read": (
        lambda a: (issue(a)[0].replace(b" CERTIFICATE", b" X509 CERTIFICATE"), issue(a)[1], pem_of(a)),
        "--tls-cert-file",
    ),
    "with an invalid CA": (lambda a: (*issue(a), b"no certificate"), "--tls-ca-file"),
    "with a CA of other bytes": (lambda a: (*issue(a), b"\xff\xfe"), "--tls-ca-file"),
    "with an empty CA": (lambda a: (*issue(a), b""), "--tls-ca-file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_certificate_that_clients_would_refuse_is_refused(tmp_path, authority, fault):
    make, words = FAULTS[fault]
    cert, key, ca = make(authority)
    folder = CertificateFolder(tmp_path).write((cert, key), ca)
    with pytest.raises(ConfigError, match=words) as caught:
        read_material(folder.internal)
    assert "PRIVATE" not in str(caught.value)


def test_a_key_with_a_password_is_refused_without_a_question(tmp_path: Path, authority: trustme.CA) -> None:
    cert, key = issue(authority)
    closed = forms.load_pem_private_key(key, None).private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.BestAvailableEncryption(b"hush")
    )
    folder = CertificateFolder(tmp_path).write((cert, closed), pem_of(authority))
    with pytest.raises(ConfigError, match="without a password"):
        read_material(folder.internal)


def made_with(key: CertificateIssuerPrivateKeyTypes, folder: CertificateFolder) -> CertificateFolder:
    """A certificate of this key, which is its own CA."""
    # OpenSSL's clock is coarser and may be a second behind this one.
    now = datetime.now(UTC) - timedelta(hours=1)
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "t")])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now, now + timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
    odd = isinstance(key, ed25519.Ed25519PrivateKey)
    cert = builder.sign(key, None if odd else hashes.SHA256()).public_bytes(forms.Encoding.PEM)
    pem = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return folder.write((cert, pem), cert)


def test_keys_that_grpc_does_not_speak_are_refused_before_all_connections_fail(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    for curve in (ec.SECP256R1(), ec.SECP384R1()):
        read_material(made_with(ec.generate_private_key(curve), folder).internal)
    read_material(made_with(rsa.generate_private_key(65537, 2048), folder).internal)
    for key in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP521R1())):
        with pytest.raises(ConfigError, match="--tls-cert-file .*gRPC does not speak: use ECDSA"):
            read_material(made_with(key, folder).internal)


def test_a_file_that_is_missing_is_named(tmp_path: Path, authority: trustme.CA) -> None:
    folder = CertificateFolder(tmp_path).write(issue(authority), pem_of(authority))
    folder.ca.unlink()
    with pytest.raises(ConfigError, match="--tls-ca-file .*ca.crt cannot be read: No such file"):
        read_material(folder.internal)


def files_of(folder: Path) -> TlsFiles:
    return TlsFiles(str(folder / CERT), str(folder / KEY), str(folder / CA), NAME)


def verified(folder: Path, ca: Path, host: str) -> None:
    """A handshake of a strict client with a server of this folder."""
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()
    server = Certificates(files_of(folder)).current().context

    def serve() -> None:
        try:
            server.wrap_socket(ours, server_side=True).close()
        except OSError:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        context.wrap_socket(theirs, server_hostname=host).close()
    finally:
        theirs.close()
        thread.join()


def test_services_and_strict_clients_take_the_certificate(tmp_path: Path) -> None:
    write_certificates(tmp_path / "tls", ["10.0.0.6", "models.example.com", "::5"], NAME, 30)
    for host in (NAME, "10.0.0.6", "models.example.com", "::5", "localhost"):
        verified(tmp_path / "tls", tmp_path / "tls" / CA, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        verified(tmp_path / "tls", tmp_path / "tls" / CA, "10.0.0.7")


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    write_certificates(tmp_path / "tls", [], NAME, 30)
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()} == {0o600}
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == sorted((CA, CA_KEY, CERT, KEY))


def test_once_more_makes_a_new_certificate_of_the_same_ca(tmp_path: Path) -> None:
    write_certificates(tmp_path, [], NAME, 30)
    ca, cert, key = ((tmp_path / name).read_bytes() for name in (CA, CERT, KEY))
    write_certificates(tmp_path, ["10.0.0.6"], NAME, 60)
    assert (tmp_path / CA).read_bytes() == ca
    assert (tmp_path / CERT).read_bytes() != cert and (tmp_path / KEY).read_bytes() != key
    verified(tmp_path, tmp_path / CA, "10.0.0.6")


def test_two_folders_do_not_trust_each_other(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_certificates(tmp_path / name, [], NAME, 30)
    mixed = replace(files_of(tmp_path / "one"), ca=str(tmp_path / "two" / CA))
    with pytest.raises(ConfigError, match="--tls-cert-file"):
        Certificates(mixed)


@pytest.mark.parametrize(
    "host", ["https://models.example.com", "a b", "models.example.com:8000", "ä.example"]
)
def test_what_is_no_host_is_refused_and_nothing_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--host .*is no host name or address"):
        write_certificates(tmp_path / "tls", [host], NAME, 30)
    assert not (tmp_path / "tls").exists()


def test_a_ca_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / CA).write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="no CA of `triptych cert`"):
        write_certificates(tmp_path, [], NAME, 30)
    assert (tmp_path / CA).read_bytes() == b"theirs"
