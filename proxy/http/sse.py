"""Server-sent events that carry JSON, as OpenAI streams them."""

from __future__ import annotations

import msgspec

#: The event after the last one.
DONE = b"data: [DONE]\n\n"
to_json = msgspec.json.Encoder().encode


def event(body: object) -> bytes:
    """One event."""
    return b"data: " + to_json(body) + b"\n\n"
