"""The flags of a cluster on Ray: secrets only in files, a store that all nodes reach, ports that differ."""

from __future__ import annotations

import re
import secrets
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from triptych.base.config import ServeConfig, check_front_door, internal_tls, is_loopback, read_internal_token
from triptych.base.errors import ConfigError
from triptych.base.rpc.tls.certificates import proxy_certificates
from triptych.store.topology.location import has_password, is_on_this_machine

#: Between the ports of proxy-0 and proxy-1.
PROXY_PORT_STEP = 10
#: A certificate of our own is made again at every start.
_CERTIFICATE_DAYS = 825
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def check_cluster_name(name: str) -> None:
    """ConfigError for a name that Ray's namespaces and people could mistake."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--cluster-name {name[:60]!r}: write 1 to 40 of a-z, 0-9 and -, not beginning or ending with -"
        )


def check_flags(config: ServeConfig) -> None:
    """ConfigError for what cannot be meant on Ray."""
    check_cluster_name(config.ray.cluster_name)
    device = config.pd.device
    if device.startswith("cuda:"):
        raise ConfigError(f"--device {device}: Ray gives each worker its GPU; say --device cuda")
    if config.cpu_sharing == "pace" or config.cpus_per_worker:
        flag = "--cpus-per-worker" if config.cpus_per_worker else "--cpu-sharing pace"
        raise ConfigError(f"{flag} is for --launcher local; on Ray num_cpus in --ray-resources counts")
    if not config.proxy.port or not config.proxy.grpc_port:
        raise ConfigError(
            "--port 0 and --grpc-port 0 are for --launcher local: on Ray name the proxies' ports"
        )
    gap = abs(config.proxy.port - config.proxy.grpc_port)
    if config.ray.proxies > 1 and gap % PROXY_PORT_STEP == 0 and gap // PROXY_PORT_STEP < config.ray.proxies:
        raise ConfigError(
            f"--proxies {config.ray.proxies}: --port and --grpc-port are {gap} apart, so two proxies would "
            f"meet on one port; choose them so that {PROXY_PORT_STEP} does not divide their distance"
        )


def check_secrets(config: ServeConfig) -> None:
    """ConfigError for a secret that would be an actor's argument: Ray keeps, logs and shows those."""
    proxy = config.proxy
    if proxy.internal_token:
        raise ConfigError(_refusal("--internal-token", "--internal-token-file", "holds the token"))
    if proxy.api_key:
        raise ConfigError(
            _refusal("--api-key", "--api-key-file", "holds hashed keys (`triptych key NAME` makes one)")
        )
    if config.store != "auto" and has_password(config.store):
        raise ConfigError(_refusal("a password in --store", "--store-password-file", "holds it"))


def check_shared(config: ServeConfig) -> None:
    """ConfigError for what the nodes of an existing Ray would not share."""
    if config.store == "auto" or is_on_this_machine(config.store):
        raise ConfigError(
            f"--store {config.store}: only this machine would reach it; run Valkey or Redis where all nodes "
            "do and name it, --store redis://10.0.0.5:6379/0"
        )
    if not config.proxy.internal_token_file:
        raise ConfigError(
            "--launcher ray --address needs --internal-token-file: `openssl rand -hex 32 > FILE` on one "
            "node, then the same file, readable by you alone, at the same path on every node"
        )
    local = is_loopback(config.ray.address.rpartition(":")[0])
    if not local and internal_tls(config.proxy) is None and not config.proxy.insecure:
        raise ConfigError(
            "--launcher ray --address: services talk from node to node: give --tls-cert-file, --tls-key-file "
            "and --tls-ca-file, the same paths on every node, or say --insecure where the network encrypts"
        )


def with_files(config: ServeConfig) -> ServeConfig:
    """The config with absolute paths; ConfigError where this node lacks a file, or the front door a key."""
    # An actor's working directory is another one.
    paths: dict[str, Any] = {
        each.name: _absolute(getattr(config.proxy, each.name))
        for each in fields(config.proxy)
        if each.name.endswith(("_file", "_folder"))
    }
    proxy = replace(config.proxy, **paths)
    read_internal_token("", proxy.internal_token_file)
    if proxy.api_key_file and not Path(proxy.api_key_file).is_file():
        raise ConfigError(f"--api-key-file {proxy.api_key_file} cannot be read")
    check_front_door(proxy.host, api_key="", api_key_file=proxy.api_key_file, auth=proxy.auth)
    proxy_certificates(proxy)  # refuses what cannot be used
    return replace(config, proxy=proxy)


def with_own_files(config: ServeConfig, folder: Path) -> ServeConfig:
    """The config with a token and certificates in files of its own, where none are given.

    For a Ray of this machine alone, whose workers listen at the machine's address all the same.
    """
    proxy = config.proxy
    if not proxy.internal_token_file:
        file = folder / "internal-token"
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(32))
        proxy = replace(proxy, internal_token_file=str(file))
    if internal_tls(proxy) is None and not proxy.insecure:
        from triptych.base.rpc.tls.own_ca import CA, CERT, KEY, write_certificates

        tls = folder / "tls"
        write_certificates(tls, [], proxy.tls_name, _CERTIFICATE_DAYS)
        cert, key, ca = (str(tls / name) for name in (CERT, KEY, CA))
        proxy = replace(proxy, tls_cert_file=cert, tls_key_file=key, tls_ca_file=ca)
    return replace(config, proxy=proxy)


def _absolute(path: str) -> str:
    return path and str(Path(path).absolute())


def _refusal(given: str, file: str, what: str) -> str:
    return (
        f"--launcher ray takes no secrets as words or variables, which Ray keeps, logs and shows: in place "
        f"of {given} give {file}, which {what}, at the same path on every node"
    )
