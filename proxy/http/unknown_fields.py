"""Fields of a request that the server does not know: named in a header of the reply, or refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from triptych.base.request.unknown_field import unknown_field

HEADER = b"x-triptych-ignored-fields"
#: Fields of OpenAI and vLLM that change nothing here, which is said in docs/api.md: they are never refused.
WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction"),
        *("reasoning_effort", "verbosity", "priority", "request_id", "length_penalty", "early_stopping"),
        "guided_decoding_backend",
    )
)
_MAX_NAMES = 16
_MAX_BYTES = 512
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def names_of(raw: bytes) -> Collection[str]:
    """The members of a JSON object, whose values are passed over."""
    return _members.decode(raw).keys()


def ignored_header(
    names: Iterable[str], known: Collection[str], *, reject: bool
) -> tuple[tuple[bytes, bytes], ...]:
    """The header that names those that are not `known`, if any; InvalidRequest with `reject`."""
    ignored = [name for name in names if name not in known]
    for name in ignored:
        if reject and name not in WITHOUT_EFFECT:
            raise unknown_field(name, known, "leave it out (--unknown-fields)")
    shown = ", ".join(re.sub(r"[^!-+\--~]", "?", name[:64]) for name in ignored[:_MAX_NAMES])
    return ((HEADER, shown.encode()[:_MAX_BYTES]),) if ignored else ()
