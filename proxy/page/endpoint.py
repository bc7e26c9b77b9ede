"""HTTP endpoints of the page: `/`, `/docs` and files under `/page/`. They hold no data and need no key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blake3 import blake3
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych.demo import examples

STATIC = Path(__file__).with_name("static")
#: The documents of `/` and `/docs`, and the style of both.
INDEX, DOCS, STYLE = "index.html", "docs.html", "style.css"
#: The API's description, which `make openapi` writes; also at `/openapi.json`.
OPENAPI = "openapi.json"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file's bytes with the headers that go with them."""

    data: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Every file by its path under /page/. What is not in this table is not served, whatever a path says."""
    files = {path.name: _file(path.name, path.read_bytes()) for path in STATIC.iterdir() if _served(path)}
    for path in examples.FOLDER.glob("*.png"):
        files[f"examples/{path.name}"] = _file(path.name, path.read_bytes())
    files["examples.json"] = _file("examples.json", _questions())
    return files


def _served(path: Path) -> bool:
    return path.suffix in _MEDIA_TYPES


def _file(name: str, data: bytes) -> PageFile:
    return PageFile(data, _MEDIA_TYPES[Path(name).suffix], f'"{blake3(data).hexdigest()[:32]}"')


def _questions() -> bytes:
    """The demo's questions with the names of their pictures."""
    shown = [
        {"pictures": [path.name for path in paths], "question": question}
        for paths, question, _ in examples.QUESTIONS
    ]
    return json.dumps(shown).encode()


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
        return [
            Route("/", self.index),
            Route("/docs", self.docs),
            Route("/page/{name:path}", self.file),
        ]

    async def index(self, request: Request) -> Response:
        return _reply(request, self._files[INDEX])

    async def docs(self, request: Request) -> Response:
        return _reply(request, self._files[DOCS])

    async def file(self, request: Request) -> Response:
        static = self._files.get(request.path_params["name"])
        if static is None:
            raise HTTPException(404)
        return _reply(request, static)


async def openapi(request: Request) -> Response:
    """The API's description, whether or not there is a page."""
    return _reply(request, page_files()[OPENAPI])


def _reply(request: Request, file: PageFile) -> Response:
    headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": file.etag}
    if _matches(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.data, media_type=file.media_type, headers=headers)


def _matches(if_none_match: str, etag: str) -> bool:
    """If-None-Match: a list of tags, weak ones too (a gateway that compresses weakens them), or `*`."""
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return etag in tags or "*" in tags
