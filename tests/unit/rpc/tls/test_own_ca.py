"""`triptych cert`: a CA and certificates that services, clients and strict verifiers take."""

from __future__ import annotations

import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from support.certificates import NAME
from triptych.base.config import TlsFiles
from triptych.base.errors import ConfigError
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.own_ca import CA, CA_KEY, CERT, KEY, write_certificates


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
