"""Flags of security, checked: files of TLS, and which clients may connect (addresses, token, API keys)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

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


#: Shortest internal token.
MIN_TOKEN_CHARS = 16
#: Tokens in force at once: the old and the new one.
MAX_TOKENS = 2


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to `host`."""
    return host in ("127.0.0.1", "::1", "localhost")


def is_on_this_machine(address: str) -> bool:
    """Whether calls to a worker's address, `host:port` or `unix:path`, stay on this machine."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))


def check_front_door(host: str, *, api_key: str, api_key_file: str, auth: bool) -> None:
    """ConfigError when the cluster is open to other machines without API keys or --no-auth."""
    if not auth and (api_key or api_key_file):
        raise ConfigError("--no-auth and API keys contradict each other: leave one of them out")
    if auth and not is_loopback(host) and not api_key and not api_key_file:
        raise ConfigError(
            f"--host {host} is reachable from other machines: give --api-key-file or --api-key "
            "(`triptych key NAME` makes one), say --no-auth where a gateway asks for keys, or bind 127.0.0.1"
        )


def read_internal_token(token: str, path: str) -> str:
    """The cluster's token, from the flag or from the file. ConfigError when the file cannot be used.

    A file may hold several in lines: the first one is sent and signs, all of them are accepted.
    """
    if not path:
        return _long_enough(token, "--internal-token")
    if token:
        raise ConfigError("--internal-token and --internal-token-file are both set: leave one of them out")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--internal-token-file {path} cannot be read") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(lines) <= MAX_TOKENS or not all(line.isascii() and line.isprintable() for line in lines):
        raise ConfigError(
            f"--internal-token-file {path} must hold one line of printable ASCII characters; "
            f"{MAX_TOKENS} lines while the token is rotated"
        )
    return "\n".join(_long_enough(line, f"--internal-token-file {path}") for line in lines)


def _long_enough(token: str, flag: str) -> str:
    """The token, or none. It signs registrations in the store: a short one could be guessed from them."""
    if token and len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{flag} has fewer than {MIN_TOKEN_CHARS} characters: `openssl rand -hex 32` makes one"
        )
    return token


def check_bind(host: str, internal_token: str) -> None:
    """ConfigError when a worker's gRPC server would be reachable from outside without a token."""
    if not is_loopback(host) and not internal_token:
        raise ConfigError(
            f"--host {host} is reachable from other machines: set --internal-token, or bind 127.0.0.1"
        )


def check_advertise(advertise: str) -> None:
    """ConfigError for an advertised address that no other machine can reach."""
    if advertise.rsplit(":", 1)[0] in ("0.0.0.0", "[::]", "::", ""):
        raise ConfigError(
            f"--advertise {advertise!r} is not an address that proxies can reach: "
            "name this host, like 10.0.0.7:50051"
        )
