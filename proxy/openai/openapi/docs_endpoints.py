"""What the server says of itself: its version, its OpenAPI document, and the page of it."""

from __future__ import annotations

from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triptych import __version__
from triptych.proxy.openai.openapi.docs_page import make_page
from triptych.proxy.openai.openapi.document import make_openapi


class DocsEndpoints:
    """Everything is made at the first request for it."""

    def __init__(self, *, max_choices: int) -> None:
        self._max_choices = max_choices

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(make_openapi(max_choices=self._max_choices))

    @cached_property
    def _page(self) -> str:
        return make_page(make_openapi(max_choices=self._max_choices))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def document(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        # The page needs nothing but its own style.
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(self._page, media_type="text/html", headers=headers)
