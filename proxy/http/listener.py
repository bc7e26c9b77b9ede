"""The listening TCP socket of the proxy's HTTP server."""

from __future__ import annotations

import socket

from triptych.base.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address. ConfigError when it is taken; port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(port_error("--port", host, port, error)) from None
    listener.setblocking(False)
    return listener


def port_error(flag: str, host: str, port: int, error: OSError | RuntimeError) -> str:
    """The message for a port that cannot be bound; `flag` is the one that sets it."""
    if isinstance(error, OSError) and error.errno not in (98, 48, 10048):
        return f"cannot listen on {host}:{port}: {error.strerror}"
    return f"port {port} is taken: {flag} N picks another"
