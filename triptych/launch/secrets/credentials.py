"""The secrets among a command's flags: received, hidden from other processes, and completed from files."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.config import ProxyConfig
from triptych.config.flags import flags_of
from triptych.ec_connector.store.address import with_password
from triptych.errors import ConfigError
from triptych.launch.secrets.handed_down import receive
from triptych.launch.secrets.hidden import hide

_SECRETS = [flag for flag in flags_of(ProxyConfig) if flag.secret]


def receive_secrets() -> None:
    """Call before the command line is read: makes secrets of the supervisor variables, hides typed ones."""
    receive()
    hide({flag.option for flag in _SECRETS}, {flag.variable for flag in _SECRETS})


def forget_variables() -> None:
    """Call after the command line is read: no process that this one starts inherits a secret."""
    for flag in _SECRETS:
        os.environ.pop(flag.variable, None)


def store_url(store: str, password_file: str) -> str:
    """The store's address with the password of the file; ConfigError when it cannot be used."""
    if not password_file:
        return store
    if store in ("", "auto"):
        raise ConfigError("--store-password-file is for a store of yours: name it by --store")
    try:
        password = Path(password_file).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--store-password-file {password_file} cannot be read") from None
    if not password or "\n" in password:
        raise ConfigError(f"--store-password-file {password_file} must hold one line, the password")
    return with_password(store, password)
