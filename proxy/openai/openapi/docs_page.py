"""Endpoints about the server: its version, its OpenAPI document, and the page that shows that document."""

from __future__ import annotations

from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triptych import __version__
from triptych.proxy.openai.openapi.document import make_openapi
from triptych.proxy.page.endpoint import SECURITY_HEADERS
from triptych.proxy.page.files import DOCS, page_files


class DocsEndpoints:
    """Endpoints of the documentation, each generated once. `page`: whether there is a page to describe."""

    def __init__(self, *, max_choices: int, page: bool = True) -> None:
        self._max_choices = max_choices
        self._with_page = page

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(make_openapi(max_choices=self._max_choices, page=self._with_page))

    @cached_property
    def _page(self) -> bytes:
        # As data for the page's script: nothing in it ends the element that it stands in.
        return page_files()[DOCS].data.replace(b"OPENAPI", self._document.replace(b"<", b"\\u003c"))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def document(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache"}
        return Response(self._page, media_type="text/html", headers=headers)
