"""The secrets of a command: taken from where a person or the supervisor gives them, and shown to nobody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from triptych.cli.options import ENV_PREFIX
from triptych.config import ProxyConfig, flags_of
from triptych.ec_connector.store.address import with_password
from triptych.errors import ConfigError
from triptych.launch.secrets.handed_down import take_over
from triptych.launch.secrets.hidden import hide

_NAMES = [name for name, _, metadata in flags_of(ProxyConfig) if metadata["secret"]]
_VARIABLES = {ENV_PREFIX + name.upper() for name in _NAMES}
_OPTIONS = {"--" + name.replace("_", "-") for name in _NAMES}


def receive_secrets() -> None:
    """Before the command line is read: what was handed down is there, what was typed is hidden."""
    take_over()
    hide(_OPTIONS, _VARIABLES)


def forget_variables() -> None:
    """After it: no process that this one starts inherits a secret."""
    for name in _VARIABLES:
        os.environ.pop(name, None)


def store_of(values: dict[str, Any]) -> str:
    """The store's address, with the password of --store-password-file; ConfigError when it cannot be told."""
    store, path = str(values["store"]), str(values["store_password_file"])
    if not path:
        return store
    if store in ("", "auto"):
        raise ConfigError("--store-password-file is for a store of yours: name it by --store")
    try:
        password = Path(path).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--store-password-file {path} cannot be read") from None
    if not password or "\n" in password:
        raise ConfigError(f"--store-password-file {path} must hold one line, the password")
    return with_password(store, password)
