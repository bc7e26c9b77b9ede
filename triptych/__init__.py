"""Triptych: serving multimodal models with encode, prefill and decode disaggregated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.client import AsyncClient as AsyncClient
    from triptych.client import Client as Client

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The clients, imported on first use: services need none."""
    if name in ("AsyncClient", "Client"):
        from triptych import client

        return getattr(client, name)
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")
