"""A small reverse proxy that serves a server below a path prefix, as a gateway does."""

from __future__ import annotations
