"""What the server says of itself: its version, its OpenAPI document, and that document as one HTML page."""

from __future__ import annotations

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

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .6rem;"
    "border-bottom:1px solid #e4e4e4;vertical-align:top}code,pre{font:14px monospace}"
    "pre{background:#f5f5f5;padding:.8rem;overflow:auto}"
)


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


def make_page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    title = f"{document['info']['title']} {document['info']['version']}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><p>{escape(document['info']['description'])} "
        'The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
        + "".join(_operations(document))
        + "</html>\n"
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation['summary'])}.</p>"
            if "requestBody" in operation:
                ((kind, content),) = operation["requestBody"]["content"].items()
                yield from _fields(document, content)
                for example in content["examples"].values():
                    shown = _shell(path, example["value"]) if "form" in kind else _json(example["value"])
                    yield f"<pre>{escape(shown)}</pre>"
            answers = ", ".join(
                f"{status} ({escape(reply['description'].split(':')[0].lower())})"
                for status, reply in operation["responses"].items()
            )
            yield f"<p>Replies: {answers}.</p>"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _shell(path: str, fields: Mapping[str, str]) -> str:
    """A form as a command to paste, where the server is in a variable; a file's value begins with @."""
    words = [f"-F {name}={value}" for name, value in fields.items()]
    return " ".join([f"curl $TRIPTYCH_URL{path}", *words])


def _fields(document: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[str]:
    schema = _resolved(document, content["schema"])
    required = set(schema.get("required", ()))
    yield "<table><tr><th>field<th>type<th>meaning</tr>"
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required):
        star = " (required)" if name in required else ""
        yield (
            f"<tr><td><code>{escape(name)}</code>{star}<td>{escape(_type(field))}"
            f"<td>{escape(field.get('description', ''))}</tr>"
        )
    yield "</table>"


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
