"""What `triptych serve --launcher ray` refuses before anything starts, and what services on Ray are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from support.certificates import CertificateFolder, issue, pem_of
from support.options import serve_config
from triptych.apps.launch.ray.flags import check_shared, with_files, with_own_files
from triptych.apps.launch.ray.pools import plan_actors
from triptych.base.config import ServeConfig
from triptych.base.errors import ConfigError

STORE = "redis://10.0.0.5:6379/0"


@pytest.fixture
def folder(tmp_path: Path) -> CertificateFolder:
    authority = trustme.CA()
    return CertificateFolder(tmp_path / "tls").write(issue(authority), pem_of(authority))


def config_of(tmp_path: Path, *words: str, address: str = "10.0.0.1:6379") -> ServeConfig:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    common = ("--launcher", "ray", "--store", STORE, "--internal-token-file", str(token))
    return serve_config(*common, "--address", address, *words)


def test_services_on_several_nodes_need_tls_or_a_flag_that_allows_clear_text(tmp_path, folder):
    with pytest.raises(ConfigError, match="--tls-cert-file.*--insecure"):
        check_shared(config_of(tmp_path))
    check_shared(config_of(tmp_path, "--insecure"))
    check_shared(config_of(tmp_path, *folder.flags))
    check_shared(config_of(tmp_path, address="127.0.0.1:6379"))  # its nodes are this machine


def test_a_ray_of_this_machine_has_a_token_and_certificates_of_its_own(tmp_path, folder):
    run = tmp_path / "run"
    run.mkdir()
    config = with_files(with_own_files(serve_config("--launcher", "ray"), run))
    assert len(Path(config.proxy.internal_token_file).read_text()) >= 32
    for pool in plan_actors(config, model="", store="unix:///s", home="10.0.0.1").values():
        command = " ".join(pool.command)
        assert f"--tls-cert-file {run}/tls/cert.pem" in command, pool.name
        assert "--insecure" not in command, "what is sent from actor to actor is encrypted"
    assert {path.stat().st_mode & 0o777 for path in (run / "tls").iterdir()} == {0o600}
    given = with_own_files(serve_config("--launcher", "ray", *folder.flags), run)
    assert given.proxy.tls_cert_file == str(folder.cert)


def test_certificates_that_cannot_be_used_are_refused_on_this_node_already(tmp_path, folder):
    folder.key.write_bytes(b"")
    with pytest.raises(ConfigError, match="--tls-key-file"):
        with_files(config_of(tmp_path, *folder.flags))


def test_workers_and_proxies_get_the_files_by_absolute_paths(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--tls-cert-file", "tls/tls.crt", "--tls-key-file", "tls/tls.key", "--tls-ca-file", "tls/ca.crt")
    config = with_files(
        config_of(tmp_path, *words, "--http-cert-file", "tls/tls.crt", "--http-key-file", "tls/tls.key")
    )
    pools = plan_actors(config, model="", store=STORE, home="10.0.0.1")
    for pool in pools.values():
        command = " ".join(pool.command)
        assert f"--tls-cert-file {folder.cert} --tls-key-file {folder.key}" in command
        assert f"--tls-ca-file {folder.ca}" in command
        assert ("--http-key-file" in command) is (pool.name == "proxy")


def test_every_service_is_given_the_files_of_tls_to_the_store_by_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ("--store-ca-file", "ca.pem", "--store-cert-file", "c.pem", "--store-key-file", "c.key")
    config = with_files(config_of(tmp_path, "--insecure", *files))
    pools = plan_actors(config, model="", store="rediss://10.0.0.5:6379/0", home="10.0.0.1")
    for pool in pools.values():
        for flag, file in zip(files[::2], files[1::2], strict=True):
            assert f"{flag} {tmp_path / file}" in " ".join(pool.command), pool.name
