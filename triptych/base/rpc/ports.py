"""Ports to listen at: whether one can be bound, and what helps where it cannot."""

from __future__ import annotations

import errno
import os
import socket

from triptych.base.errors import ConfigError

_TAKEN = os.strerror(errno.EADDRINUSE)
_FORBIDDEN = os.strerror(errno.EACCES)


def port_error(host: str, port: int) -> str:
    """Why the port cannot be bound; "" where it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            return "no such port"
        except OSError as error:
            return error.strerror or str(error)
    return ""


def check_port(host: str, port: int, flag: str) -> None:
    """ConfigError when the port cannot be bound."""
    if why := port_error(host, port):
        raise refused_port(host, port, flag, why)


def refused_port(host: str, port: int, flag: str, why: str = "") -> ConfigError:
    """That nothing can listen there: why, as given or as found now, and what helps."""
    why = why or port_error(host, port) or _TAKEN
    remedy = f"put an address of this machine in place of {host}"
    if why in (_TAKEN, _FORBIDDEN, "no such port"):
        remedy = f"{flag} N picks another" + (", from 1024 on" if why == _FORBIDDEN else "")
    return ConfigError(f"{flag} {port} on {host} cannot be used ({why}): {remedy}")
