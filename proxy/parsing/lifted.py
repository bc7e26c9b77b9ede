"""Files in large bodies, lifted out before these are parsed: a decoder copies each one in one go.

Whoever makes a file of a text or of bytes asks `lifted_text` or `lifted_bytes` whether they stand for one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from triptych.base.errors import RequestError

#: Shorter texts stay in the body.
LEAST = 1 << 20
#: What the base64 of files stands behind, and how many such places are looked at.
_OPENINGS = (b";base64,", b'"data":"', b'"data": "')
_MOST = 4096
#: Bytes that are searched at once: others have the interpreter's lock in between.
_WINDOW = 4 << 20
R = TypeVar("R")
#: A body with a word in the place of each long file, and these by the words.
Lift = Callable[[bytes], tuple[bytes, dict[str, memoryview]]]
#: The lifted texts of the body that the running code parses, by what stands in their places.
_TEXTS: ContextVar[dict[str, memoryview] | None] = ContextVar("lifted", default=None)


def lifted_text(text: str) -> memoryview | None:
    """The lifted text in whose place this one stands, once."""
    texts = _TEXTS.get()
    return texts.pop(text, None) if texts else None


def lifted_bytes(word: bytes) -> memoryview | None:
    """The same of a file that was lifted as it is, out of a message."""
    texts = _TEXTS.get()
    return texts.pop(word.decode("latin-1"), None) if texts and len(word) < LEAST else None


def parse_lifted(work: Callable[[bytes], R], raw: bytes, lift: Lift | None = None) -> R:
    """`work` of a body that is known to be sound, without its files; of all of it where that fails.

    `lift`: how they are taken out; of JSON by default.
    """
    body, texts = (lift or lift_texts)(raw)
    if not texts:
        return work(raw)
    token = _TEXTS.set(texts)
    try:
        result = work(body)
    except RequestError:
        return work(raw)
    finally:
        _TEXTS.reset(token)
    # One that nobody has asked for was no file.
    return work(raw) if texts else result


def lift_texts(raw: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """Of a body in JSON."""
    if raw[:1] != b"{":
        return raw, {}
    view, name = memoryview(raw), secrets.token_hex(16)
    pieces: list[bytes | memoryview] = []
    texts: dict[str, memoryview] = {}
    at = 0
    for begin, end in _spans(raw):
        word = f"{name}{len(texts)}"
        texts[word] = view[begin:end]
        pieces += [view[at:begin], word.encode()]
        at = end
    return b"".join([*pieces, view[at:]]) if texts else raw, texts


def _spans(raw: bytes) -> list[tuple[int, int]]:
    """Where texts without an escape begin behind an opening, and end."""
    spans: list[tuple[int, int]] = []
    after = dict.fromkeys(_OPENINGS, -1)
    at = 0
    for _ in range(_MOST):
        for opening, found in after.items():
            if found < at:
                place = _find(raw, opening, at, len(raw))
                after[opening] = place + len(opening) if place >= 0 else len(raw)
        begin = min(after.values())
        if begin >= len(raw) or (end := _find(raw, b'"', begin, len(raw))) < 0:
            break
        if end - begin >= LEAST and _find(raw, b"\\", begin, end) < 0:
            spans.append((begin, end))
        at = end
    return spans


def _find(raw: bytes, what: bytes, begin: int, end: int) -> int:
    for at in range(begin, end, _WINDOW):
        if (found := raw.find(what, at, min(at + _WINDOW + len(what) - 1, end))) >= 0:
            return found
    return -1
