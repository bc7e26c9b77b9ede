"""Errors in OpenAI's shape: the body, and how long to wait."""

from __future__ import annotations

import math

from triptych.base.errors import RequestError
from triptych.proxy.http.sse import to_json


def error_body(error: RequestError) -> dict[str, object]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_json(error: RequestError) -> bytes:
    return to_json(error_body(error))


def retry_after(error: RequestError) -> str | None:
    return None if error.retry_after is None else str(max(math.ceil(error.retry_after), 1))
