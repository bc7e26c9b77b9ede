"""Pages about the server: its version, its OpenAPI document, and that document as one HTML page."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triptych import __version__
from triptych.proxy.openai.openapi.document import make_openapi
from triptych.proxy.page.endpoint import POLICY, SECURITY_HEADERS
from triptych.proxy.page.files import STYLE, page_files


class DocsEndpoints:
    """Endpoints of the documentation, each generated once. `page`: whether the web page is served too."""

    def __init__(self, *, max_choices: int, page: bool = True) -> None:
        self._max_choices = max_choices
        self._with_page = page

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(make_openapi(max_choices=self._max_choices))

    @cached_property
    def _page(self) -> str:
        return make_page(make_openapi(max_choices=self._max_choices), with_page=self._with_page)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def document(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        policy = POLICY if self._with_page else _STYLE_ALONE
        headers = {**SECURITY_HEADERS, "content-security-policy": policy, "cache-control": "no-cache"}
        return Response(self._page, media_type="text/html", headers=headers)


def _style() -> str:
    return page_files()[STYLE].data.decode()


def _policy_of(style: str) -> str:
    """Nothing but this one style, which is in the page itself."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; frame-ancestors 'none'"


_STYLE_ALONE = _policy_of(_style())
_LINKS = (
    '<link rel="icon" href="page/icon.svg" type="image/svg+xml">'
    '<link rel="stylesheet" href="page/style.css"><script type="module" src="page/docs.js"></script>'
)
_BAR = (
    '<header class="bar"><a class="brand" href=".">'
    '<img src="page/icon.svg" alt="" width="26" height="26">Triptych</a><nav aria-label="Views">'
    '<a href=".#try">Try</a><a href=".#watch">Watch</a><a href="docs" aria-current="page">API</a></nav>'
    '<div class="tools"><button type="button" id="theme-button" class="quiet icon" hidden></button>'
    "</div></header>"
)


def make_page(document: Mapping[str, Any], *, with_page: bool = True) -> str:
    """The whole page: beside the page's files with their style and runnable examples, else by itself."""
    title = escape(document["info"]["title"])
    head = _LINKS if with_page else f"<style>{_style()}</style>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>API · {title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{head}</head><body>{_BAR if with_page else ''}"
        f'<main class="docs"><h1>{title}: the API</h1>'
        f'<p class="soft">{escape(document["info"]["description"])} '
        'The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        + "".join((*_contents(document), *_operations(document)))
        + "</main></body></html>\n"
    )


def _contents(document: Mapping[str, Any]) -> Iterator[str]:
    yield '<nav class="contents" aria-label="Operations">'
    for path in document["paths"]:
        yield f'<a href="#{escape(_anchor(path))}">{escape(path)}</a>'
    yield "</nav>"


def _anchor(path: str) -> str:
    return path.strip("/").replace("/", "-")


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f'<section class="card operation" id="{escape(_anchor(path))}">'
            yield f'<h2><span class="method {method}">{method.upper()}</span>'
            yield f" <code>{escape(path)}</code></h2>"
            yield f"<p>{escape(operation['summary'])}.</p>"
            if "requestBody" in operation:
                yield from _body(document, path, operation["requestBody"]["content"])
            elif path not in _NOT_RUN and "parameters" not in operation:
                yield f'<div class="example" data-method="get" data-path="{escape(path.lstrip("/"))}"></div>'
            answers = ", ".join(
                f"{status} ({escape(reply['description'].split(':')[0].lower())})"
                for status, reply in operation["responses"].items()
            )
            yield f'<p class="soft small">Replies: {answers}.</p></section>'


#: Their answers are this page, and what it is made of.
_NOT_RUN = frozenset({"/docs", "/openapi.json"})


def _body(document: Mapping[str, Any], path: str, contents: Mapping[str, Any]) -> Iterator[str]:
    """The fields and the examples; those in JSON can be run where the page's script is."""
    ((kind, content),) = contents.items()
    yield from _fields(document, content)
    for name, example in content["examples"].items():
        if "form" in kind:
            yield f'<pre class="code">{escape(_shell(path, example["value"]))}</pre>'
            continue
        marks = f'data-method="post" data-path="{escape(path.lstrip("/"))}" data-name="{escape(name)}"'
        yield f'<div class="example" {marks}><pre class="code">{escape(_json(example["value"]))}</pre></div>'


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _shell(path: str, fields: Mapping[str, str]) -> str:
    """A form as a command to paste, where the server is in a variable; a file's value begins with @."""
    words = [f"-F {name}={value}" for name, value in fields.items()]
    return " ".join([f"curl $TRIPTYCH_URL{path}", *words])


def _fields(document: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[str]:
    schema = _resolved(document, content["schema"])
    required = set(schema.get("required", ()))
    yield f'<details><summary>{len(schema["properties"])} fields</summary><div class="wide"><table>'
    yield "<tr><th>field<th>type<th>meaning</tr>"
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        star = " (required)" if name in required else ""
        yield (
            f"<tr><td><code>{escape(name)}</code>{star}<td>{escape(_type(field))}"
            f"<td>{escape(field.get('description', ''))}</tr>"
        )
    yield "</table></div></details>"


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return found


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words; null goes without saying."""
    if "anyOf" in schema:
        kinds = [_type(kind) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"] if value is not None)
    kind = str(schema.get("type", "any"))
    if kind == "array" and "items" in schema:
        return f"list of {_type(schema['items'])}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    if low is not None and "maximum" in schema:
        return f"{kind}, {low} to {schema['maximum']}"
    return kind
