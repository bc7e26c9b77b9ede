"""Checks of the flags that decide which clients may connect: addresses, the internal token, API keys."""

from __future__ import annotations

from pathlib import Path

from triptych.base.errors import ConfigError

#: Shortest internal token.
MIN_TOKEN_CHARS = 16
#: Tokens in force at once: the old and the new one.
MOST_TOKENS = 2


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
    if not 1 <= len(lines) <= MOST_TOKENS or not all(line.isascii() and line.isprintable() for line in lines):
        raise ConfigError(
            f"--internal-token-file {path} must hold one line of printable ASCII characters; "
            f"{MOST_TOKENS} lines while the token is rotated"
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
