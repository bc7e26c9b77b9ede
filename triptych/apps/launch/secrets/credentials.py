"""The secrets among a command's flags: received, hidden from other processes, and completed from files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from triptych.apps.launch.secrets.handed_down import receive
from triptych.apps.launch.secrets.hidden import hide
from triptych.base.config import ProxyConfig, ServiceConfig
from triptych.base.config.flags import flags_of
from triptych.base.errors import ConfigError
from triptych.store.tls import StoreTls
from triptych.store.topology.location import parse_store, with_password, with_tls_files

S = TypeVar("S", bound=ServiceConfig)

#: The flags of files that complete the store's address.
_FILES = ("store_password_file", "store_ca_file", "store_cert_file", "store_key_file")
_SECRETS = [flag for flag in flags_of(ProxyConfig) if flag.secret]


def receive_secrets() -> None:
    """Call before the command line is read: makes secrets of the supervisor variables, hides typed ones."""
    receive()
    hide({flag.option for flag in _SECRETS}, {flag.variable for flag in _SECRETS})


def forget_variables() -> None:
    """Call after the command line is read: no process that this one starts inherits a secret."""
    for flag in _SECRETS:
        os.environ.pop(flag.variable, None)


def store_url(store: str, given: ServiceConfig) -> str:
    """The store's address with the password and the files of TLS that the flags name.

    ConfigError when they cannot be used.
    """
    if store in ("", "auto"):
        if option := next((flag for flag in _FILES if getattr(given, flag)), ""):
            raise ConfigError(f"--{option.replace('_', '-')} is for a store of yours: name it by --store")
        return store
    parse_store(store)
    url = with_tls_files(store, StoreTls(given.store_ca_file, given.store_cert_file, given.store_key_file))
    return with_password(url, password_in(given.store_password_file)) if given.store_password_file else url


def without_store_files(config: S) -> S:
    """The config whose store's address is complete."""
    return replace(config, store_password_file="", store_ca_file="", store_cert_file="", store_key_file="")


def password_in(path: str, option: str = "--store-password-file") -> str:
    """The password in the file of a flag; ConfigError when it holds none."""
    try:
        password = Path(path).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{option} {path} cannot be read") from None
    if not password or "\n" in password:
        raise ConfigError(f"{option} {path} must hold one line, the password")
    return password
