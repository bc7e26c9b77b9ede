"""The store's address, read from its URL and completed by files that flags name."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlsplit

from triptych.base.errors import ConfigError
from triptych.store.tls import StoreTls

_REMEDY = "write unix:///path/to/socket, redis://host:port/0, or rediss:// for TLS"


#: The names in a URL's query, which are redis-py's, of the files of TLS.
_TLS_NAMES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}


#: In an error reply, the words before the arguments of a command that the server does not know.
_REPEATED = ", with args beginning with"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One server. Either `path` of a unix socket or `host` and `port`, these with TLS where `tls` is set."""

    path: str = ""
    host: str = ""
    port: int = 6379
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: StoreTls | None = None

    @property
    def label(self) -> str:
        """The address as logs and messages may show it: without credentials."""
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.db}"

    def without_password(self, text: object) -> str:
        """A message of the server or a library, redacted: some repeat the command that was sent."""
        shown = str(text).partition(_REPEATED)[0]
        return shown.replace(self.password, "***") if self.password else shown

    def greeting(self) -> list[tuple[str, ...]]:
        """Commands to send on a new connection: AUTH where needed, SELECT if not only AUTH is needed.

        Never none: a server that wants a password refuses the first command, and were that a large value, it
        would close the connection, which may be seen before its answer.
        """
        commands: list[tuple[str, ...]] = []
        if self.password:
            names = (self.username,) if self.username else ()
            commands.append(("AUTH", *names, self.password))
        if self.db or not self.password:
            commands.append(("SELECT", str(self.db)))
        return commands


def parse_store_url(url: str) -> StoreAddress:
    """The address in `unix://[user:password@]/path[?db=N]` or `redis://[user:password@]host[:port][/db]`.

    `rediss://` is TLS, with the files that `with_tls_files` has put into the query. ConfigError for anything
    else; the message never repeats a password.
    """
    parts = _parts_of(url)
    port = parts.port or 6379
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix" and parts.path:
        db = parse_qs(parts.query).get("db", ["0"])[0]
        return StoreAddress(path=unquote(parts.path), db=_db(db), username=username, password=password)
    if parts.scheme in ("redis", "rediss") and parts.hostname:
        number = _db(parts.path.strip("/") or "0")
        tls = _tls(parts) if parts.scheme == "rediss" else None
        return StoreAddress(
            host=parts.hostname, port=port, db=number, username=username, password=password, tls=tls
        )
    raise ConfigError(f"--store has an unsupported scheme: {_REMEDY}")


def with_password(url: str, password: str) -> str:
    """The address with this password; ConfigError when it has one already."""
    parse_store_url(url)
    parts = _parts_of(url)
    if parts.password:
        raise ConfigError("--store has a password and --store-password-file too: leave one of them out")
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{place}").geturl()


def with_tls_files(url: str, files: StoreTls) -> str:
    """The address with the files in its query; ConfigError for files that TLS cannot begin with."""
    if not url.startswith("rediss"):
        if files != StoreTls():
            raise ConfigError(
                "--store-ca-file, --store-cert-file and --store-key-file are for TLS to a store: name it by "
                "--store rediss://host:port/0"
            )
        return url
    parts = _parts_of(url)
    if files != StoreTls():
        if parts.query:
            raise ConfigError("--store has a query and --store-ca-file or its kin too: leave one of them out")
        named = {name: getattr(files, each) for each, name in _TLS_NAMES.items() if getattr(files, each)}
        parts = parts._replace(query=urlencode(named, quote_via=quote))
    tls = _tls(parts)
    if bool(tls.cert_file) != bool(tls.key_file):
        raise ConfigError("--store-cert-file and --store-key-file go together: give both or none")
    tls.context()
    return parts.geturl()


def _tls(parts: SplitResult) -> StoreTls:
    """The files that the URL's query names."""
    options = parse_qs(parts.query)
    if not options.keys() <= set(_TLS_NAMES.values()):
        raise ConfigError(f"--store may have {', '.join(_TLS_NAMES.values())} in its query, and nothing else")
    return StoreTls(**{each: options[name][0] for each, name in _TLS_NAMES.items() if name in options})


def redacted(url: str) -> str:
    """The address with *** in place of a password."""
    parts = _parts_of(url)
    if not parts.password:
        return url
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:***@{place}").geturl()


def _parts_of(url: str) -> SplitResult:
    """Parses a URL; ConfigError for an invalid one, and where a password would be read as another part."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError(f"--store is not a store address: {_REMEDY}") from None
    outside = parts.hostname if parts.scheme == "unix" else "@" in parts.path + parts.query
    if outside or parts.fragment:
        raise ConfigError(
            f"--store is not a store address: {_REMEDY}; in a user or password, /, ?, #, @ and % are written "
            "%2F, %3F, %23, %40 and %25"
        )
    return parts


def _db(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--store names a database that is not a number: {_REMEDY}")
    return int(text)
