"""The store's client as its probes use it: `ping` to a pod's server; exit code 0 when it has answered."""

from __future__ import annotations

import socket
import sys


def main(ip: str, *words: str) -> int:
    port = int(words[words.index("-p") + 1])
    with socket.create_connection((ip, port), timeout=10) as connection:
        connection.sendall(f"{words[-1]}\r\n".encode())
        return 0 if connection.recv(64)[:1] in (b"+", b"-") else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
