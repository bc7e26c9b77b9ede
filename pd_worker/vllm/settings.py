"""The flags of --engine vllm, checked."""

from __future__ import annotations

from pathlib import Path

from yarl import URL

from triptych.config import PDConfig
from triptych.errors import ConfigError

#: Flags that choose how the native engine computes, and what they have to be.
_NATIVE = (
    ("tensor_parallel", 1, "give vLLM's --tensor-parallel-size"),
    ("quantization", "none", "the weights are vLLM's"),
)


def check_engine(config: PDConfig) -> None:
    """ConfigError, naming flag and remedy, for what --engine vllm cannot work with."""
    if not config.engine_url:
        raise ConfigError(
            "--engine vllm needs --engine-url: the address of a running `vllm serve`, like "
            "http://10.0.0.7:8000 (an engine inside this process is not served)"
        )
    _check_url(config.engine_url)
    if config.dtype == "auto":
        raise ConfigError(
            "--engine vllm needs --dtype: the one that vLLM computes in, such as bfloat16, which "
            "encoders and other PD workers of the model are given, too"
        )
    for name, needed, remedy in _NATIVE:
        if getattr(config, name) != needed:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for --engine native: {remedy}, and leave {option} out here")


def _check_url(text: str) -> None:
    try:
        url = URL(text)
        port = url.port
    except ValueError as error:
        raise ConfigError(f"--engine-url {text[:200]!r} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or not port:
        raise ConfigError(f"--engine-url {text[:200]!r}: give http://host:port or https://host:port")
    if url.user or url.password:
        raise ConfigError("--engine-url holds credentials: give vLLM's key by --engine-key-file")
    if url.query or url.fragment:
        raise ConfigError(f"--engine-url {text[:200]!r}: leave out what comes after the path")


def read_key(file: str) -> str:
    """The key in --engine-key-file; "" without a file."""
    if not file:
        return ""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--engine-key-file {file} cannot be read: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--engine-key-file {file} holds no key of printable characters")
    return key
