"""The value of --store: URLs of servers, of a Redis Cluster, or of a primary behind Sentinels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from urllib.parse import unquote, urlsplit

from triptych.base.errors import ConfigError
from triptych.store import address as single
from triptych.store.address import StoreAddress, parse_store_url
from triptych.store.tls import StoreTls

_CLUSTER_PORT, _SENTINEL_PORT = 6379, 26379
#: What separates URLs: spaces, or commas, which inside a URL separate hosts.
_BETWEEN = re.compile(r"\s*,\s*(?=[a-z+]+://)|\s+")
_FORMS = (
    "write redis+cluster://host:port[,host:port] or redis+sentinel://host:port[,host:port]/NAME[/db], "
    "with rediss for TLS"
)


class Kind(Enum):
    """What a URL of --store names."""

    SERVER = "server"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """Where the store is.

    `servers` holds the one server, some nodes of the cluster, or the Sentinels, which know the primary by
    `service`; the credentials in it are the store's.
    """

    kind: Kind
    servers: tuple[StoreAddress, ...]
    service: str = ""

    @property
    def label(self) -> str:
        """The location as logs and messages may show it: without credentials."""
        first = self.servers[0]
        if self.kind is Kind.SERVER:
            return first.label
        scheme, _, rest = first.label.partition("://")
        hosts = ",".join(_host_and_port(server) for server in self.servers)
        path = f"/{self.service}/{first.db}" if self.kind is Kind.SENTINEL else f"/{rest.partition('/')[2]}"
        return f"{scheme}+{self.kind.value}://{hosts}{path}"


def parse_store(text: str) -> StoreLocation:
    """What --store names; ConfigError, without any password, for another text."""
    urls = _urls(text)
    if len(urls) > 1:
        raise ConfigError(
            f"--store names {len(urls)} addresses, and takes one: to spread embeddings over several servers, "
            "join them in a Redis Cluster and write redis+cluster://host:port,host:port"
        )
    return _location(urls[0])


def with_password(text: str, password: str) -> str:
    """The same with this password; ConfigError when it has a password already."""
    return _changed(text.strip(), lambda url: single.with_password(url, password))


def with_tls_files(text: str, files: StoreTls) -> str:
    """The same with the files in its query; ConfigError for files that TLS cannot begin with."""
    return _changed(text.strip(), lambda url: single.with_tls_files(url, files))


def redacted(text: str) -> str:
    """The same with *** in place of every password."""
    return _changed(text.strip(), single.redacted)


def has_password(text: str) -> bool:
    """Whether a password is written in the URL."""
    return any(server.password for server in parse_store(text).servers)


def is_on_this_machine(text: str) -> bool:
    """Whether the URL is a unix socket's, which other machines cannot reach."""
    return text.strip().startswith("unix:")


@dataclass(frozen=True, slots=True)
class _Url:
    """A URL with several hosts, as `one` URL with the first of them, and the `hosts` as written."""

    one: str
    kind: Kind
    hosts: tuple[str, ...]
    service: str = ""

    def with_one(self, one: str) -> str:
        """The URL in full, with the credentials and the query of `one`."""
        parts = urlsplit(one)
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        path = f"/{self.service}{parts.path}" if self.service else parts.path
        query = f"?{parts.query}" if parts.query else ""
        return f"{parts.scheme}+{self.kind.value}://{user}{','.join(self.hosts)}{path}{query}"


def _urls(text: str) -> list[str]:
    return _BETWEEN.split(text.strip())


def _changed(url: str, change: Callable[[str], str]) -> str:
    split = _split(url)
    return change(url) if split is None else split.with_one(change(split.one))


def _location(url: str) -> StoreLocation:
    split = _split(url)
    if split is None:
        address = parse_store_url(url)
        if "," in address.host:
            raise ConfigError(
                "--store names several hosts: write redis+cluster://host:port,host:port for a Redis Cluster"
            )
        return StoreLocation(Kind.SERVER, (address,))
    first = parse_store_url(split.one)
    if split.kind is Kind.CLUSTER and first.db:
        raise ConfigError(
            "--store names a database of a Redis Cluster, which has only number 0: leave it out"
        )
    return StoreLocation(split.kind, tuple(_at(first, host) for host in split.hosts), unquote(split.service))


def _split(url: str) -> _Url | None:
    """The URL's parts; None for one of a single server. ConfigError for an invalid one."""
    scheme, mark, rest = url.partition("://")
    base, plus, kind = scheme.partition("+")
    if not mark or not plus or base not in ("redis", "rediss") or kind not in ("cluster", "sentinel"):
        return None
    before, query_mark, query = rest.partition("?")
    netloc, slash, path = before.partition("/")
    user, at, places = netloc.rpartition("@")
    default = _SENTINEL_PORT if kind == "sentinel" else _CLUSTER_PORT
    hosts = tuple(
        host if ":" in host.rpartition("]")[2] else f"{host}:{default}" for host in places.split(",")
    )
    if "#" in rest or "@" in path + query or "" in places.split(","):
        raise ConfigError(
            f"--store is not a store address: {_FORMS}; in a password, /, ?, # and @ are percent-encoded"
        )
    service = ""
    if kind == "sentinel":
        service, slash, path = path.partition("/")
        if not service:
            raise ConfigError(f"--store names Sentinels and not their primary: {_FORMS}")
    one = f"{base}://{user}{at}{hosts[0]}{slash}{path}{query_mark}{query}"
    return _Url(one, Kind(kind), hosts, service)


def _at(first: StoreAddress, host: str) -> StoreAddress:
    """The address of another host, with all else as in `first`."""
    other = parse_store_url(f"redis://{host}")
    return replace(first, host=other.host, port=other.port)


def _host_and_port(server: StoreAddress) -> str:
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"{host}:{server.port}"
