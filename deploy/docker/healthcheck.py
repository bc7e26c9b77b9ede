"""The images' HEALTHCHECK: exits with 0 where `GET /health` on the container's metrics port answers 200.

Kubernetes asks by its own HTTP probes and does not run this.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping, Sequence

#: Bound to these, a server answers on loopback as well.
_EVERY_ADDRESS = ("0.0.0.0", "::")
#: Longest wait for an answer; less than the timeout of the HEALTHCHECK.
_SECONDS = 3.0


def address(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, int]:
    """Where the service of this command line and environment serves /health; flags win over variables."""

    def setting(flag: str, default: str) -> str:
        value = environment.get(f"TRIPTYCH_{flag.upper().replace('-', '_')}") or default
        for word, following in zip(command, [*command[1:], ""], strict=True):
            if word == f"--{flag}":
                value = following
            elif word.startswith(f"--{flag}="):
                value = word.partition("=")[2]
        return value

    host = setting("metrics-host", "") or setting("host", "127.0.0.1")
    return ("127.0.0.1" if host in _EVERY_ADDRESS else host), int(setting("metrics-port", "9100"))


def healthy(host: str, port: int) -> bool:
    """Whether GET /health answers 200 in time."""
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main() -> None:
    """Asks the container's first process, whose command line has the flags."""
    with open("/proc/1/cmdline", encoding="utf-8") as file:
        command = file.read().split("\0")
    host, port = address(command, os.environ)
    if not healthy(host, port):
        sys.exit(f"http://{host}:{port}/health does not answer 200")


if __name__ == "__main__":
    main()
