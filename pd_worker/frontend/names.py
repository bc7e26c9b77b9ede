"""Names that other processes give: checked before anything is filed under them."""

from __future__ import annotations

import re
from collections.abc import Sized

from triptych.errors import InvalidRequest

#: Keys of one notice.
MAX_KEYS = 16384
#: Requests named in one call.
MAX_REQUESTS = 65536
# No slash: what caches know an attempt by is put together with slashes. No space and no control character:
# names go into logs.
_NAME = re.compile(r"[!-.0-~]{1,256}")


def check_name(field: str, value: str) -> None:
    """InvalidRequest unless `value` can name a proxy or a request."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            f"{field} must have 1 to 256 printable ASCII characters, no space and no slash", param=field
        )


def check_label(value: str) -> None:
    """InvalidRequest for a request's label that does not belong into logs; it may be empty."""
    if value and not _NAME.fullmatch(value):
        raise InvalidRequest(
            "label must have at most 256 printable ASCII characters, no space and no slash", param="label"
        )


def check_count(field: str, values: Sized, limit: int) -> None:
    """InvalidRequest when one call names more than `limit`."""
    if len(values) > limit:
        raise InvalidRequest(
            f"{field} holds {len(values)} entries; one call takes at most {limit}", param=field
        )
