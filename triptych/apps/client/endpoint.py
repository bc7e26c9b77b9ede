"""The address of a cluster, and how httpx's requests and replies are made and read."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import httpx2

from triptych.apps.client.fields import JsonObject
from triptych.apps.client.wire import AudioForm, error_of
from triptych.base.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_SECONDS = 10.0

Body = JsonObject | AudioForm | None


class Endpoint:
    """A cluster's URL with the settings of the connections to it; `timeout` is the longest silence."""

    def __init__(self, url: str, api_key: str, timeout: float, ca_file: str = "") -> None:
        if not url.lower().startswith(("http://", "https://")):
            raise InvalidRequest(f"{url!r} is not the URL of a cluster: write http://host:port", param="url")
        self.url = url.rstrip("/").removesuffix("/v1")
        #: The arguments of httpx's client.
        self.options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx2.Timeout(timeout, connect=_CONNECT_SECONDS),
            **({"verify": _trusting(ca_file)} if ca_file else {}),
        }

    def error_of(self, error: httpx2.TransportError) -> RequestError:
        """The error of a failed connection. A timeout is not tried again: the request may be running."""
        if isinstance(error, httpx2.ReadTimeout):
            return DeadlineExceeded(f"{self.url} has been silent for too long: set a longer timeout")
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return InvalidRequest(
                f"the certificate of {self.url} is not trusted ({error}): name its CA by ca_file (--ca-file)",
                param="ca_file",
            )
        if "WRONG_VERSION_NUMBER" in str(error):
            return InvalidRequest(f"{self.url} takes no TLS: write http:// in place of https://", param="url")
        if isinstance(error, httpx2.RemoteProtocolError):
            if str(error).startswith("illegal"):
                return InvalidRequest(
                    f"{self.url} does not speak HTTP ({error}): perhaps it is the gRPC port", param="url"
                )
            return Unavailable(
                f"{self.url} closes connections: perhaps it takes https://, or only gRPC ({error})"
            )
        return Unavailable(
            f"no server answers at {self.url} ({error or type(error).__name__}): "
            "start one, `triptych serve`, or name its address (--url)"
        )


def _trusting(ca_file: str) -> ssl.SSLContext:
    """Trust in the CAs of this file alone."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl's errors are OSErrors
        reason = error.strerror or "no PEM certificate"
        raise InvalidRequest(f"{ca_file} holds no CA certificates: {reason}", param="ca_file") from None


def content_of(body: Body) -> dict[str, Any]:
    """The body as arguments of httpx's `request`."""
    return {"data": body.fields, "files": body.files} if isinstance(body, AudioForm) else {"json": body}


def checked(reply: httpx2.Response) -> httpx2.Response:
    """The reply, whose body has been read; raises the error that a status of 400 or above stands for."""
    if reply.status_code >= 400:
        raise error_of(reply.status_code, reply.content, reply.headers.get("retry-after"))
    return reply


def json_object(reply: httpx2.Response) -> JsonObject:
    """The reply's JSON object; InternalError when it is none."""
    try:
        value = reply.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InternalError("the server's reply is not a JSON object")
    return value


def field_of(reply: JsonObject, name: str) -> Any:
    """One field of a reply; InternalError when it is missing."""
    if name not in reply:
        raise InternalError(f"the server's reply has no {name}")
    return reply[name]


async def in_thread(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What `make` makes of these, in a thread: it reads files."""
    return await asyncio.to_thread(make, *args, **options)


def at_once(make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """What `make` makes of these: `in_thread` of the blocking client."""
    return make(*args, **options)
