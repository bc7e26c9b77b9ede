"""The SSL context of a connection to the store: made of files, and made again when they are renewed."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from support.processes.authority import Authority
from triptych.base.errors import ConfigError
from triptych.store.tls import StoreTls


@pytest.fixture(autouse=True)
def _look_at_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.base.rpc.tls.certificates.LOOK_SECONDS", 0.0)


def test_every_context_verifies_the_host_and_speaks_tls_1_2_or_later(tmp_path: Path) -> None:
    for files in (StoreTls(), Authority(tmp_path).client()):
        context = files.context()
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_ca_file_replaces_the_cas_of_the_system(tmp_path: Path) -> None:
    assert len(Authority(tmp_path).client().context().get_ca_certs()) == 1


def encrypted_key(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    shown = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hush"))
    path.write_bytes(shown)


@pytest.mark.parametrize("broken", ["ca_file", "cert_file", "key_file"])
@pytest.mark.parametrize("how", ["missing", "empty", "text"])
def test_a_file_that_cannot_be_used_is_named_by_its_flag(tmp_path: Path, broken: str, how: str) -> None:
    files = Authority(tmp_path).client()
    path = Path(getattr(files, broken))
    path.write_text("" if how == "empty" else "no certificate")
    if how == "missing":
        path.unlink()
    with pytest.raises(ConfigError, match=f"--store-{broken.replace('_', '-')} {path}"):
        files.context()


def test_a_key_of_another_certificate_or_with_a_password_is_refused_without_a_question(tmp_path):
    authority = Authority(tmp_path)
    files, other = authority.client(), authority.client("other")
    with pytest.raises(ConfigError, match="--store-key-file .* must hold the key of --store-cert-file"):
        StoreTls(files.ca_file, files.cert_file, other.key_file).context()
    encrypted_key(Path(files.key_file))
    with pytest.raises(ConfigError, match="unencrypted"):
        files.context()
