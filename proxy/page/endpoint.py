"""The HTTP endpoints of the page: `/` and the files under `/page/`. They hold no data and need no key."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych.proxy.page.files import INDEX, PageFile, page_files

#: No inline script or style, nothing from another origin, and no way to make HTML of a text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class PageEndpoints:
    """GET and HEAD of the page's files; a browser asks each time whether its copy is still the newest."""

    def __init__(self) -> None:
        self._files = page_files()

    def routes(self) -> list[Route]:
        return [Route("/", self.index), Route("/page/{name:path}", self.file)]

    async def index(self, request: Request) -> Response:
        return _reply(request, self._files[INDEX])

    async def file(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _reply(request, found)


def _reply(request: Request, file: PageFile) -> Response:
    headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": file.etag}
    if _matches(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.data, media_type=file.media_type, headers=headers)


def _matches(wanted: str, etag: str) -> bool:
    """If-None-Match: a list of tags, weak ones too (a gateway that compresses weakens them), or `*`."""
    tags = {tag.strip().removeprefix("W/") for tag in wanted.split(",")}
    return etag in tags or "*" in tags
