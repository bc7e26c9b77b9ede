"""Remedies for errors of the store, one sentence for each: refused connections, logins and commands."""

from __future__ import annotations

from triptych.store.tls import StoreTls

_CLIENT_CERTIFICATE = "it asks for a client certificate: give --store-cert-file and --store-key-file"
_UNKNOWN_CA = "its certificate is not signed by a CA that we know: give that CA's by --store-ca-file"
_OTHER_HOST = "its certificate is for another host: name the host in --store as the certificate does"
_NOT_TLS = "it does not speak TLS at this port: name its TLS port in --store, or write redis://"

_USERS = "see its user in --store and --store-password-file; `triptych store acl` prints the users"

#: By words of the error, as OpenSSL and the servers write them, in lower case. The first that fits counts.
_REMEDIES = (
    (
        "certificate has expired",
        "its certificate has expired, or this machine's clock is wrong: renew it there",
    ),
    ("certificate is not yet valid", "its certificate is not valid yet, or this machine's clock is wrong"),
    ("unable to get local issuer", _UNKNOWN_CA),
    ("unable to get issuer", _UNKNOWN_CA),
    ("self-signed certificate", _UNKNOWN_CA),
    ("hostname mismatch", _OTHER_HOST),
    ("ip address mismatch", _OTHER_HOST),
    ("alert certificate expired", "our certificate has expired: renew the file of --store-cert-file"),
    ("alert unknown ca", "it does not know the CA of --store-cert-file: have it signed by the store's CA"),
    ("alert certificate unknown", "it refuses the certificate of --store-cert-file: see the store's log"),
    ("alert bad certificate", "it refuses the certificate of --store-cert-file: see the store's log"),
    ("certificate required", _CLIENT_CERTIFICATE),
    # What TLS 1.2 says where no client certificate was sent.
    ("alert handshake failure", _CLIENT_CERTIFICATE),
    ("protocol version", "it speaks no TLS version from 1.2 on: switch TLS 1.2 or 1.3 on there"),
    ("unsupported protocol", "it speaks no TLS version from 1.2 on: switch TLS 1.2 or 1.3 on there"),
    ("wrong version number", _NOT_TLS),
    ("record layer failure", _NOT_TLS),
    ("connection refused", "start the store, or correct host and port in --store"),
    ("errno 111", "start the store, or correct host and port in --store"),
    ("error 111", "start the store, or correct host and port in --store"),
    ("no such file", "start the store, or correct the socket's path in --store"),
    ("errno 2]", "start the store, or correct the socket's path in --store"),
    ("name or service not known", "this machine does not know the host in --store"),
    ("no address associated", "this machine does not know the host in --store"),
    ("name resolution", "this machine does not know the host in --store"),
    ("without any password configured", "it has no password: leave the password out"),
    ("wrongpass", f"the user or the password is wrong: {_USERS}"),
    ("username-password pair", f"the user or the password is wrong: {_USERS}"),
    ("authentication required", "it wants a password: give --store-password-file"),
    ("unauthenticated", "it wants a password: give --store-password-file"),
    ("noauth", "it wants a password: give --store-password-file"),
    ("no permissions", f"its user may not do that: {_USERS}"),
    ("noperm", f"its user may not do that: {_USERS}"),
    ("protected mode", "it answers only on its own machine: give it a password or users"),
    ("reply type byte", "no Redis or Valkey answers there: correct host and port in --store"),
    ("max number of clients", "raise its maxclients"),
    ("used memory > 'maxmemory'", "raise its maxmemory, and set maxmemory-policy volatile-lru"),
    ("db index is out of range", "it has not so many databases: leave the number out of --store"),
)


#: Words of errors, in lower case, of a server that says nothing.
_SILENT = (
    *("closed by server", "connection reset", "connection lost", "broken pipe", "no answer", "eof occurred"),
    # What redis-py says of an error without words.
    "error connecting to",
)


def with_remedy(error: object) -> str:
    """The error's text and, after a colon, what helps against it, where that is known."""
    text = str(error)
    lowered = text.lower().replace("_", " ")
    remedies = (remedy for pattern, remedy in _REMEDIES if pattern in lowered)
    return next((f"{text.rstrip('.')}: {remedy}" for remedy in remedies), text)


def has_remedy(error: object) -> bool:
    """Whether the error's text ends with what helps against it, or asks what may."""
    text = str(error)
    return text.endswith(("?)", "rediss://)", *(remedy for _, remedy in _REMEDIES)))


def is_denied(error: object) -> bool:
    """Whether the store's answer is about the user and not about the value."""
    return any(word in str(error) for word in ("NOPERM", "NOAUTH", "unauthenticated"))


def with_first_remedy(error: object, tls: StoreTls | None) -> str:
    """As `with_remedy`, for a server that has never answered: why it may be silent.

    A server that refuses a client's certificate often resets the connection before the client has read why.
    """
    text = with_remedy(error)
    if text != str(error) or not any(pattern in text.lower() for pattern in _SILENT):
        return text
    if tls is None:
        return f"{text} (at its TLS port, write rediss://)"
    if tls.cert_file:
        return f"{text} (is this its TLS port, and does it accept the certificate of --store-cert-file?)"
    return f"{text} (is this its TLS port, and does it ask for a client certificate, --store-cert-file?)"
