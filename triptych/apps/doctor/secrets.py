"""Files of tokens, keys, passwords and certificates: who may read them, and whether they can be used."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from triptych.apps.doctor.finding import CheckResult, fail, fail_of, note, ok
from triptych.apps.doctor.machine import readable_by_others
from triptych.base.config import ProxyConfig, check_front_door, read_internal_token
from triptych.base.config.flags import flags_of
from triptych.base.config.tls import TlsFiles, check_front_encryption, front_door_tls, internal_tls
from triptych.base.errors import ConfigError
from triptych.proxy.auth.keys import KeyLimits, KeyRing

#: Days before its end from which on a certificate is worth a line of its own.
SOON_DAYS = 14
_SECRET_FILES = ("internal_token_file", "store_password_file", "api_key_file")
_KEY_FILES = ("store_key_file", "tls_key_file", "http_key_file")


def check_secrets(config: ProxyConfig) -> list[CheckResult]:
    """The files that are named by flags, what they hold, and whether the front door may be open as it is."""
    findings = [_file(option, path) for option, path in _named(config)]
    findings += _attempt("internal token", lambda: _token(config))
    findings += _attempt("API keys", lambda: _keys(config))
    findings += _attempt("front door", lambda: _front_door(config))
    findings += _attempt("internal TLS", lambda: _certificate("internal TLS", internal_tls(config)))
    findings += _attempt("front TLS", lambda: _certificate("front TLS", front_door_tls(config)))
    return findings


def _named(config: ProxyConfig) -> list[tuple[str, str]]:
    given = {flag.name: flag.option for flag in flags_of(ProxyConfig)}
    names = [name for name in (*_SECRET_FILES, *_KEY_FILES) if name in given]
    return [(given[name], str(getattr(config, name))) for name in names if getattr(config, name)]


def _file(option: str, name: str) -> CheckResult:
    path = Path(name)
    try:
        with path.open("rb"):
            others_read, others_write = readable_by_others(path)
    except OSError as error:
        return fail(option, f"{path}: {error.strerror}", "give a file that this user may read")
    if others_write:
        return fail(option, f"{path} may be written by other users", f"chmod 600 {path}")
    if others_read:
        return note(
            option,
            f"{path} may be read by other users",
            f"chmod 600 {path}; in Kubernetes defaultMode: 0440 with fsGroup, where it is mounted",
        )
    return ok(option, str(path))


def _token(config: ProxyConfig) -> CheckResult:
    token = read_internal_token(config.internal_token, config.internal_token_file)
    if not token:
        return note("internal token", "none: `triptych serve` makes one for this machine alone")
    lines = len(token.splitlines())
    return ok("internal token", "is set" if lines == 1 else f"{lines} are in force: a rotation is under way")


def _keys(config: ProxyConfig) -> CheckResult:
    ring = KeyRing(config.api_key, config.api_key_file, KeyLimits())
    if not ring.in_use:
        return note("API keys", "none: every client is let in")
    return ok("API keys", "are asked for")


def _front_door(config: ProxyConfig) -> CheckResult:
    check_front_door(config.host, api_key=config.api_key, api_key_file=config.api_key_file, auth=config.auth)
    check_front_encryption(config)
    return ok("front door", f"--host {config.host} may be served as configured")


def _certificate(name: str, files: TlsFiles | None) -> CheckResult:
    from triptych.base.rpc.tls.material import read_material

    if files is None:
        return note(name, "none")
    return certificate_finding(name, read_material(files).not_after, time.time())


def certificate_finding(name: str, not_after: float, now: float) -> CheckResult:
    """A certificate that ends at `not_after`, in seconds since 1970."""
    days = (not_after - now) / 86400
    if days <= 0:
        found = f"the certificate expired {-days:.1f} days ago"
        return fail(name, found, "replace its files: they are read again")
    if days < SOON_DAYS:
        return note(name, f"the certificate expires in {days:.1f} days", "see why it is not renewed")
    return ok(name, f"the certificate is valid for {days:.0f} days")


def _attempt(check: str, find: Callable[[], CheckResult]) -> list[CheckResult]:
    """The finding, or the failure that a ConfigError tells: it names the flag and the remedy."""
    try:
        return [find()]
    except ConfigError as error:
        return [fail_of(check, error)]
