"""The page's files: a fixed table in memory, read once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blake3 import blake3

from triptych.demo import examples

STATIC = Path(__file__).with_name("static")
#: The documents of `/` and `/docs`, and the style of both.
INDEX, DOCS, STYLE = "index.html", "docs.html", "style.css"
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
