"""Replies of many parts, one for each call without generation."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.proxy.call.chat import Done
from triptych.proxy.http.endpoint import CURRENT_DELIVERY
from triptych.proxy.http.json_body import to_json
from triptych.proxy.quotas.quota import HOLDER, Quota


class PooledReply:
    """A reply of one part for each call, which count as the reply's memory as they come."""

    def __init__(self, quota: Quota, count: int = 0) -> None:
        self._hold = quota.hold(HOLDER.get(), 0)
        if (delivery := CURRENT_DELIVERY.get()) is not None:
            delivery.keep(self._hold)
        self._parts: list[bytes] = [b""] * count
        self._prompt_tokens = self._cached_tokens = 0

    def put(self, index: int, part: bytes) -> None:
        """QuotaExceeded where there is no memory for the part."""
        self._hold.add(len(part))
        self._parts[index] = part

    def append(self, part: bytes) -> None:
        """As `put`, after all parts."""
        self._hold.add(len(part))
        self._parts.append(part)

    def count(self, done: Done) -> None:
        """A call's prompt is part of the usage."""
        self._prompt_tokens += done.usage.prompt_tokens
        self._cached_tokens += done.usage.cached_tokens

    def body(self, head: Mapping[str, object], name: str) -> bytes:
        """The JSON reply, its parts under `name`."""
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
        before, after = to_json({**head, name: [], "usage": usage}).split(f'"{name}":[]'.encode())
        return b"".join((before, f'"{name}":['.encode(), b",".join(self._parts), b"]", after))
