"""The files of TLS as flags name them: those between the services, and those of the proxy's front door."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from triptych.base.config.access import is_loopback
from triptych.base.config.proxy import ProxyConfig
from triptych.base.config.service import ServiceConfig
from triptych.base.errors import ConfigError

S = TypeVar("S", bound=ServiceConfig)

_INTERNAL = ("--tls-cert-file", "--tls-key-file", "--tls-ca-file")
_FRONT_DOOR = ("--http-cert-file", "--http-key-file")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a certificate, its key and, for mutual TLS, the CA; `name` is the DNS name of all services.

    `flags` are the options that name the files, for error messages.
    """

    cert: str
    key: str
    ca: str = ""
    name: str = ""
    flags: tuple[str, ...] = _INTERNAL

    @property
    def named(self) -> list[tuple[str, str]]:
        """(flag, path) of each file."""
        return [(flag, path) for flag, path in zip(self.flags, (self.cert, self.key, self.ca), strict=False)]


def internal_tls(config: ServiceConfig) -> TlsFiles | None:
    """The files of gRPC between services; None where it is not encrypted. ConfigError when one is missing."""
    paths = (config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
    if not _all_given(_INTERNAL, paths):
        return None
    if not config.tls_name:
        raise ConfigError("--tls-name is empty: say the DNS name that all services' certificates carry")
    return TlsFiles(*paths, name=config.tls_name)


def front_door_tls(config: ProxyConfig) -> TlsFiles | None:
    """The files of the proxy's HTTP and gRPC ports; None where those are not encrypted."""
    paths = (config.http_cert_file, config.http_key_file)
    return TlsFiles(*paths, flags=_FRONT_DOOR) if _all_given(_FRONT_DOOR, paths) else None


def with_tls_of(config: S, other: ServiceConfig) -> S:
    """The config with the TLS between services that another one of the cluster has."""
    return replace(
        config,
        tls_cert_file=other.tls_cert_file,
        tls_key_file=other.tls_key_file,
        tls_ca_file=other.tls_ca_file,
        tls_name=other.tls_name,
        insecure=other.insecure,
    )


def _all_given(flags: tuple[str, ...], paths: tuple[str, ...]) -> bool:
    missing = [flag for flag, path in zip(flags, paths, strict=True) if not path]
    if not missing or len(missing) == len(flags):
        return not missing
    given = [flag for flag in flags if flag not in missing]
    raise ConfigError(f"{' and '.join(given)} needs {' and '.join(missing)} too: TLS takes all of them")


def check_worker_encryption(host: str, config: ServiceConfig) -> None:
    """ConfigError when a worker would talk to other machines in clear text, and nobody has said so."""
    if internal_tls(config) is None and not is_loopback(host) and not config.insecure:
        raise ConfigError(
            f"--host {host} is reachable from other machines: give {', '.join(_INTERNAL)}, "
            "or say --insecure where the network itself encrypts"
        )


def check_front_encryption(config: ProxyConfig) -> None:
    """ConfigError when the front door would talk to other machines in clear text, and nobody has said so."""
    internal_tls(config)
    if front_door_tls(config) is None and not is_loopback(config.host) and not config.insecure:
        keys = "API keys, " if config.api_key or config.api_key_file else ""
        raise ConfigError(
            f"--host {config.host} without TLS shows {keys}prompts and answers to the network: give "
            f"{' and '.join(_FRONT_DOOR)}, or say --insecure where a gateway or mesh encrypts"
        )
