"""Writes the OpenAPI document into the file that the proxy serves: `make openapi`."""

from __future__ import annotations

from support.openapi.document import openapi_text
from triptych.proxy.page.endpoint import OPENAPI, STATIC

if __name__ == "__main__":
    (STATIC / OPENAPI).write_text(openapi_text(), encoding="utf-8")
