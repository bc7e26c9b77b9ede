"""Names of workers and calls as live data show them."""

from __future__ import annotations

import os

#: Longest short address.
_MOST = 32


def short_address(address: str) -> str:
    """A worker's address for a narrow column: of a host's name the first label, of a path its last part."""
    if "/" in address:
        return address.rstrip("/").rpartition("/")[2][-_MOST:]
    host, colon, port = address.rpartition(":")
    label = host.partition(".")[0]
    if colon and label and not label.isdigit() and "[" not in host and "." in host:
        return f"{label[:_MOST]}:{port}" if label[:_MOST] else address
    return address[-_MOST:]


def draw_row() -> str:
    """A name for a row, drawn for it alone: it is part of no id, and cannot be guessed."""
    return os.urandom(4).hex()
