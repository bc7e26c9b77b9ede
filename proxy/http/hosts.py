"""Own names: under which a proxy without keys on loopback answers, so that no page from elsewhere reaches it.

A browser sends what any page asks for to this machine too: a form's POST at once, and, under a name that the
page's own DNS points to 127.0.0.1, everything, with the replies. Both carry a foreign name, which no page can
change.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.base.config import ProxyConfig, is_loopback
from triptych.base.errors import ConfigError, Forbidden, printable
from triptych.proxy.http.connections import OPEN_PATHS
from triptych.proxy.http.refusals import refuse

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\\\s]+")
_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9_-]*[a-z0-9])?)*\.?")


class OwnNames:
    """The names of `--allowed-hosts`, this machine's own, and the origins of `--allowed-origins`."""

    def __init__(self, hosts: str = "", origins: str = "") -> None:
        self._hosts = frozenset(_checked(name) for name in _words(hosts))
        self._origins = frozenset(read_origins(origins))

    def has_host(self, host: str) -> bool:
        """Whether a Host header, with or without a port, is one of them."""
        name = _name(host)
        if ANY in self._hosts or name in self._hosts or name == "localhost":
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def has_origin(self, origin: str) -> bool:
        """Whether a page's origin is one of them, of any port; `null` is nobody's."""
        if ANY in self._origins or origin in self._origins:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and self.has_host(parts.netloc)


def own_names(config: ProxyConfig, *, keys: bool) -> OwnNames | None:
    """The names under which the proxy answers; None: under every one. ConfigError for what is no name."""
    names = OwnNames(config.allowed_hosts, config.allowed_origins)
    return None if keys or not is_loopback(config.host) else names


def read_origins(text: str) -> list[str]:
    """The origins of `--allowed-origins`, as browsers write them. ConfigError for what is none."""
    origins = [word.lower() for word in _words(text)]
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins {printable(origin[:80])!r} is no origin: write scheme and host, and "
                "a port where it needs one, without a path, like https://chat.example, or * for any"
            )
    return origins


def _words(text: str) -> Iterable[str]:
    return (word.strip() for word in text.split(",") if word.strip())


def _checked(name: str) -> str:
    lowered = name.lower().strip("[]")
    try:
        return str(ipaddress.ip_address(lowered))
    except ValueError:
        pass
    if name != ANY and not _NAME.fullmatch(lowered):
        raise ConfigError(
            f"--allowed-hosts {name[:80]!r} is no host name: write names or addresses without scheme and "
            "port, separated by commas, or * for any"
        )
    return lowered.rstrip(".")


def _name(host: str) -> str:
    """The name without a port, brackets and the final point."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


class HostMiddleware:
    """ASGI middleware: 403 to requests for a foreign host or of a foreign page, but for probes."""

    def __init__(self, app: ASGIApp, names: OwnNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["path"] in OPEN_PATHS else self._error(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refuse(error, scope, receive, send)

    def _error(self, scope: Scope) -> Forbidden | None:
        for header, has, flag in (
            (b"host", self._names.has_host, "--allowed-hosts"),
            (b"origin", self._names.has_origin, "--allowed-origins"),
        ):
            if any(name == header and not has(value.decode("latin-1")) for name, value in scope["headers"]):
                # What it is stands in no reply: it is anybody's text.
                return Forbidden(
                    f"the header {header.decode().title()} is foreign here, where no API keys are in use: "
                    f"the operator can name what it says with {flag}, or use keys"
                )
        return None
