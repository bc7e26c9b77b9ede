"""The secrets among a command's flags: received, handed to children, hidden, and completed from files."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from triptych.base.config import ProxyConfig, ServiceConfig
from triptych.base.config.flags import flags_of
from triptych.base.errors import ConfigError
from triptych.store.tls import StoreTls
from triptych.store.topology.location import parse_store, with_password, with_tls_files

#: Places in /proc/self/stat after the command's name: arg_start, arg_end, env_start and env_end.
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)


def hide(options: Collection[str], variables: Collection[str]) -> None:
    """Overwrites the values of these options and variables where other processes see them. Linux only.

    Every user of a machine may read command lines, and the same user's processes an environment. What the
    kernel shows of both lies in this process's own memory; until it is overwritten, some tenths of a second
    after the start, it can be seen. The values are still in `sys.argv` and `os.environ`.
    """
    if not sys.platform.startswith("linux"):
        return
    for begin, word, follows in _words(_ARGUMENTS):
        name, is_assignment, value = word.partition(b"=")
        if is_assignment and name.decode(errors="replace") in options:
            ctypes.memset(begin + len(name) + 1, ord("*"), len(value))
        elif follows.decode(errors="replace") in options:
            ctypes.memset(begin, ord("*"), len(word))
    # A copy elsewhere first: the overwritten memory must not hold a variable any more.
    for variable in variables:
        if variable in os.environ:
            os.environ[variable] = os.environ[variable]
    for begin, word, _ in _words(_ENVIRONMENT):
        name, _, value = word.partition(b"=")
        if name.decode(errors="replace") in variables:
            ctypes.memset(begin + len(name) + 1, ord("*"), len(value))


def _words(area: tuple[int, int]) -> Iterator[tuple[int, bytes, bytes]]:
    """(address, word, word before it) of each in the area; none where the kernel does not tell."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = (int(fields[place]) for place in area)
    except (OSError, ValueError, IndexError):
        return
    before = b""
    for word in (ctypes.string_at(begin, end - begin) if begin else b"").split(b"\0"):
        yield begin, word, before
        begin, before = begin + len(word) + 1, word


#: The variable with the file's descriptor.
VARIABLE = "TRIPTYCH_SECRETS_FD"


@contextmanager
def hand_down(secrets: Mapping[str, str]) -> Iterator[int]:
    """The descriptor of a file with these variables, for a process started within the `with`."""
    with os.fdopen(os.memfd_create("secrets"), "w+b") as file:
        file.write(json.dumps(dict(secrets)).encode())
        file.flush()
        file.seek(0)
        yield file.fileno()


def receive() -> None:
    """Makes the secrets handed down to this process its variables, which no other process sees. Once."""
    descriptor = os.environ.pop(VARIABLE, "")
    if descriptor:
        with os.fdopen(int(descriptor), "rb") as file:
            os.environ.update(json.load(file))


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
