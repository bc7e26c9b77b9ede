"""Triptych: serving multimodal models with encode, prefill and decode disaggregated."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.apps.client import AsyncClient as AsyncClient
    from triptych.apps.client import Client as Client

__version__ = "0.3.0"


def __getattr__(name: str) -> object:
    """The clients and their errors, imported on first use: services need none."""
    if name in ("AsyncClient", "Client"):
        try:
            from triptych.apps import client
        except ModuleNotFoundError as error:
            if error.name != "httpx2":
                raise
            remedy = "pip install 'triptych[client]'"
            raise ModuleNotFoundError(f"triptych.{name} needs httpx2: {remedy}", name="httpx2") from error
        return getattr(client, name)
    if name == "errors":
        return importlib.import_module("triptych.base.errors")
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")
