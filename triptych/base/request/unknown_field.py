"""The error for a field that a request does not have, with the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from triptych.base.errors import InvalidRequest

_SHOWN = 64
_LIKELY_MEANT = {"image": "files", "images": "files"}


def unknown_field(name: str, known: Iterable[str], remedy: str) -> InvalidRequest:
    """The error, with `remedy` where no name of `known` is near."""
    known = list(known)
    near = difflib.get_close_matches(name[:_SHOWN], known, n=1)
    meant = near[0] if near else _LIKELY_MEANT.get(name, "")
    advice = f"did you mean {meant}?" if meant in known else remedy
    shown = name[:_SHOWN] if name.isprintable() else ascii(name[:_SHOWN])
    return InvalidRequest(f"{shown} is not a field of this request: {advice}", param=name[:_SHOWN])
