"""Certificates follow their files; what cannot be used changes nothing and is logged once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trustme

from support.certificates import CertificateFolder, issue, pem_of
from triptych.base.config import TlsFiles
from triptych.base.errors import ConfigError
from triptych.base.rpc.tls.certificates import LOOK_SECONDS, RETRY_SECONDS, Certificates
from triptych.base.rpc.tls.material import TlsMaterial, read_material


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def folder(tmp_path: Path, authority: trustme.CA) -> CertificateFolder:
    return CertificateFolder(tmp_path).write(issue(authority), pem_of(authority))


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def certificates(folder: CertificateFolder, clock: _Clock) -> Certificates:
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


def test_files_that_are_as_they_were_are_not_read_again(certificates: Certificates, clock: _Clock) -> None:
    first = certificates.current()
    clock.now += LOOK_SECONDS
    assert certificates.current() is first


def test_a_certificate_without_its_new_key_changes_nothing_until_that_is_there(
    certificates: Certificates,
    folder: CertificateFolder,
    authority: trustme.CA,
    clock: _Clock,
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
